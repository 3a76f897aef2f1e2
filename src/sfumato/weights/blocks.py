"""Quantized block formats: their layout, and how a block becomes float32.

Layouts and the order of the float operations follow ggml (`ggml-common.h`, `ggml-quants.c`), so
that the result equals ggml's bit for bit. Everything runs on the device of the data. Knows no
files and no layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from sfumato.weights.iq3_grids import S_GRID, S_LEVELS, XXS_GRID, XXS_LEVELS

# Elements dequantized at a time: temporaries stay at a few times 4 MiB whatever the tensor's size,
# within a CPU's cache. Elsewhere so few would cost more in kernel launches than in work.
_CHUNK = 1 << 20
_CHUNK_ELSEWHERE = 64 * _CHUNK

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the e2m1 codes 0..7; 8..15 are their negatives."""


@dataclass(frozen=True)
class BlockFormat:
    """One block format: `block_bytes` bytes hold `block_size` consecutive elements of a row.

    `dequantize` maps uint8 [n, block_bytes] to float32 [n, block_size]; `ggml_type` is the
    format's number in GGUF files.
    """

    name: str
    ggml_type: int
    block_size: int
    block_bytes: int
    dequantize: Callable[[Tensor], Tensor] = field(repr=False)


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor kept in blocks along its last axis.

    data: uint8 [*shape[:-1], row_bytes], contiguous; it may be a read-only view of a mapped file.
    shape: the shape in elements; its last entry is a multiple of the block size.
    """

    data: Tensor
    format: BlockFormat
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        blocks, rest = divmod(self.shape[-1], self.format.block_size)
        assert rest == 0, f"{self.shape} does not divide into {self.format.name} blocks"
        assert self.data.dtype == torch.uint8 and self.data.is_contiguous()
        assert tuple(self.data.shape) == (*self.shape[:-1], blocks * self.format.block_bytes)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self.data.numel()

    def __getitem__(self, index: int | slice) -> QuantizedTensor:
        """Entry or range (step 1) of the first axis, without a copy.

        Raises IndexError for an entry out of range, ValueError for a step and for indexing the
        quantized axis itself.
        """
        if len(self.shape) < 2:
            raise ValueError("the only axis of this tensor is the quantized one: dequantize first")
        if isinstance(index, slice) and index.step not in (None, 1):
            raise ValueError(f"rows are taken in steps of 1, not {index.step}; use index_select")
        data = self.data[index]
        return QuantizedTensor(data, self.format, (*data.shape[:-1], self.shape[-1]))

    def index_select(self, ids: Tensor) -> QuantizedTensor:
        """Copies the entries `ids` (int64 [n]) of the first axis."""
        assert len(self.shape) >= 2
        data = self.data.index_select(0, ids)
        return QuantizedTensor(data, self.format, (len(ids), *self.shape[1:]))

    def to(self, device: torch.device | str) -> QuantizedTensor:
        return QuantizedTensor(self.data.to(device), self.format, self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All elements as a new tensor of `shape`: computed in float32, then rounded to `dtype`."""
        blocks = self.data.view(-1, self.format.block_bytes)
        out = torch.empty(len(blocks), self.format.block_size, dtype=dtype, device=self.device)
        chunk = _CHUNK if self.device.type == "cpu" else _CHUNK_ELSEWHERE
        step = chunk // self.format.block_size
        for start in range(0, len(blocks), step):
            out[start : start + step] = self.format.dequantize(blocks[start : start + step])
        return out.view(self.shape)

    def __repr__(self) -> str:
        return f"QuantizedTensor({self.format.name}, {self.shape}, {self.device})"


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, as float32 [n, 1]."""
    # A fresh copy is aligned for the view; a slice of one block need not be.
    pair = blocks[:, start : start + 2].clone(memory_format=torch.contiguous_format)
    return pair.view(torch.float16).float()


def _fields(packed: Tensor, bits: int) -> Tensor:
    """Splits bytes, lowest bits first: uint8 [n, groups, width] to [n, groups, 8 / bits, width]."""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=2)


def codes_of(format: str, blocks: Tensor) -> Tensor:
    """The codes of blocks uint8 [n, block_bytes] of a format, in the order of the elements: uint8
    [n, block_size]; those of Q8_0 are the bytes of int8."""
    if format == "NVFP4":
        return _fields(blocks[:, 8:, None], 4).reshape(-1, 64)
    if format in ("Q4_0", "IQ4_NL", "INT4"):
        return _fields(blocks[:, None, 2:], 4).reshape(-1, 32)
    if format == "Q5_0":
        return _q5_codes(blocks[:, 2:6], blocks[:, 6:])
    if format == "Q5_1":
        return _q5_codes(blocks[:, 4:8], blocks[:, 8:])
    if format == "Q2_K":
        return _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 256)
    if format == "Q3_K":
        top = _fields(blocks[:, None, :32], 1).reshape(-1, 256)
        return _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 256) | (top << 2)
    if format == "Q4_K":
        return _fields(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 256)
    if format == "Q5_K":
        top = _fields(blocks[:, None, 16:48], 1).reshape(-1, 256)
        return _fields(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 256) | (top << 4)
    if format == "Q6_K":
        low = _fields(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
        return low | (_fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256) << 4)
    if format == "IQ4_XS":
        return _fields(blocks[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 256)
    assert format == "Q8_0", f"{format}: has no codes here"
    return blocks[:, 2:]


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (codes_of("Q4_0", blocks).float() - 8)


def _int4(blocks: Tensor) -> Tensor:
    """As Q4_0, with a scale of bfloat16: the upper half of a float32."""
    pair = blocks[:, :2].clone(memory_format=torch.contiguous_format)
    return pair.view(torch.bfloat16).float() * (codes_of("INT4", blocks).float() - 8)


def _q5_codes(high: Tensor, low: Tensor) -> Tensor:
    """Five-bit codes, uint8 [n, 32]: bit 4 of each from `high` [n, 4], the rest from `low`."""
    top = _fields(high[:, :, None], 1).reshape(-1, 32)
    return _fields(low[:, None], 4).reshape(-1, 32) | (top << 4)


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (codes_of("Q5_0", blocks).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * codes_of("Q5_1", blocks).float() + _half(blocks, 2)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, codes = blocks[:, :16], codes_of("Q2_K", blocks).view(-1, 16, 16)
    scale = _half(blocks, 80) * (scales & 15).float()
    offset = _half(blocks, 82) * (scales >> 4).float()
    return (scale[:, :, None] * codes.float() - offset[:, :, None]).view(-1, 256)


def q3_k_scale_codes(blocks: Tensor) -> Tensor:
    """The scales of the 16 groups of a Q3_K block, 32 too high: uint8 [n, 16].

    Of the twelve bytes, the first eight hold the low nibbles of groups 0-7 and then of 8-15; the
    last four hold the top two bits, those of groups 0-3 lowest.
    """
    low = _fields(blocks[:, None, 96:104], 4).reshape(-1, 16)
    return low | (_fields(blocks[:, None, 104:108], 2).reshape(-1, 16) << 4)


def _q3_k(blocks: Tensor) -> Tensor:
    scale = _half(blocks, 108) * (q3_k_scale_codes(blocks).float() - 32)
    codes = codes_of("Q3_K", blocks).view(-1, 16, 16)
    return (scale[:, :, None] * (codes.float() - 4)).view(-1, 256)


def k_scale_codes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of the 8 groups of a Q4_K or Q5_K block as codes, each uint8 [n, 8].

    Twelve bytes hold eight 6-bit scales and eight 6-bit offsets: the low six bits of bytes 0-3 and
    4-7 are groups 0-3; bytes 8-11 carry the low nibbles of groups 4-7, whose top two bits are the
    top two bits of bytes 0-3 and 4-7.
    """
    first, second, nibbles = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((first & 63, (nibbles & 15) | ((first >> 2) & 48)), dim=1)
    offset = torch.cat((second & 63, (nibbles >> 4) | ((second >> 2) & 48)), dim=1)
    return scale, offset


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of the 8 groups of a Q4_K or Q5_K block, each float32 [n, 8, 1]."""
    scale, offset = k_scale_codes(blocks)
    return (
        (_half(blocks, 0) * scale.float())[:, :, None],
        (_half(blocks, 2) * offset.float())[:, :, None],
    )


def _q4_k(blocks: Tensor) -> Tensor:
    scale, offset = _k_scales(blocks)
    codes = codes_of("Q4_K", blocks).view(-1, 8, 32)
    return (scale * codes.float() - offset).view(-1, 256)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, offset = _k_scales(blocks)
    codes = codes_of("Q5_K", blocks).view(-1, 8, 32)
    return (scale * codes.float() - offset).view(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    codes = codes_of("Q6_K", blocks).view(-1, 16, 16)
    return (scale[:, :, None] * (codes.float() - 32)).view(-1, 256)


@lru_cache
def _iq4_values(device: torch.device) -> Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.float32, device=device)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _iq4_values(blocks.device)[codes_of("IQ4_NL", blocks).int()]


def iq4_xs_scale_codes(blocks: Tensor) -> Tensor:
    """The scales of the 8 groups of an IQ4_XS block, 32 too high: uint8 [n, 8]."""
    low = _fields(blocks[:, 4:8, None], 4).reshape(-1, 8)
    return low | (_fields(blocks[:, 2:4, None], 2).reshape(-1, 8) << 4)


def _iq4_xs(blocks: Tensor) -> Tensor:
    scale = _half(blocks, 0) * (iq4_xs_scale_codes(blocks).float() - 32)
    codes = codes_of("IQ4_XS", blocks).view(-1, 8, 32)
    return (scale[:, :, None] * _iq4_values(blocks.device)[codes.int()]).view(-1, 256)


@lru_cache
def iq3_grid(format: str, device: torch.device) -> Tensor:
    """The grid of IQ3_XXS or IQ3_S: float32 [256 or 512, 4], integers below 64."""
    grid, levels = {"IQ3_XXS": (XXS_GRID, XXS_LEVELS), "IQ3_S": (S_GRID, S_LEVELS)}[format]
    rows = [[levels[int(digit)] for digit in word] for word in grid.split()]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def iq3_signed(numbers: Tensor, signs: Tensor, scale: Tensor) -> Tensor:
    """scale [n, g] · numbers [n, 8 · g, 4], negative where a bit of `signs` uint8 [n, 4 · g] is
    set: float32 [n, 32 · g]."""
    groups = scale.shape[1]
    is_negative = _fields(signs[:, :, None], 1).reshape(-1, groups, 32).bool()
    values = scale[:, :, None] * numbers.reshape(-1, groups, 32)
    return torch.where(is_negative, -values, values).flatten(1)


def iq3_xxs_words(words: Tensor) -> tuple[Tensor, Tensor]:
    """What the words of IQ3_XXS hold, uint8 [n, 4 · g]: the signs uint8 [n, 4 · g], and the scales'
    codes int32 [n, g].

    A word of four bytes is that of a group: four times seven signs, the lowest first, and a scale
    of four bits. An eighth sign makes the number of set bits even.
    """
    parts = words.reshape(len(words), -1, 4).int()
    word = parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16 | parts[..., 3] << 24
    seven = torch.stack([word >> shift & 127 for shift in (0, 7, 14, 21)], dim=2)
    parity = seven ^ seven >> 4
    parity = parity ^ parity >> 2
    signs = (seven | ((parity ^ parity >> 1) & 1) << 7).to(torch.uint8).flatten(1)
    return signs, word >> 28 & 15


def _iq3_xxs(blocks: Tensor) -> Tensor:
    """Behind 64 places of the grid stands a word for each of 8 groups."""
    signs, codes = iq3_xxs_words(blocks[:, 66:])
    scale = _half(blocks, 0) * (0.5 + codes.float()) * 0.5
    grid = iq3_grid("IQ3_XXS", blocks.device)
    return iq3_signed(grid[blocks[:, 2:66].int()], signs, scale)


def _iq3_s(blocks: Tensor) -> Tensor:
    """Places of nine bits, whose top ones stand behind the others; then 32 bytes of signs, and a
    scale of four bits for each of 8 groups."""
    top = _fields(blocks[:, 66:74, None], 1).reshape(-1, 64).int()
    numbers = iq3_grid("IQ3_S", blocks.device)[blocks[:, 2:66].int() | top << 8]
    scales = _fields(blocks[:, 106:, None], 4).reshape(-1, 8).float()
    return iq3_signed(numbers, blocks[:, 74:106], _half(blocks, 0) * (1 + 2 * scales))


def _nvfp4(blocks: Tensor) -> Tensor:
    """A float32 scale of the row, an e4m3 scale for each of 4 groups, and codes of e2m1, the first
    of two columns lowest: as published, where the first scale is one for a matrix."""
    row, groups = blocks[:, :4].clone().view(torch.float32), blocks[:, 4:8].clone()
    scales = groups.view(torch.float8_e4m3fn).float() * row
    codes = codes_of("NVFP4", blocks).view(-1, 4, 16)
    return (fp4_values(blocks.device)[codes.int()] * scales[:, :, None]).view(-1, 64)


@lru_cache
def fp4_values(device: torch.device) -> Tensor:
    """The numbers of e2m1 codes, float32 [16]."""
    values = torch.tensor(FP4_VALUES, device=device)
    return torch.cat((values, -values))


BLOCK_FORMATS: dict[str, BlockFormat] = {
    block.name: block
    for block in (
        BlockFormat("Q4_0", 2, 32, 18, _q4_0),
        BlockFormat("Q5_0", 6, 32, 22, _q5_0),
        BlockFormat("Q5_1", 7, 32, 24, _q5_1),
        BlockFormat("Q8_0", 8, 32, 34, _q8_0),
        BlockFormat("Q2_K", 10, 256, 84, _q2_k),
        BlockFormat("Q3_K", 11, 256, 110, _q3_k),
        BlockFormat("Q4_K", 12, 256, 144, _q4_k),
        BlockFormat("Q5_K", 13, 256, 176, _q5_k),
        BlockFormat("Q6_K", 14, 256, 210, _q6_k),
        BlockFormat("IQ3_XXS", 18, 256, 98, _iq3_xxs),
        BlockFormat("IQ3_S", 21, 256, 110, _iq3_s),
        BlockFormat("IQ4_NL", 20, 32, 18, _iq4_nl),
        BlockFormat("IQ4_XS", 23, 256, 136, _iq4_xs),
    )
}
"""The quantized formats this package reads, by name."""
PLANE_FORMATS: dict[str, BlockFormat] = {
    "INT4": BlockFormat("INT4", -1, 32, 18, _int4),
    "NVFP4": BlockFormat("NVFP4", -1, 64, 40, _nvfp4),
}
"""Formats that no file has: what published matrices are on their way into `ops.triton.planes`. GGUF
has other blocks by the second name."""
KNOWN_FORMATS = BLOCK_FORMATS | PLANE_FORMATS
