"""Keys and values in 8 bits: how far off each number is, and what the references read of them."""

from __future__ import annotations

import pytest
import torch
from tests.support.live_bytes import LiveBytes

from sfumato import ops
from sfumato.ops import narrow_cache, registry
from sfumato.ops.narrow_cache import (
    FP8,
    Q8_0,
    as_bytes,
    beside_bytes,
    stored_as,
    stored_width,
    widened,
)

NARROW = pytest.mark.parametrize("stored", [FP8, Q8_0])


def test_an_fp8_number_is_within_a_sixteenth_and_what_is_too_large_is_clamped() -> None:
    values = torch.randn(4, 500, 32, generator=torch.Generator().manual_seed(0)) * 3
    error = (stored_as(values, FP8).float() - values).abs()
    # 3 bits of mantissa; below 2^-6 numbers are multiples of 2^-9.
    assert (error <= values.abs() / 16 + 2.0**-10).all()
    assert error.max() > 0
    assert stored_as(torch.tensor([1e4, -1e4]), FP8).float().tolist() == [448.0, -448.0]


@pytest.mark.parametrize("d", [1, 32, 40, 256])
def test_q8_0_is_within_half_a_step_of_each_block(d: int) -> None:
    """The scale is float16, so that a code's step is off by 2^-11 of itself."""
    values = torch.randn(4, 50, d, generator=torch.Generator().manual_seed(0)) * 3
    values[0, 0], values[0, 1, 0] = 0.0, 1e4  # a block of zeros, and one with an outlier
    stored = stored_as(values, Q8_0)
    blocks = -(-d // 32)
    assert stored.dtype == torch.uint8 and stored.shape == (4, 50, d + 2 * blocks)
    assert stored.shape[-1] == stored_width(d, Q8_0)
    (back,) = widened([stored], torch.float32)
    for a in range(0, d, 32):
        part, error = values[..., a : a + 32], (back - values)[..., a : a + 32].abs()
        step = part.abs().amax(-1, keepdim=True) / 127
        assert (error <= step * (0.5 + 127 * 2.0**-11) + 1e-7).all()
    assert not back[0, 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q8_0_of_what_it_cannot_hold(dtype: torch.dtype) -> None:
    values = torch.zeros(3, 64, dtype=dtype)
    values[0, 3], values[1, 3], values[2, 3] = torch.nan, torch.inf, 1e-9
    (back,) = widened([stored_as(values, Q8_0)], dtype)
    assert back[0, :32].isnan().all() and not back[0, 32:].any()  # of its block alone
    assert back.dtype == dtype and back[1].isfinite().all() and back[1, 3] > 1e6
    assert not back[2].any()  # below the least scale


@NARROW
def test_many_numbers_are_converted_in_parts(
    stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits, and not more memory beside the result than is said."""
    values = torch.randn(2, 3, 500, 64, generator=torch.Generator().manual_seed(0))
    narrow = stored_as(values, stored)
    (back,) = widened([narrow], torch.bfloat16)
    monkeypatch.setattr(narrow_cache, "AT_ONCE", 40_000)
    with LiveBytes(values) as live:
        again = stored_as(values, stored)
    assert torch.equal(as_bytes(again), as_bytes(narrow))
    most = beside_bytes(values.numel(), stored)
    assert live.most <= narrow.nbytes + most < narrow.nbytes + values.nbytes
    strided = narrow[:, :, :400]
    with LiveBytes(narrow) as live:
        (parts,) = widened([strided], torch.bfloat16)
    assert torch.equal(parts, back[:, :, :400])
    assert live.most <= parts.nbytes + most


@NARROW
def test_a_narrow_cache_is_read_as_what_it_holds(stored: torch.dtype) -> None:
    """Where kernels and twins do not serve; what an earlier request left is NaN."""
    torch.manual_seed(0)
    pools = [torch.randn(3, 2, 20, 64) for _ in range(2)]
    for pool in pools:
        pool[2, :, 9:] = pool[0] = float("nan")
    q, k, v = (torch.randn(3, 5, heads, 64) for heads in (4, 2, 2))
    slots, held, width = torch.tensor([[2, 0, 1], [9, 0, 20], [5, 3, 4]])
    narrow = [stored_as(x, stored) for x in pools]
    assert narrow[0].shape[-1] == stored_width(64, stored)
    outs = []
    with registry.reference_only():
        for stores in (narrow, widened(narrow, torch.float32)):
            out = ops.attend_padded(q, k, v, ops.Rows(*stores, slots, held, None, width))
            outs.append(out[torch.arange(5) < width[:, None]])
    assert torch.equal(*outs) and outs[0].isfinite().all()
