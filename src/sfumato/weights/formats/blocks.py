"""Weights in blocks: a tensor of them, and floats to blocks.

Both ways work in chunks, so that temporaries stay small whatever the tensor's size. Knows no
format: these are in files of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.weights.formats.format import BLOCKS, Format
from sfumato.weights.formats.weight import Stored, in_steps_of_1

# Elements dequantized at a time: temporaries stay at a few times 4 MiB whatever the tensor's size,
# within a CPU's cache. Elsewhere so few would cost more in kernel launches than in work.
_CHUNK = 1 << 20
_CHUNK_ELSEWHERE = 64 * _CHUNK

# Elements quantized at a time by each thread: enough that torch's work outweighs its calls, few
# enough that a dozen temporaries of 1 MiB hardly leave the cache.
_ENCODED = 1 << 18
_ENCODED_ELSEWHERE = 1 << 24


@dataclass(frozen=True, repr=False)
class QuantizedTensor(Stored):
    """A tensor kept in blocks along its last axis.

    data: uint8 [*shape[:-1], row_bytes], contiguous; it may be a read-only view of a mapped file.
    shape: the shape in elements; its last entry is a multiple of the block size.
    """

    data: Tensor
    format: Format
    shape: tuple[int, ...]
    form = BLOCKS

    def __post_init__(self) -> None:
        width = self.format.row_width(self.shape[-1])
        fits = self.format.divides(self.shape[-1])
        assert fits, f"{self.shape} does not divide into {self.format.name} blocks"
        assert self.data.dtype == torch.uint8 and self.data.is_contiguous()
        assert tuple(self.data.shape) == (*self.shape[:-1], width)

    def __getitem__(self, index: int | slice, /) -> QuantizedTensor:
        if len(self.shape) < 2:
            raise ValueError("the only axis of this tensor is the quantized one: dequantize first")
        in_steps_of_1(index)
        data = self.data[index]
        return QuantizedTensor(data, self.format, (*data.shape[:-1], self.shape[-1]))

    def index_select(self, dim: int, ids: Tensor, /) -> QuantizedTensor:
        assert dim == 0 and len(self.shape) >= 2
        data = self.data.index_select(0, ids)
        return QuantizedTensor(data, self.format, (len(ids), *self.shape[1:]))

    def part_of_rows(self, ids: Tensor, first: int, end: int, /) -> QuantizedTensor:
        width = self.format.row_width
        data = self.data[:, width(first) : width(end)].index_select(0, ids)
        return QuantizedTensor(data, self.format, (len(ids), end - first))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        blocks = self.data.view(-1, self.format.block_bytes)
        out = torch.empty(len(blocks), self.format.block_size, dtype=dtype, device=self.device)
        chunk = _CHUNK if self.device.type == "cpu" else _CHUNK_ELSEWHERE
        step = chunk // self.format.block_size
        for start in range(0, len(blocks), step):
            out[start : start + step] = self.format.dequantize(blocks[start : start + step])
        return out.view(self.shape)

    def __repr__(self) -> str:
        return f"QuantizedTensor({self.format.name}, {self.shape}, {self.device})"


def quantize(values: Tensor, format: Format) -> QuantizedTensor:
    """All of `values`, float [..., n] with n a multiple of the block size, in blocks.

    Raises ValueError if a value is not finite or a scale exceeds float16.
    """
    assert format.divides(values.shape[-1]), f"{values.shape} in {format.name} blocks"
    width = format.row_width(values.shape[-1])
    data = torch.empty(*values.shape[:-1], width, dtype=torch.uint8, device=values.device)
    rows, at = data.view(-1, format.block_bytes), 0
    for chunk in encoded(values, format):
        rows[at : at + len(chunk)] = chunk
        at += len(chunk)
    return QuantizedTensor(data, format, tuple(values.shape))


def encoded(values: Tensor, format: Format) -> Iterator[Tensor]:
    """The bytes of values in a format in chunks, as they are computed: uint8 [n, block_bytes]
    each. Raises ValueError for values that the format cannot hold."""
    assert format.encode is not None, f"{format.name}: is not written"
    flat = values.reshape(-1, format.block_size)
    on_cpu = values.device.type == "cpu"
    step = _ENCODED * torch.get_num_threads() if on_cpu else _ENCODED_ELSEWHERE
    for part in flat.split(step // format.block_size):
        yield format.encode(part.float() if format.form == BLOCKS else part)
