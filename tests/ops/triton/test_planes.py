"""Planes hold the numbers of the blocks: exact, small, and refused where sizes are hostile."""

from __future__ import annotations

import gguf
import pytest
import torch
from tests.support.kernels import close, counted_launches, interpreted, seen_as

from sfumato import ops
from sfumato.ops import reference
from sfumato.ops.triton import self_test
from sfumato.ops.triton.kernel import LaunchError
from sfumato.ops.triton.planes import (
    LAYOUTS,
    PlaneTensor,
    plane_bytes,
    refusal,
    to_planes,
)
from sfumato.ops.triton.self_test import Trial, random_planes, whole_blocks
from sfumato.weights.formats import FORMATS, QuantizedTensor, quantize

CPU = torch.device("cpu")
NAMES = sorted(LAYOUTS)
PRODUCTS = ("INT4", "IQ4_NL", "NVFP4", "Q3_K", "Q4_K", "Q5_0", "Q6_K")
"""Formats with planes of each kind; that kernels unpack the others, too, is tested of all."""


def random_blocks(name: str, *leading: int, columns: int = 512) -> QuantizedTensor:
    """Any bytes, whose halves are finite or not; the blocks of a row of NVFP4 share a scale."""
    format = FORMATS[name]
    size = columns // format.block_size * format.block_bytes
    data = torch.randint(256, (*leading, size), dtype=torch.uint8)
    if name == "NVFP4":
        blocks = data.view(*leading, -1, format.block_bytes)
        blocks[..., :4] = blocks[..., :1, :4]
    return QuantizedTensor(data, format, (*leading, columns))


def quantized_bytes(name: str, rows: int, columns: int) -> int:
    """In a file: there the scale of NVFP4 is one for a matrix."""
    format = FORMATS[name]
    repeated = 4 if name == "NVFP4" else 0
    return rows * columns // format.block_size * (format.block_bytes - repeated)


