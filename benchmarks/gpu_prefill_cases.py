"""A chunk of a prompt in `attend`, for `gpu_cases.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sfumato.model.cache import slot_sizes
from sfumato.ops import Causal

if TYPE_CHECKING:
    from benchmarks.gpu_cases import Sizes

Arguments = tuple[Any, ...]


def attend(sizes: Sizes, seed: int, sliding: bool) -> tuple[Arguments, Callable[[int], Arguments]]:
    """The call for all tokens of a step's size, one chunk after the prefix; and that for the tokens
    of one canvas's size among them, whose results do not depend on the others."""
    layer, tokens, prefix = sizes.layer(sliding), sizes.shape.tokens, sizes.shape.prefix
    held = slot_sizes(sizes.config, prefix)[sizes.config.layers.index(layer)]
    d, heads = layer.head_dim, sizes.config.num_heads
    q = sizes.random(tokens, heads, d, deviation=d**-0.5, seed=seed)
    keys, values = (
        [sizes.random(layer.kv_heads, n, d, seed=seed + kind) for n in (held, tokens)]
        for kind in (1, 2)
    )
    positions = torch.arange(prefix - held, prefix + tokens, device=sizes.device)
    window = sizes.config.sliding_window if layer.sliding else None

    def call(at: slice) -> Arguments:
        return q[at], keys, values, Causal.of(positions[held:][at], positions, window)

    return call(slice(None)), lambda row: call(sizes.of_row(row))
