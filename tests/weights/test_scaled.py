"""Codes with a scale a row: near to the floats, each row by itself, and exact as floats again."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4

from sfumato.weights import fp4, scaled
from sfumato.weights.scaled import MOST, ScaledTensor, round_rows, scaled_bytes

KINDS = ("FP8", "INT8", "FP4")


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_to_the_nearest_code(kind: scaled.Kind) -> None:
    """e4m3 keeps 4 bits of a number: half a unit of the last is 1/16 of it; 127 codes of integers
    are half a step of the largest apart. Half of the widest step of e2m1 is a sixth of the largest
    number of a group, and that number's scale is off by 1/16; a scale below 2⁻⁶ by 2⁻¹⁰."""
    x = torch.randn(7, 96) * torch.logspace(-9, 9, 7)[:, None]
    held = round_rows(x, kind)
    error = (held.dequantize(torch.float64) - x.double()).abs()
    top = x.abs().amax(1, keepdim=True).double()
    groups = x.double().abs().view(7, 6, 16).amax(2, keepdim=True).expand(7, 6, 16).reshape(7, 96)
    bound = {
        "FP8": x.double().abs() / 16 + top * 2**-10 / 448,
        "INT8": top / 254,
        "FP4": groups / 6 * (17 / 16) + top * 2**-10 / 448 * 6,
    }[kind]
    assert bool((error <= bound * 1.00001).all())
    assert held.kind == kind and held.shape == (7, 96)
    largest = (held.dequantize() / held.scales[:, None]).abs().amax(1)
    torch.testing.assert_close(largest, torch.full((7,), MOST[kind]))
    assert held.nbytes == scaled_bytes(kind, (7, 96)) == 7 * (58 if kind == "FP4" else 100)


def test_fp4_is_rounded_as_its_publishers_round() -> None:
    """Every edge between two codes, and what lies beside and beyond; two columns to a byte."""
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0])
    sizes = torch.cat((edges, edges.nextafter(edges + 1), edges.nextafter(edges - 1), 1.1 * edges))
    numbers = torch.cat((sizes, -sizes)).clamp(-6, 6).repeat_interleave(14).view(-1, 14)
    numbers = torch.nn.functional.pad(numbers, (2, 0), value=6.0)  # so that all scales are 1
    codes, groups = fp4.to_codes(numbers)
    assert torch.equal(groups.float(), torch.ones(len(numbers), 1))
    expected = cast_to_fp4(numbers.clone())
    assert torch.equal(fp4.values(codes, groups.float()), expected)
    assert torch.equal(unpack_fp4_from_uint8(codes, *numbers.shape, torch.float32), expected)


def test_a_group_that_is_small_beside_its_row_becomes_zeros() -> None:
    x = torch.full((1, 32), 1e-7)
    x[0, 3] = 1.0
    held = round_rows(x, "FP4")
    assert not held.dequantize()[0, 16:].any() and held.dequantize()[0, 3] == 1


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
