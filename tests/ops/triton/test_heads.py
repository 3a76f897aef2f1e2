"""Queries, keys and values, interpreted, against the reference and the cache's own write."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernels import close, interpreted
from torch import Tensor

from sfumato.ops import reference

pytestmark = interpreted
EPS, HEADS, KV_HEADS, SIZE = 1e-6, 3, 2, 24


def _inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Projections as parts of one tensor, the norms' weights, the rotary tables."""
    together = torch.randn(tokens, HEADS + 2 * KV_HEADS, SIZE)
    q, k, v = together.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    angles = torch.rand(tokens, SIZE // 2) * 6
    return q, k, v, torch.randn(SIZE), torch.randn(SIZE), (angles.cos(), angles.sin())


@pytest.mark.parametrize("has_values", [True, False])
def test_heads_are_those_of_the_reference(has_values: bool) -> None:
    from sfumato.ops.triton.heads import prepare_heads

    q, k, v, q_weight, k_weight, rotary = _inputs(3)
    out = prepare_heads(q, k, v if has_values else None, q_weight, k_weight, rotary, EPS)
    close(out[0], reference.rotate(reference.rms_norm(q, q_weight, EPS), *rotary))
    close(out[1], reference.rotate(reference.rms_norm(k, k_weight, EPS), *rotary))
    close(out[2], reference.rms_norm(v if has_values else k, None, EPS))


def test_keys_and_values_are_written_where_the_cache_has_them() -> None:
    """Rows of a width of 4: one that reads only, one that writes 3, and one that writes 4 to a ring
    of 3 places; a slot that no row has stays as it is."""
    from sfumato.ops.triton.heads import CacheWrite, prepare_heads

    width, size = 4, 3
    q, k, v, q_weight, k_weight, rotary = _inputs(3 * width)
    keys, values = torch.zeros(2, 4, KV_HEADS, size, SIZE).unbind()
    slots, lengths = torch.tensor([0, 3, 1]), torch.tensor([2, 5, 7])
    counts = torch.tensor([0, 3, 4])
    write = CacheWrite(keys, values, slots, lengths, counts)
    _, new_keys, new_values = prepare_heads(q, k, v, q_weight, k_weight, rotary, EPS, write)
    expected = torch.zeros_like(keys), torch.zeros_like(values)
    for row, (slot, length, count) in enumerate(zip(slots, lengths, counts, strict=True)):
        for index in range(max(0, int(count) - size), int(count)):
            place = (int(length) + index) % size
            expected[0][slot, :, place] = new_keys[row * width + index]
            expected[1][slot, :, place] = new_values[row * width + index]
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
    assert keys[3].all() and not keys[2].any() and not keys[0].any()