def same_bits(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Also of infinite numbers; a NaN may be another one."""
    both = ours.isnan() & expected.isnan()
    return torch.equal(*(each.masked_fill(both, 0).view(torch.int32) for each in (ours, expected)))


def test_formats_without_planes_are_named() -> None:
    without = {"F32", "F16", "BF16", "FP8", "INT8", "IQ3_XXS", "IQ3_S"}
    assert set(FORMATS) - set(LAYOUTS) == without
    assert refusal("TQ1_0", (4, 256)).startswith("TQ1_0: is none of ")
    assert len({layout.number for layout in LAYOUTS.values()} - {0}) == len(LAYOUTS)


@pytest.mark.parametrize("name", NAMES)
def test_unpacking_gives_the_floats_of_the_blocks(name: str) -> None:
    blocks = random_blocks(name, 3, 5)
    planes = to_planes(blocks)
    expected = blocks.dequantize()
    assert same_bits(planes.dequantize(), expected)
    assert same_bits(planes[1].dequantize(), expected[1])
    assert same_bits(planes[1:3].dequantize(), expected[1:3])
    assert same_bits(planes[2][1:4].dequantize(), expected[2, 1:4])
    ids = torch.tensor([4, 0, 4])
    assert same_bits(planes[1].index_select(0, ids).dequantize(), expected[1, ids])
    halves = planes.dequantize(torch.bfloat16).nan_to_num(0)
    assert torch.equal(halves, expected.to(torch.bfloat16).nan_to_num(0))
    assert planes.is_whole and not planes[1:3].is_whole


@pytest.mark.parametrize("name", NAMES)
def test_planes_take_little_more_than_the_file(name: str) -> None:
    shape = (3, 5, 512)
    blocks = random_blocks(name, *shape[:-1])
    planes = to_planes(blocks)
    assert planes.nbytes == planes.data.numel() == plane_bytes(name, shape)
    held = quantized_bytes(name, 15, 512)
    assert held <= planes.nbytes <= 1.04 * held  # a scale of Q3_K has a byte for six bits
    assert plane_bytes(name, (704, 2816)) <= 1.04 * quantized_bytes(name, 704, 2816)
    assert planes[1].nbytes * 3 == planes.nbytes and name in repr(planes)


def test_rows_are_repacked_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks("Q5_K", 7)
    at_once = to_planes(blocks)
    monkeypatch.setattr("sfumato.ops.triton.planes._CHUNK", 1000)
    in_parts = to_planes(blocks)
    assert torch.equal(in_parts.data, at_once.data)
    assert same_bits(in_parts.dequantize(), blocks.dequantize())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("BF16", (4, 256)),
        ("Q4_K", (4, 96)),
        ("Q8_0", (256,)),
        ("Q8_0", (0, 256)),
        ("Q8_0", (2, -3, 256)),
        ("Q8_0", (2, 2, 2, 32)),
        ("Q8_0", (1 << 20, 1 << 20, 32)),
        ("Q8_0", (1, 1 << 30)),
    ],
)
def test_hostile_sizes_are_refused(name: str, shape: tuple[int, ...]) -> None:
    assert refusal(name, shape)
    with pytest.raises(ValueError, match="planes: "):
        plane_bytes(name, shape)


def test_indices_that_planes_do_not_take() -> None:
    planes = to_planes(random_blocks("Q8_0", 2, 3))
    with pytest.raises(IndexError, match="there are 2 matrices"):
        planes[2]
    with pytest.raises(ValueError, match="steps of 1"):
        planes[::2]
    with pytest.raises(ValueError, match="index_select"):
        planes[0][1]
    with pytest.raises(AssertionError):
        PlaneTensor(planes.data[1:], planes.format, planes.shape, planes.rows)


@interpreted
@pytest.mark.parametrize("name", NAMES)
def test_kernels_unpack_the_bits_of_the_blocks(name: str) -> None:
    """A product with the unit matrix gives the weight itself; columns divide by no tile."""
    from sfumato.ops.triton.linear import linear

    weight = random_planes(CPU, name, 70, whole_blocks(name, 96))
    out = linear(torch.eye(weight.shape[1]), weight)
    assert torch.equal(out.T, weight.dequantize())


@interpreted
@pytest.mark.parametrize(
    "name",
    [name if name in PRODUCTS else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_products_with_planes_pass_their_self_tests(name: str) -> None:
    from sfumato.ops.triton import OPERATIONS, twins

    for plane_twin in (each for key, each in twins((name,)).items() if key not in OPERATIONS):
        plane_twin.check(Trial(CPU))


@interpreted
@pytest.mark.parametrize(("dense", "first"), [("Q5_1", "IQ4_NL"), ("INT4", "INT4")])
def test_a_token_has_the_same_result_beside_others(
    dense: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where others make the tiles those for many tokens; the formats of experts differ."""
    from sfumato.ops.triton import tiles
    from sfumato.ops.triton.experts import experts
    from sfumato.ops.triton.linear import linear

    monkeypatch.setattr(tiles, "FEW", 4)
    x, scores = torch.randn(9, 64), torch.randn(9, 3)
    weight = random_planes(CPU, dense, 40, 64)
    gate_up, down = random_planes(CPU, first, 3, 64, 64), random_planes(CPU, "Q8_0", 3, 64, 32)
    shares, chosen = scores.softmax(-1).topk(2)
    some = slice(3, 6)
    # NumPy's own products may differ by the shape: the compiled instructions have a test.
    close(linear(x[some], weight), linear(x, weight)[some])
    close(linear(x, weight), x @ weight.dequantize().T)
    mixed = experts(x, chosen, shares, gate_up, down)
    close(experts(x[some], chosen[some], shares[some], gate_up, down), mixed[some])
    wide = (each.dequantize().double() for each in (gate_up, down))
    close(mixed, reference.experts.reference(x.double(), chosen, shares, *wide))


@interpreted
def test_what_kernels_do_not_take_is_dequantized(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A part of a stack, a format that failed its test, and a kernel that does not run later."""
    from sfumato.ops.triton import linear as module

    stack, x = random_planes(CPU, "Q4_0", 2, 40, 64), torch.randn(3, 64)
    expected = x @ stack[1].dequantize().T
    monkeypatch.setattr(self_test, "_failed", {})
    monkeypatch.setattr(self_test, "_passed", {CPU: frozenset(("linear Q4_0", "linear Q8_0"))})
    monkeypatch.setattr("sfumato.ops.triton._refused", set())
    with seen_as("cpu", "cuda"), counted_launches() as launches:
        assert torch.equal(ops.linear(x, stack[1]), expected) and not launches
        close(ops.linear(x, one := to_planes(random_blocks_of_floats())), x @ one.dequantize().T)
        assert launches.pop("linear_planes") == 1

        def fails(*given: object, **more: object) -> None:
            raise LaunchError("linear_planes: too large")

        monkeypatch.setattr(module, "launch", fails)
        for _ in range(2):
            assert torch.equal(ops.linear(x, one), x @ one.dequantize().T)
    assert self_test.prepared(CPU) == {"linear Q4_0"} and not launches
    assert "linear Q8_0" in caplog.records[-1].getMessage()


def random_blocks_of_floats() -> QuantizedTensor:
    return quantize(torch.randn(24, 64), FORMATS["Q8_0"])


@interpreted
def test_how_a_weight_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """As planes where the kernels of the operation and the format serve; else as it is."""
    blocks, gpu = random_blocks_of_floats(), torch.device("cuda", 0)
    monkeypatch.setattr(self_test, "_failed", {CPU: {"experts Q8_0": "wrong"}})
    monkeypatch.setattr(self_test, "_passed", {CPU: frozenset(("linear Q8_0",))})
    with seen_as("cpu", "cuda"):
        held = ops.pack(blocks, "int8")
        assert isinstance(held, PlaneTensor) and ops.pack(held.data, "int8") is held.data
        assert ops.packed_bytes("Q8_0", blocks.shape, CPU) == held.nbytes
        assert not ops.packs("Q8_0", (2, 24, 64), CPU) and not ops.packs("Q8_0", (24, 1 << 30), CPU)
    assert not torch.cuda.is_available() and not ops.packs("Q8_0", blocks.shape, gpu)


@interpreted
def test_every_code_and_every_scale_of_nvfp4() -> None:
    """Two rows of each scale of e4m3 that is a number, with scales of the row far from 1."""
    from sfumato.ops.triton.linear import linear

    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)  # all pairs
    data = torch.empty(254, 8, 40, dtype=torch.uint8)
    data[:, :, 8:] = codes
    data[:, :, 4:8] = (torch.arange(254) % 127).to(torch.uint8)[:, None, None]
    data[:, :, :4] = torch.tensor([3e-5, 7.0])[:, None].view(torch.uint8).repeat(127, 1)[:, None]
    blocks = QuantizedTensor(data.view(254, 320), FORMATS["NVFP4"], (254, 512))
    scales = (torch.arange(254) % 127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    scales *= torch.tensor([3e-5, 7.0]).repeat(127)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten().int()
    expected = numbers[pairs] * scales[:, None]
    assert torch.equal(blocks.dequantize(), expected)
    assert torch.equal(linear(torch.eye(512), to_planes(blocks)).T, expected)


@interpreted
@pytest.mark.parametrize("name", ["Q2_K", "Q3_K"])
def test_kernels_unpack_what_ggml_dequantizes(name: str) -> None:
    """Any bytes but those of bases, which are finite: with the unit matrix each sum has one term.
    In bfloat16 the planes are ggml's floats, rounded once."""
    from sfumato.ops.triton.linear import linear

    blocks = random_blocks(name, 40)
    bases = torch.linspace(-1, 1, 80).half().view(torch.uint8).view(80, 2)
    for at in LAYOUTS[name].halves:
        blocks.data.view(80, -1)[:, at : at + 2] = bases
    kind = gguf.GGMLQuantizationType[name]
    right = torch.from_numpy(gguf.dequantize(blocks.data.numpy(), kind))
    planes = to_planes(blocks)
    assert torch.equal(linear(torch.eye(512), planes).T, right)
    assert torch.equal(planes.dequantize(torch.bfloat16), right.to(torch.bfloat16))


@interpreted
def test_scales_of_int4_keep_the_range_of_bfloat16() -> None:
    """From the least normal number to what float16 takes for infinite."""
    from sfumato.ops.triton.linear import linear

    scales = torch.tensor([2.0**-126, 1e-12, 6e4, 7e4, 1e30]).bfloat16()
    blocks = random_blocks("INT4", 5, columns=64)
    blocks.data.view(5, 2, 18)[:, :, :2] = scales.view(torch.uint8).view(5, 1, 2)
    planes = to_planes(blocks)
    codes = torch.stack((blocks.data.view(5, 2, 18)[..., 2:] & 15,
                         blocks.data.view(5, 2, 18)[..., 2:] >> 4), dim=2)  # fmt: skip
    expected = (codes.flatten(1).float() - 8) * scales.float()[:, None]
    assert torch.equal(planes.dequantize(), expected)
    assert torch.equal(linear(torch.eye(64), planes).T, expected)
