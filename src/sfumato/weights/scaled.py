"""Matrices of codes with one scale a row: FP8 (e4m3) and INT8, as FP8-dynamic and W8A8 checkpoints
have them, and FP4 (e2m1), as NVFP4 ones do, with a scale for each 16 columns besides.

A product of such a matrix rounds what it is multiplied with to codes of the same kind, with a scale
for each row of it: `round_rows`. Knows no files and no layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sfumato.weights import fp4

Kind = Literal["FP8", "INT8", "FP4"]

KINDS: dict[str, Kind] = {"FP8": "FP8", "INT8": "INT8", "FP4": "FP4"}
CODES: dict[str, torch.dtype] = {
    "FP8": torch.float8_e4m3fn,
    "INT8": torch.int8,
    "FP4": torch.uint8,  # two columns each
}
MOST: dict[str, float] = {"FP8": 448.0, "INT8": 127.0, "FP4": fp4.LARGEST}
"""The code of the largest number of a row, or code times scale of its group."""
LEAST = 1e-30
"""A row without a larger number is rounded as if it had this one: its scale then has an inverse."""
_CHUNK = 1 << 22  # elements that are rounded or made floats at a time: 16 MiB of float32


@dataclass(frozen=True)
class ScaledTensor:
    """A matrix, or several of one size, stacked.

    codes: float8_e4m3fn or int8 [..., rows, columns], contiguous, or, of FP4, uint8 [..., rows,
    columns / 2]; scales: float32 [..., rows]; groups: of FP4 alone, float8_e4m3fn
    [..., rows, columns / 16], contiguous; see `fp4.to_codes`. A number is its code times the scale
    of its row, and that of its group.
    """

    codes: Tensor
    scales: Tensor
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.codes.dtype in CODES.values() and self.codes.is_contiguous()
        assert self.scales.dtype == torch.float32 and self.scales.is_contiguous()
        assert self.scales.shape == self.codes.shape[:-1]
        assert (self.groups is not None) == (self.kind == "FP4")
        if self.groups is not None:
            assert self.groups.dtype == torch.float8_e4m3fn and self.groups.is_contiguous()
            assert self.groups.shape == (*self.scales.shape, self.shape[-1] // fp4.GROUP)

    @property
    def kind(self) -> Kind:
        return next(KINDS[name] for name, dtype in CODES.items() if dtype == self.codes.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, columns = self.codes.shape
        return (*rows, columns * 2 if self.groups is not None else columns)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        groups = 0 if self.groups is None else self.groups.numel()
        return self.codes.numel() + groups + self.scales.numel() * 4

    def __getitem__(self, index: int | slice) -> ScaledTensor:
        """Entry or range of the first axis, without a copy. Raises IndexError for an entry out of
        range, ValueError for a step and for a single row, which has no axis of rows."""
        if isinstance(index, int) and self.codes.ndim < 3:
            raise ValueError("a single row is no matrix: take a range of one row")
        if isinstance(index, slice) and index.step not in (None, 1):
            raise ValueError(f"rows are taken in steps of 1, not {index.step}")
        groups = None if self.groups is None else self.groups[index]
        return ScaledTensor(self.codes[index], self.scales[index], groups)

    def to(self, device: torch.device | str) -> ScaledTensor:
        groups = None if self.groups is None else self.groups.to(device)
        return ScaledTensor(self.codes.to(device), self.scales.to(device), groups)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All numbers as a new tensor: computed in float32, in float64 where `dtype` is that, then
        rounded to `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        rows, codes = out.view(-1, self.shape[-1]), self.codes.flatten(0, -2)
        scales = self.scales.view(-1, 1)
        for at in _chunks(*rows.shape):
            if self.groups is None:
                rows[at] = codes[at].to(wide) * scales[at].to(wide)
            else:
                groups = self.groups.flatten(0, -2)[at].to(wide) * scales[at].to(wide)
                rows[at] = fp4.values(codes[at], groups)
        return out

    def __repr__(self) -> str:
        return f"ScaledTensor({self.kind}, {self.shape}, {self.device})"


def scaled_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a `ScaledTensor` of this kind and shape."""
    *rows, columns = shape
    groups = columns // fp4.GROUP if kind == "FP4" else 0
    return math.prod(rows) * (code_bytes(kind, columns) + groups + 4)


def code_bytes(kind: str, columns: int) -> int:
    """Bytes of the codes of a row."""
    return columns // 2 if kind == "FP4" else columns


def round_rows(x: Tensor, kind: Kind) -> ScaledTensor:
    """Floats [..., columns] as codes, each row with the scale by which its largest number has the
    largest code (of FP4, times the largest scale of a group): to nearest, ties to even codes.

    Computed in float32; columns of FP4 are a multiple of 16. A row's codes depend on no other row.
    A row that holds NaN or infinity has a scale of NaN: what is multiplied with it is NaN, as with
    floats.
    """
    flat = x.reshape(-1, x.shape[-1])
    rows, columns = flat.shape
    width = code_bytes(kind, columns)
    codes = torch.empty(rows, width, dtype=CODES[kind], device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    groups = None
    if kind == "FP4":
        size = rows, columns // fp4.GROUP
        groups = torch.empty(size, dtype=torch.float8_e4m3fn, device=x.device)
    for at in _chunks(*flat.shape):
        wide = flat[at].float()
        top = wide.abs().amax(1).clamp(min=LEAST)
        numbers = wide * (top.reciprocal() * MOST[kind])[:, None]
        if kind == "INT8":
            numbers = numbers.round()
        # Beyond the largest number some versions of torch give NaN, and some the largest number.
        numbers = numbers.clamp(-MOST[kind], MOST[kind]).nan_to_num(0)
        if groups is None:
            codes[at] = numbers.to(CODES[kind])
        else:
            codes[at], groups[at] = fp4.to_codes(numbers)
        scales[at] = torch.where(top.isfinite(), top * (1 / MOST[kind]), torch.nan)
    shape = x.shape[:-1]
    if groups is not None:
        groups = groups.view(*shape, groups.shape[1])
    return ScaledTensor(codes.view(*shape, width), scales.view(shape), groups)


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(columns, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
