"""One signature per operation, and the choice of who serves it.

Every operation has a plain-torch specification in `reference`.  A faster twin serves where it can:
the compiled ones take weights that `pack` has put into panels, and dequantize blocks, on a CPU and
where no gradient is asked for.  Whether there are any is settled once, at import, and `reason` says
why; callers never choose.  This module knows no layers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.ops import online_softmax, reference
from sfumato.ops.cpu import kernels, library
from sfumato.ops.cpu.panels import ACTIVATIONS, PackedTensor, pack, packed_bytes, packs
from sfumato.ops.online_softmax import Bans, SoftmaxState
from sfumato.ops.reference import Causal, Weight, attention, gelu, rms_norm, rotate
from sfumato.weights.blocks import QuantizedTensor

__all__ = [
    "ACTIVATIONS",
    "Causal",
    "attend",
    "attention",
    "backend",
    "dense",
    "embed",
    "experts",
    "gelu",
    "linear",
    "multiplies_bf16",
    "pack",
    "packed_bytes",
    "packs",
    "reason",
    "rms_norm",
    "rotate",
    "update",
]

backend, reason = library.describe()
"""Who serves the operations on a CPU, and why, for `sfumato doctor` and the logs."""

logging.getLogger(__name__).info("operations on a CPU: %s (%s)", backend, reason)


def dense(weight: Weight, dtype: torch.dtype, spare: Tensor | None = None) -> Tensor:
    """The weight as a float tensor of `dtype`; a float tensor of that dtype is not copied.

    spare: memory of its shape and dtype, which may be taken for the result: fresh memory costs
    more than the work where weights are dequantized over and over.
    """
    if isinstance(weight, QuantizedTensor) and weight.device.type == "cpu" and library.kernels:
        return kernels.dequantize(weight, dtype, spare if dtype in kernels.DTYPES else None)
    return reference.dense(weight, dtype)


def linear(x: Tensor, weight: Weight, tile: int | None = None) -> Tensor:
    """`x @ weight.T`: x [..., in], weight [out, in] → [..., out] in x's dtype.

    tile: rows of each of torch's products, see `reference.linear`; a compiled one needs none.
    """
    if isinstance(weight, PackedTensor) and _compiled(x):
        return kernels.linear(x, weight)
    return reference.linear(x, dense(weight, x.dtype), tile)


def embed(ids: Tensor, weight: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding: ids int64 [...], weight [vocab, hidden] → [..., hidden]."""
    if isinstance(weight, QuantizedTensor):
        return dense(weight.index_select(ids.reshape(-1)), dtype).view(*ids.shape, weight.shape[-1])
    return reference.embed(ids, weight, dtype)


def experts(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """A gated-GELU mixture of experts.

    x [tokens, hidden]; chosen int64 and shares float [tokens, k]; gate_up [experts, 2·m, hidden]
    with the gate first; down [experts, hidden, m] → [tokens, hidden].
    """
    if (
        isinstance(gate_up, PackedTensor)
        and isinstance(down, PackedTensor)
        and _compiled(x, shares)
    ):
        return kernels.experts(x, chosen, shares, gate_up, down)
    return reference.experts(x, chosen, shares, gate_up, down)


def attend(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], causal: Causal | None = None
) -> Tensor:
    """Softmax attention of one row's tokens, scale 1, grouped heads.

    q [tokens, heads, d]; keys and values in parts, one after another, each [kv_heads, n, d], whose
    dtypes may differ; causal None: every token sees every key → like q.  The compiled twin
    multiplies bfloat16: it serves where a part is stored in it.
    """
    rounded = any(part.dtype == torch.bfloat16 for part in keys) and q.shape[-1] % 32 == 0
    if rounded and multiplies_bf16(q.device) and _compiled(q, *keys, *values):
        return kernels.attend(q, keys, values, causal)
    return reference.attend(q, keys, values, causal)


def update(
    state: SoftmaxState,
    raw: Tensor,
    first_id: int,
    temperature: Tensor,
    softcap: float | None,
    dtype: torch.dtype,
    bans: Bans | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes a chunk of scores into a state, in place; see `ops.online_softmax.update`."""
    serves = library.kernels is not None and dtype in kernels.DTYPES and _compiled(raw)
    serve = kernels.update if serves else online_softmax.update
    return serve(state, raw, first_id, temperature, softcap, dtype, bans)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the compiled twins multiply bfloat16 with instructions of its own."""
    return device.type == "cpu" and library.kernels is not None and library.kernels.bf16


def _compiled(*inputs: Tensor) -> bool:
    """Whether compiled twins may have these inputs."""
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return not grad and all(x.device.type == "cpu" for x in inputs)
