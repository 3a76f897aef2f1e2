"""One narrow matrix: its codes and scales, what they stand for, and the blocks nearest to that.

The values are those of the publishers' own programs, in float32: FP8 and INT8 codes times a scale
of the row, INT4 codes (from -8) times a scale of a group, FP4 codes times a scale of 16 columns
times one of the matrix. Knows no files and no names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.weights.blocks import (
    BLOCK_FORMATS,
    PLANE_FORMATS,
    BlockFormat,
    QuantizedTensor,
    fp4_values,
)
from sfumato.weights.narrow.config import Kind
from sfumato.weights.narrow.to_blocks import (
    int4_blocks,
    nvfp4_blocks,
    q4_0_blocks,
    q6_k_blocks,
    q8_0_blocks,
)
from sfumato.weights.quantize import quantize

_CHUNK = 1 << 21  # elements converted at a time: temporaries of some 8 MiB each


@dataclass(frozen=True)
class NarrowMatrix:
    """A matrix of `shape` (rows, columns).

    codes: of FP8 float8_e4m3fn and of INT8 int8 [rows, columns]; of INT4 and NVFP4 uint8
    [rows, columns / 2], the first of two columns in the low four bits. scales: float32
    [1 or rows, groups], finite, not negative; a group is `columns / groups` columns. Those of
    NVFP4 are `group_scales`, float8_e4m3fn, times `scale`, to a last place of float32; elsewhere
    these are not set.
    """

    kind: Kind
    codes: Tensor
    scales: Tensor
    shape: tuple[int, int]
    group_scales: Tensor | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        rows, columns = self.shape
        halves = self.kind in ("INT4", "NVFP4")
        assert tuple(self.codes.shape) == (rows, columns // 2 if halves else columns)
        assert self.scales.shape[0] in (1, rows) and columns % self.scales.shape[1] == 0

    def values(self) -> Tensor:
        """float32 [rows, columns], exact as the format has them."""
        rows, columns = self.shape
        groups = self.scales.shape[1]
        out = unpacked(self.kind, self.codes).view(rows, groups, -1)
        return out.mul_(self.scales[:, :, None]).view(rows, columns)

    def parts(self) -> Iterator[NarrowMatrix]:
        """The matrix in ranges of its rows, of some millions of elements each."""
        rows, columns = self.shape
        step = max(1, _CHUNK // max(columns, 1))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            scales = self.scales if len(self.scales) == 1 else self.scales[start:stop]
            groups = None if self.group_scales is None else self.group_scales[start:stop]
            codes, shape = self.codes[start:stop], (stop - start, columns)
            yield NarrowMatrix(self.kind, codes, scales, shape, groups, self.scale)

    def loses_codes(self) -> bool:
        """Whether scales of zero make nothing of codes that are not zero. NVFP4 rounds the scales
        of groups that are small beside others to zero: there, whether all scales are zero."""
        if bool(self.scales.all()) or (self.kind == "NVFP4" and bool(self.scales.any())):
            return False
        for part in self.parts():
            codes = unpacked(self.kind, part.codes).view(part.shape[0], part.scales.shape[1], -1)
            if bool(((part.scales == 0) & codes.any(dim=2)).any()):
                return True
        return False

    def unchanged(self) -> QuantizedTensor:
        """INT4 with scales that bfloat16 holds, or NVFP4, as the blocks of this name: codes and
        scales as they are."""
        if self.kind == "INT4":
            data = int4_blocks(self.codes, self.scales)
        else:
            assert self.group_scales is not None
            data = nvfp4_blocks(self.codes, self.group_scales, self.scale)
        return QuantizedTensor(data, PLANE_FORMATS[self.kind], self.shape)

    def blocks(self) -> QuantizedTensor:
        """The blocks of `block_format`. Raises ValueError for values that they cannot hold."""
        block = block_format(self.kind, self.shape[1])
        assert block is not None, f"{self.shape[1]} columns divide into no blocks"
        if self.kind == "INT8":
            data = q8_0_blocks(self.codes, self.scales.expand(self.shape[0], -1))
        elif self.kind == "INT4":
            data = q4_0_blocks(self.codes, self.scales)
        elif block.name == "Q6_K":
            data = q6_k_blocks(unpacked(self.kind, self.codes), self.scales)
        else:
            return quantize(self.values(), block)
        return QuantizedTensor(data, block, self.shape)


def block_format(kind: Kind, columns: int) -> BlockFormat | None:
    """The blocks that are nearest to a kind's values; None where rows do not divide into blocks."""
    name = {"FP8": "Q8_0", "INT8": "Q8_0", "INT4": "Q4_0"}.get(kind)
    if name is None:
        # A block of Q6_K has a scale for each 16 columns, as NVFP4; one of Q8_0 for 32.
        name = "Q6_K" if columns % BLOCK_FORMATS["Q6_K"].block_size == 0 else "Q8_0"
    block = BLOCK_FORMATS[name]
    return block if columns % block.block_size == 0 else None


def unpacked(kind: Kind, codes: Tensor) -> Tensor:
    """Codes as a new float32 tensor [rows, columns], before their scales."""
    if kind in ("FP8", "INT8"):
        return codes.float()
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).view(len(codes), -1)
    return pairs.float() - 8 if kind == "INT4" else fp4_values(codes.device)[pairs.int()]
