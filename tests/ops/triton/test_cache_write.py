"""The write of what rows commit, interpreted, against its reference."""

from __future__ import annotations

import torch
from tests.support.kernels import interpreted

from sfumato.ops import attention_reference

pytestmark = interpreted


def test_rows_write_where_the_reference_does() -> None:
    """One that writes nothing, one that writes 3 tokens, and one that writes 4 to a ring of 3; a
    slot that no row has stays as it is."""
    from sfumato.ops.triton.cache_write import write_cache

    stored, new = torch.randn(4, 3, 3, 24), torch.randn(3, 4, 3, 24)
    slots, first, count = torch.tensor([[0, 3, 1], [2, 5, 7], [0, 3, 4]])
    expected = stored.clone()
    attention_reference.write_cache.reference(expected, new, slots, first, count)
    write_cache(stored, new, slots, first, count)
    assert torch.equal(stored, expected)
