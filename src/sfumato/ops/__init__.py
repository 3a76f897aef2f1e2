"""The operations of the network: one signature each, whatever serves it.

`@operation` declares each at its reference in plain torch: here in `reference`,
`attention_reference` and `online_softmax`, and beside what they are made of the passes over the
vocabulary (`model`), the noise and the moves of rows (`diffusion`).  Faster twins register
themselves (`registry`); callers never choose.  Whether compiled kernels serve on a CPU is decided
once, at import, and `reason` says why.  This module knows no layers.
"""

from __future__ import annotations

import logging

from sfumato.ops import frozen, torch_device
from sfumato.ops.attention_reference import (
    Causal,
    Own,
    Questions,
    Rows,
    attend,
    attend_padded,
    attention,
    write_cache,
)
from sfumato.ops.cpu import kernels, library, torch_steady
from sfumato.ops.cpu.attention import multiplies_bf16
from sfumato.ops.cpu.panels import (
    ACTIVATIONS,
    column_bytes,
    pack_columns,
    packs_columns,
    rounding,
)
from sfumato.ops.online_softmax import Bans, SoftmaxState, update_softmax
from sfumato.ops.packing import pack, packed_bytes, packs
from sfumato.ops.reference import (
    Gating,
    Weight,
    after_attention,
    after_layer,
    beside,
    dense,
    embed,
    expert_products,
    experts,
    gated,
    linear,
    linear_each,
    linear_gated,
    mixture,
    own_scores,
    prepare_heads,
    rms_norm,
    rotate,
    route,
)
from sfumato.ops.triton import prepare
from sfumato.ops.triton import serving as kernels_on

__all__ = [
    "ACTIVATIONS", "Bans", "Causal", "Gating", "Own", "Questions", "Rows", "SoftmaxState",
    "Weight", "after_attention", "after_layer", "attend", "attend_padded", "attention", "backend",
    "beside", "column_bytes", "dense", "embed", "expert_products", "experts", "gated", "kernels_on",
    "linear", "linear_each", "linear_gated", "mixture", "multiplies_bf16", "own_scores", "pack",
    "pack_columns", "packed_bytes", "packs", "packs_columns", "prepare", "prepare_heads",
    "reason", "rms_norm", "rotate", "rounding", "route", "update_softmax", "write_cache",
]  # fmt: skip

TWINS = (torch_steady, kernels, torch_device, frozen)
"""The files of which nothing but what they register is used."""

backend, reason = library.describe()
"""What serves the operations on a CPU, and why, for `sfumato doctor` and the logs."""

logging.getLogger(__name__).info("operations on a CPU: %s (%s)", backend, reason)
