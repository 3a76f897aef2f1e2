"""Canvases behind questions, in `attend_padded`, for `gpu_cases.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sfumato.model.cache import slot_sizes
from sfumato.ops.attention_reference import Questions, Rows

if TYPE_CHECKING:
    from benchmarks.gpu_cases import Sizes

Arguments = tuple[Any, ...]

LONGEST = 96  # tokens of a question


def reads(sizes: Sizes, seed: int, sliding: bool) -> tuple[Arguments, Callable[[int], Arguments]]:
    """The call for all rows, with questions of different lengths; and that for one row."""
    layer, (rows, width) = sizes.layer(sliding), (sizes.shape.rows, sizes.shape.width)
    d, heads, kv_heads = layer.head_dim, sizes.config.num_heads, layer.kv_heads
    (size,) = slot_sizes(replace(sizes.config, layers=(layer,)), sizes.shape.prefix + 64)
    q = sizes.random(rows, width, heads, d, deviation=d**-0.5, seed=seed)
    k, v = (sizes.random(rows, width, kv_heads, d, seed=seed + n) for n in (1, 2))
    slots = [sizes.random(rows + 1, kv_heads, size, d, seed=seed + n) for n in (3, 4)]
    beside = [sizes.random(kv_heads, rows * LONGEST, d, seed=seed + n) for n in (5, 6)]
    number = torch.arange(rows, device=sizes.device)
    held = sizes.shape.prefix - 3 * number
    first = held.clamp(0) if layer.sliding else held.clamp(0, size)
    counts = LONGEST - 7 * number % LONGEST
    window = sizes.config.sliding_window if layer.sliding else None

    def call(at: slice) -> Arguments:
        questions = Questions(*beside, (number * LONGEST)[at], counts[at], LONGEST)
        seen = Rows(*slots, (rows - number)[at], first[at], window, questions=questions)
        return q[at], k[at], v[at], seen

    return call(slice(None)), lambda row: call(slice(row, row + 1))
