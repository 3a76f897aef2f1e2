"""Queries, keys and values, interpreted, against the reference."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernels import close, interpreted
from torch import Tensor

from sfumato.ops import attention_reference, reference

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
    from sfumato.ops.triton.norms import prepare_heads

    q, k, v, q_weight, k_weight, rotary = _inputs(3)
    out = prepare_heads(q, k, v if has_values else None, q_weight, k_weight, *rotary, EPS)
    close(
        out[0], reference.rotate.reference(reference.rms_norm.reference(q, q_weight, EPS), *rotary)
    )
    close(
        out[1], reference.rotate.reference(reference.rms_norm.reference(k, k_weight, EPS), *rotary)
    )
    close(out[2], reference.rms_norm.reference(v if has_values else k, None, EPS))


def test_rows_write_where_the_reference_does() -> None:
    """One that writes nothing, one that writes 3 tokens, and one that writes 4 to a ring of 3; a
    slot that no row has stays as it is."""
    from sfumato.ops.triton.norms import write_cache

    stored, new = torch.randn(4, 3, 3, 24), torch.randn(3, 4, 3, 24)
    slots, first, count = torch.tensor([[0, 3, 1], [2, 5, 7], [0, 3, 4]])
    expected = stored.clone()
    attention_reference.write_cache.reference(expected, new, slots, first, count)
    write_cache(stored, new, slots, first, count)
    assert torch.equal(stored, expected)
