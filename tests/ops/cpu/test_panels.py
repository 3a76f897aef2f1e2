"""Panels: what they hold, how large they are, and what is packed at all."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.cpu.forced import (
    FORMATS,
    blocks,
    compiled,
    each_isa,
    forced,
    normal,
    relative,
    threads,
    weights,
)
from tests.weights.formats.test_blocks import SCALES_AT
from torch import Tensor

from sfumato import ops
from sfumato.ops.cpu import kernels, library
from sfumato.ops.cpu.panels import (
    ROUNDING,
    PackedTensor,
    pack,
    packed_bytes,
    packs,
    panels,
    rounding,
)
from sfumato.weights.formats import FORMATS as STORED
from sfumato.weights.formats import QuantizedTensor, of_files

CPU = torch.device("cpu")

# Scales of 32 elements and more are one float16 in these, or kept as two factors: packing rounds
# nothing.
EXACT = {"Q4_0", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "BF16", "Q2_K"}

pytestmark = compiled
formats = pytest.mark.parametrize("name", FORMATS)


@each_isa
@formats
def test_every_instruction_set_packs_alike(isa: str, name: str) -> None:
    """Byte for byte, of rows that fill no panel too."""
    best, _ = weights(name, "int8", 2, 37, 512)
    with forced(isa):
        packed, _ = weights(name, "int8", 2, 37, 512)
    assert torch.equal(packed.data, best.data)


@formats
def test_what_is_packed_comes_back(name: str) -> None:
    """Scales that are products are rounded to float16, which the bound of their docstring covers:
    2⁻¹¹ of the scaled code and of the offset, so less than 2⁻¹¹ of the whole in the L2 norm."""
    packed, stored = weights(name, "int8", 3, 48, 512)
    back = packed.dequantize()
    assert back.shape == packed.shape == (3, 48, 512)
    if name in EXACT:
        assert torch.equal(back, stored)
    assert relative(back, stored) < 2**-11


@given(
    name=st.sampled_from(FORMATS),
    matrices=st.integers(1, 3),
    rows=st.integers(1, 40),
    columns=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_any_shape_comes_back(name: str, matrices: int, rows: int, columns: int, seed: int) -> None:
    size = 8 if name == "BF16" else STORED[name].block_size  # bfloat16 rows of any length
    packed, stored = weights(name, "int8", matrices, rows, columns * size, seed=seed)
    assert relative(packed.dequantize(), stored) < 2**-11


@pytest.mark.parametrize("name", sorted(of_files("blocks")))
@pytest.mark.parametrize("low", [-1.0, 1e-3, 6.1e-5, 6e-8], ids=str)
def test_odd_scales_come_back(name: str, low: float) -> None:
    """Zeros, and scales down to the smallest number of float16: a product of two is off by no more
    than half a step of float16, which below 6.1e-5 is 6e-8 wide, times a code of at most 128."""
    weight = blocks(name, 16, 512)
    halves = torch.tensor([0.0, -0.0, low, -low]).half()
    data = weight.data.view(-1, weight.format.block_bytes)
    for at in SCALES_AT.get(name, (0,)):
        chosen = torch.randint(4, (len(data),), generator=torch.Generator().manual_seed(at))
        data[:, at : at + 2] = halves[chosen].view(torch.uint8).view(-1, 2)
    expected = weight.dequantize()
    back = panels(weight.data, name, weight.shape, "int8").dequantize()
    limit = float(expected.abs().max()) * 2**-10 + 128 * 3e-8
    assert (back - expected).abs().max() <= limit


def test_a_scale_beyond_float16_stays_finite() -> None:
    """65504 · 63 is no float16: a hostile file shall not bring infinity into a panel."""
    weight = blocks("Q4_K", 16, 256)
    weight.data[:, :4] = torch.tensor([65504.0] * 2).half().view(torch.uint8)
    assert weight.dequantize().abs().max() > 1e6
    assert panels(weight.data, "Q4_K", weight.shape, "int8").dequantize().isfinite().all()


@each_isa
@pytest.mark.parametrize("name", sorted(of_files("blocks")))
@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E00, 0x7FFF, 0x7C01])
def test_a_scale_that_is_no_number_stays_none(isa: str, name: str, half: int) -> None:
    """Infinities and any NaN, in products of both modes too; the other rows keep what they have."""
    weight = blocks(name, 16, 256)
    at = SCALES_AT.get(name, (0,))[0]
    scale = torch.tensor([half & 255, half >> 8], dtype=torch.uint8)
    weight.data[3].view(-1, weight.format.block_bytes)[:, at : at + 2] = scale
    x = normal(1, 2, 256)
    others = torch.arange(16) != 3
    with forced(isa):
        for mode in ("int8", "bf16"):
            packed = panels(weight.data, name, weight.shape, mode)
            back, exact = packed.dequantize(), weight.dequantize()
            assert torch.equal(back.isnan(), exact.isnan())
            assert torch.equal(back.isinf(), exact.isinf())
            assert relative(back[others], exact[others]) < 2**-11
            out = kernels.linear(x, packed)
            assert not out[:, 3].isfinite().any() and out[:, others].isfinite().all()


@formats
def test_threads_do_not_matter(name: str) -> None:
    one, _ = weights(name, "int8", 5, 40, 256)
    with threads(3):
        three, _ = weights(name, "int8", 5, 40, 256)
        assert torch.equal(one.data, three.data)
        assert torch.equal(one.dequantize(), three.dequantize())


@pytest.mark.parametrize("name", sorted(of_files("blocks")))
def test_blocks_may_lie_at_any_byte(name: str) -> None:
    weight = blocks(name, 17, 256)
    shifted = torch.zeros(1 + weight.nbytes, dtype=torch.uint8)
    shifted[1:] = weight.data.flatten()
    odd = shifted[1:].view(weight.data.shape)
    assert odd.data_ptr() % 2 == 1
    aligned = panels(weight.data, name, weight.shape, "int8")
    assert torch.equal(panels(odd, name, weight.shape, "int8").data, aligned.data)


@pytest.mark.parametrize("name", sorted(of_files("blocks")))
def test_memory(name: str) -> None:
    """Of real matrices: at most 12 % more than the blocks of Q4_K and Q6_K, which the Q4_K_M mix is
    mostly made of, with the formats that it falls back to, 47 % more than those of IQ3_XXS, whose
    grid becomes codes of four bits, and 35 % more than others."""
    for shape in ((128, 1408, 2816), (128, 2816, 704), (2112, 2816), (2816, 2112), (4096, 2816)):
        block = STORED[name]
        if shape[-1] % block.block_size:
            continue
        stored = math.prod(shape) // block.block_size * block.block_bytes
        mix = name in ("Q4_K", "Q6_K", "Q5_0", "Q8_0", "Q5_1")
        most = 1.12 if mix else 1.47 if name == "IQ3_XXS" else 1.35
        assert packed_bytes(name, shape) <= stored * most


@formats
def test_the_bytes_are_foretold(name: str) -> None:
    packed, _ = weights(name, "int8", 2, 33, 256)
    assert packed.nbytes == packed_bytes(name, (2, 33, 256)) == packed.data.numel()


def test_a_stack_of_matrices() -> None:
    packed, stored = weights("Q8_0", "bf16", 4, 20, 64)
    assert packed.activations == "bf16" and packed.device == CPU
    for index in (2, -1, slice(1, 3), slice(None, 2), slice(4, 4)):
        part = packed[index]
        assert part.shape == stored[index].shape and part.activations == "bf16"
        assert torch.equal(part.dequantize(), stored[index])
        assert part.data.untyped_storage().data_ptr() == packed.data.untyped_storage().data_ptr()
    assert packed[0].dequantize(torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(IndexError):
        packed[4]
    with pytest.raises(ValueError, match="steps of 1"):
        packed[::2]
    with pytest.raises(ValueError, match="dequantize first"):
        packed[0][0]
    assert repr(packed) == "PackedTensor(Q8_0, (4, 20, 64), bf16)"


@pytest.mark.parametrize("weight", [blocks("Q8_0", 16, 64), normal(0, 300, 300)])
def test_activations_that_there_are_not(weight: Tensor | QuantizedTensor) -> None:
    with pytest.raises(ValueError, match="activations: 'fp4' is none of int8, bf16"):
        pack(weight, "fp4")


@pytest.mark.parametrize("name", sorted(of_files("blocks")))
def test_every_block_format_is_packed(name: str) -> None:
    packed = pack(blocks(name, 16, 256), "bf16")
    assert isinstance(packed, PackedTensor)
    assert (packed.format.name, packed.activations) == (name, "bf16")


@each_isa
def test_bfloat16_is_packed_where_the_processor_multiplies_it(isa: str) -> None:
    large, small = normal(0, 256, 256).bfloat16(), normal(0, 255, 256).bfloat16()
    with forced(isa):
        assert library.kernels is not None
        packed = pack(large, "int8")
        assert isinstance(packed, PackedTensor) == library.kernels.bf16
        assert packs("BF16", (256, 256), CPU) == library.kernels.bf16
        assert pack(small, "int8") is small
    if isinstance(packed, PackedTensor):
        assert packed.activations == "bf16" and torch.equal(packed.dequantize(), large.float())


@each_isa
def test_dense_matrices_take_bfloat16_where_tiles_multiply(isa: str) -> None:
    matrix, stack = blocks("Q8_0", 16, 64), blocks("Q8_0", 2, 16, 64)
    with forced(isa):
        taken = [pack(matrix, "int8"), pack(stack, "int8"), pack(stack, "int8", is_dense=True)]
    dense = "bf16" if isa == "amx" else "int8"
    assert [getattr(each, "activations", None) for each in taken] == [dense, "int8", dense]


def test_what_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    for weight in (normal(0, 300, 300), normal(0, 300, 300).half(), normal(0, 70000).bfloat16()):
        assert pack(weight, "int8") is weight
    weight = blocks("Q8_0", 16, 64)
    for other in (weight.to("meta"), QuantizedTensor(weight.data[0], weight.format, (64,))):
        assert pack(other, "int8") is other
    empty = weight[:0]
    assert pack(empty, "int8") is empty
    assert ops.packs("Q8_0", (16, 64), CPU) and not ops.packs(
        "Q8_0", (16, 64), torch.device("meta")
    )
    assert not ops.packs("F32", (300, 300), CPU)
    monkeypatch.setattr(library, "kernels", None)
    assert pack(weight, "int8") is weight and not packs("Q8_0", (16, 64), CPU)


def test_activations_are_rounded_by_more_than_is_said() -> None:
    """So that an error under it is hidden: of normal numbers, in blocks of 32 for int8."""
    x = torch.randn(64, 2816, generator=torch.Generator().manual_seed(0))
    scale = x.view(64, -1, 32).abs().amax(dim=2, keepdim=True) / 127
    by_form = {
        "int8": ((x.view(64, -1, 32) / scale).round() * scale).view(64, 2816),
        "bf16": x.bfloat16().float(),
    }
    for form, limit in ROUNDING.items():
        off = (by_form[form] - x).norm(dim=1) / x.norm(dim=1)
        assert limit < off.min() < 2 * limit, form


def test_what_rounds_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with packed weights as they are packed, with bfloat16 ones as bfloat16; nothing in
    float32, on another device, or where there are no kernels."""
    packed = PackedTensor(torch.zeros(0, dtype=torch.uint8), 0, STORED["Q8_0"], (16, 32), "int8")
    narrow = torch.zeros(2, 2, dtype=torch.bfloat16)
    monkeypatch.setattr(library, "kernels", object())
    assert rounding(packed, torch.bfloat16) == ROUNDING["int8"]
    assert rounding(packed, torch.float32) == ROUNDING["int8"]
    assert rounding(narrow, torch.bfloat16) == ROUNDING["bf16"]
    assert rounding(narrow.float(), torch.float32) == 0
    assert rounding(narrow.to("meta"), torch.bfloat16) == 0
    monkeypatch.setattr(library, "kernels", None)
    assert rounding(packed, torch.bfloat16) == 0
