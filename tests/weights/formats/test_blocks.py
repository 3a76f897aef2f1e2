"""Every block format against the `gguf` package's dequantizer, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sfumato.weights.formats import FORMATS, Format, QuantizedTensor, of_files

# Byte positions of the float16 scales.
SCALES_AT = {
    **dict.fromkeys(("Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
ODD_HALVES = (0.0, -0.0, 6e-8, -6e-8, 6.1e-5, -1.0, 1e-3, 65504.0, -65504.0)

formats = pytest.mark.parametrize("block", of_files("blocks").values(), ids=of_files("blocks"))


def blocks_of(block: Format, count: int, seed: int, halves: np.ndarray) -> np.ndarray:
    """Random blocks whose scales are drawn from `halves`."""
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (count, block.block_bytes), dtype=np.uint8)
    for at in SCALES_AT.get(block.name, (0,)):
        scales = random.choice(halves.astype("<f2"), (count, 1))
        data[:, at : at + 2] = scales.view(np.uint8)
    return data


def oracle(block: Format, data: np.ndarray) -> np.ndarray:
    return gguf.dequantize(data, gguf.GGMLQuantizationType(block.ggml_type))


def assert_same_bits(ours: torch.Tensor, reference: np.ndarray) -> None:
    assert ours.dtype == torch.float32
    np.testing.assert_array_equal(ours.numpy().view(np.int32), reference.view(np.int32))


def quantized(block: Format, *leading: int, blocks_per_row: int = 2) -> QuantizedTensor:
    count = int(np.prod(leading)) * blocks_per_row
    data = blocks_of(block, count, 3, np.linspace(-1, 1, 64))
    tensor = torch.from_numpy(data).view(*leading, -1)
    return QuantizedTensor(tensor, block, (*leading, blocks_per_row * block.block_size))


@formats
def test_layout_is_ggmls(block: Format) -> None:
    kind = gguf.GGMLQuantizationType[block.name]
    assert block.ggml_type == kind
    assert (block.block_size, block.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


def test_all_required_formats_are_there() -> None:
    required = {"Q8_0", "Q4_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}
    assert set(of_files("blocks")) == required | {"Q2_K", "Q3_K", "IQ3_XXS", "IQ3_S"}


@formats
@pytest.mark.parametrize("count", [1, 2, 17])
def test_equals_gguf_bit_for_bit(block: Format, count: int) -> None:
    data = blocks_of(block, count, seed=count, halves=np.random.default_rng(0).normal(size=99))
    assert_same_bits(block.dequantize(torch.from_numpy(data)), oracle(block, data))


@formats
def test_odd_scales(block: Format) -> None:
    """Zeros of both signs, subnormals, and the largest: their products too."""
    data = blocks_of(block, 64, seed=1, halves=np.array(ODD_HALVES))
    assert_same_bits(block.dequantize(torch.from_numpy(data)), oracle(block, data))


@given(name=st.sampled_from(sorted(of_files("blocks"))), seed=st.integers(0, 2**32 - 1))
def test_any_bytes_are_a_block(name: str, seed: int) -> None:
    """Whatever the bytes (infinite and NaN scales included), the values are ggml's."""
    block = FORMATS[name]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (40, block.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        reference = oracle(block, data)
    np.testing.assert_array_equal(block.dequantize(torch.from_numpy(data)).numpy(), reference)


@formats
@pytest.mark.gpu
def test_equals_gguf_on_the_gpu(block: Format) -> None:
    data = blocks_of(block, 300, seed=5, halves=np.random.default_rng(0).normal(size=99))
    assert_same_bits(block.dequantize(torch.from_numpy(data).cuda()).cpu(), oracle(block, data))


@formats
def test_an_odd_storage_offset(block: Format) -> None:
    """A block may begin at any byte of its storage."""
    data = blocks_of(block, 1, seed=2, halves=np.linspace(-1, 1, 9))
    shifted = torch.zeros(1 + data.size, dtype=torch.uint8)
    shifted[1:] = torch.from_numpy(data).flatten()
    assert_same_bits(block.dequantize(shifted[1:].view(1, -1)), oracle(block, data))


@formats
def test_dequantize_shape_and_dtype(block: Format) -> None:
    tensor = quantized(block, 3, 5)
    values = tensor.dequantize()
    assert values.shape == tensor.shape == (3, 5, 2 * block.block_size)
    reference = oracle(block, tensor.data.numpy().reshape(-1, block.block_bytes))
    assert_same_bits(values.view(-1, block.block_size), reference)
    half = tensor.dequantize(torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, values.bfloat16())


def test_dequantize_in_chunks() -> None:
    """More blocks than one chunk holds, and a remainder."""
    block = FORMATS["Q8_0"]
    tensor = quantized(block, 1030, blocks_per_row=64)
    reference = oracle(block, tensor.data.numpy().reshape(-1, block.block_bytes))
    assert_same_bits(tensor.dequantize().view(-1, block.block_size), reference)


@pytest.mark.parametrize(("device", "passes"), [("cpu", 3), ("meta", 1)])
def test_an_accelerator_gets_larger_chunks(device: str, passes: int) -> None:
    """A kernel launch costs more there than the work on what fills a CPU's cache."""
    seen = []

    def dequantize(blocks: torch.Tensor) -> torch.Tensor:
        seen.append(len(blocks))
        return torch.empty(len(blocks), 32, device=blocks.device)

    block = replace(FORMATS["Q8_0"], dequantize=dequantize)
    data = torch.empty(3, 34 << 15, dtype=torch.uint8, device=device)
    QuantizedTensor(data, block, (3, 1 << 20)).dequantize()
    assert len(seen) == passes


@formats
def test_entries_are_views(block: Format) -> None:
    tensor = quantized(block, 4, 6)
    values = tensor.dequantize()
    for index in (2, -1, slice(1, 3), slice(None, 2), slice(4, 4)):
        part = tensor[index]
        assert torch.equal(part.dequantize(), values[index])
        assert part.data.untyped_storage().data_ptr() == tensor.data.untyped_storage().data_ptr()
    assert torch.equal(tensor[1][2:5].dequantize(), values[1, 2:5])


def test_index_select() -> None:
    tensor = quantized(FORMATS["Q4_K"], 6)
    ids = torch.tensor([5, 0, 5])
    assert torch.equal(tensor.index_select(0, ids).dequantize(), tensor.dequantize()[ids])
    assert tensor.index_select(0, ids).shape == (3, 512)


def test_refused_indices() -> None:
    tensor = quantized(FORMATS["Q8_0"], 4)
    with pytest.raises(IndexError):
        tensor[4]
    with pytest.raises(ValueError, match="steps of 1"):
        tensor[::2]
    with pytest.raises(ValueError, match="dequantize first"):
        tensor[0][0]


def test_measures() -> None:
    tensor = quantized(FORMATS["Q6_K"], 3)
    assert tensor.nbytes == 3 * 2 * 210
    assert tensor.device == torch.device("cpu")
    assert tensor.to("meta").device == torch.device("meta")
    assert "Q6_K" in repr(tensor)


def test_the_data_must_fit_the_shape() -> None:
    data = torch.zeros(2, 34, dtype=torch.uint8)
    with pytest.raises(AssertionError):
        QuantizedTensor(data, FORMATS["Q8_0"], (2, 64))
