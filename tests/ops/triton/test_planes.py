"""Planes hold the numbers of the blocks: exact, small, and refused where sizes are hostile."""

from __future__ import annotations

import pytest
import torch

from sfumato.ops.triton.planes import LAYOUTS, PlaneTensor, plane_bytes, refusal, to_planes
from sfumato.weights.blocks import BLOCK_FORMATS, QuantizedTensor

NAMES = sorted(BLOCK_FORMATS)


def random_blocks(name: str, *leading: int, columns: int = 512) -> QuantizedTensor:
    """Any bytes, whose halves are finite or not."""
    format = BLOCK_FORMATS[name]
    size = columns // format.block_size * format.block_bytes
    data = torch.randint(256, (*leading, size), dtype=torch.uint8)
    return QuantizedTensor(data, format, (*leading, columns))


def same_bits(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Also of infinite numbers; a NaN may be another one."""
    both = ours.isnan() & expected.isnan()
    return torch.equal(*(each.masked_fill(both, 0).view(torch.int32) for each in (ours, expected)))


def test_every_format_has_planes() -> None:
    assert set(LAYOUTS) == set(BLOCK_FORMATS)
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
    assert same_bits(planes[1].index_select(ids).dequantize(), expected[1, ids])
    halves = planes.dequantize(torch.bfloat16).nan_to_num(0)
    assert torch.equal(halves, expected.to(torch.bfloat16).nan_to_num(0))
    assert planes.is_whole and not planes[1:3].is_whole


@pytest.mark.parametrize("name", NAMES)
def test_planes_take_little_more_than_the_file(name: str) -> None:
    shape = (3, 5, 512)
    blocks = random_blocks(name, *shape[:-1])
    planes = to_planes(blocks)
    assert planes.nbytes == planes.data.numel() == plane_bytes(name, shape)
    assert blocks.nbytes <= planes.nbytes <= 1.03 * blocks.nbytes
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
