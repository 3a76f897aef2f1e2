"""Codes with a scale a row: near to the floats, each row by itself, and exact as floats again."""

from __future__ import annotations

import pytest
import torch

from sfumato.weights.formats import FORMATS, MOST, ScaledTensor, round_rows
from sfumato.weights.formats import codes as scaled

KINDS = ("FP8", "INT8")


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_to_the_nearest_code(kind: scaled.Kind) -> None:
    """e4m3 keeps 4 bits of a number: half a unit of the last is 1/16 of it; 127 codes of integers
    are half a step of the largest apart."""
    x = torch.randn(7, 96) * torch.logspace(-9, 9, 7)[:, None]
    held = round_rows(x, kind)
    error = (held.dequantize(torch.float64) - x.double()).abs()
    top = x.abs().amax(1, keepdim=True).double()
    bound = x.double().abs() / 16 + top * 2**-10 / 448 if kind == "FP8" else top / 254
    assert bool((error <= bound * 1.00001).all())
    assert held.kind == kind and held.shape == (7, 96)
    assert torch.equal(held.codes.float().abs().amax(1), torch.full((7,), MOST[kind]))
    assert held.nbytes == FORMATS["FP8"].nbytes((7, 96)) == 7 * 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_codes_beside_others(
    kind: scaled.Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3, 5, 64)
    held = round_rows(x, kind)
    monkeypatch.setattr(scaled, "_CHUNK", 128)
    parts = round_rows(x, kind)
    assert torch.equal(parts.codes.view(torch.uint8), held.codes.view(torch.uint8))
    assert torch.equal(parts.scales, held.scales)
    assert torch.equal(parts.dequantize(), held.dequantize())
    alone = round_rows(x[1, 2:3], kind)
    assert torch.equal(alone.dequantize()[0], held.dequantize()[1, 2])
    assert torch.equal(held[1][2:3].dequantize(), alone.dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_and_rows_that_are_not_finite(kind: scaled.Kind) -> None:
    """Zeros and numbers too small for a scale become zeros; NaN and infinity show in all of a row,
    and in no other."""
    x = torch.randn(5, 16)
    x[0], x[1] = 0, 1e-38
    x[2, 3], x[3, 0] = torch.nan, -torch.inf
    floats = round_rows(x, kind).dequantize()
    assert not floats[0].any() and not floats[1].any()
    assert floats[2:4].isnan().all() and floats[4].isfinite().all()


def test_what_is_no_matrix_of_codes_is_refused() -> None:
    held = round_rows(torch.randn(4, 16), "INT8")
    with pytest.raises(ValueError, match="range of one row"):
        held[0]
    with pytest.raises(ValueError, match="steps of 1"):
        held[::2]
    with pytest.raises(AssertionError):
        ScaledTensor(held.codes, held.scales[:3])
    assert "INT8" in repr(held.to("cpu"))
