"""FP8 (e4m3) and INT8: 8-bit codes with one scale a row, as FP8-dynamic and W8A8 checkpoints have.

A product of such a matrix rounds what it is multiplied with to codes of the same kind, with a scale
for each row of it: `round_rows`.  Without a GPU's kernels for codes (`ops.triton.codes`), matrices
of published checkpoints become Q8_0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sfumato.weights.formats import q8_0
from sfumato.weights.formats.format import (
    SCALED,
    Format,
    Published,
    Stored,
    in_steps_of_1,
    ranges_of_rows,
)

Kind = Literal["FP8", "INT8"]

KINDS: dict[str, Kind] = {"FP8": "FP8", "INT8": "INT8"}
CODES: dict[str, torch.dtype] = {"FP8": torch.float8_e4m3fn, "INT8": torch.int8}
MOST: dict[str, float] = {"FP8": 448.0, "INT8": 127.0}
"""The code of the largest number of a row."""
LEAST = 1e-30
"""A row without a larger number is rounded as if it had this one: its scale then has an inverse."""
_CHUNK = 1 << 22  # elements that are rounded or made floats at a time: 16 MiB of float32


def _fp8(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def _int8(codes: Tensor) -> Tensor:
    return codes.view(torch.int8).float()


FP8 = Format(
    *("FP8", 1, 1, _fp8),
    form=SCALED,
    dtype=CODES["FP8"],
    row_bytes=4,
    published=Published("F8_E4M3", 1, _fp8, ((q8_0.Q8_0, None),)),
)
INT8 = Format(
    *("INT8", 1, 1, _int8),
    form=SCALED,
    dtype=CODES["INT8"],
    row_bytes=4,
    published=Published("I8", 1, _int8, ((q8_0.Q8_0, q8_0.of_codes),)),
)


@dataclass(frozen=True, repr=False)
class ScaledTensor(Stored):
    """A matrix, or several of one size, stacked.

    codes: float8_e4m3fn or int8 [..., rows, columns], contiguous; scales: float32 [..., rows]. A
    number is its code times the scale of its row.
    """

    codes: Tensor
    scales: Tensor
    form = SCALED

    def __post_init__(self) -> None:
        assert self.codes.dtype in CODES.values() and self.codes.is_contiguous()
        assert self.scales.dtype == torch.float32 and self.scales.is_contiguous()
        assert self.scales.shape == self.codes.shape[:-1]

    @property
    def format(self) -> Format:
        return INT8 if self.kind == "INT8" else FP8

    @property
    def kind(self) -> Kind:
        return "INT8" if self.codes.dtype == torch.int8 else "FP8"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def __getitem__(self, index: int | slice, /) -> ScaledTensor:
        if isinstance(index, int) and self.codes.ndim < 3:
            raise ValueError("a single row is no matrix: take a range of one row")
        in_steps_of_1(index)
        return ScaledTensor(self.codes[index], self.scales[index])

    def index_select(self, dim: int, ids: Tensor, /) -> ScaledTensor:
        assert dim == 0
        codes = self.codes.view(torch.uint8).index_select(0, ids).view(self.codes.dtype)
        return ScaledTensor(codes, self.scales.index_select(0, ids))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantizes as `Stored.dequantize` does, in float64 where `dtype` is that."""
        wide = torch.promote_types(dtype, torch.float32)
        out = torch.empty(self.codes.shape, dtype=dtype, device=self.device)
        rows, codes = out.view(-1, self.shape[-1]), self.codes.view(-1, self.shape[-1])
        scales = self.scales.view(-1, 1)
        for at in ranges_of_rows(codes.shape, _CHUNK):
            rows[at] = codes[at].to(wide) * scales[at].to(wide)
        return out

    def factor(self, x: Tensor) -> Tensor:
        """x rounded to codes of the same kind."""
        return round_rows(x, self.kind).dequantize(x.dtype)

    def __repr__(self) -> str:
        return f"ScaledTensor({self.kind}, {self.shape}, {self.device})"


def round_rows(x: Tensor, kind: Kind) -> ScaledTensor:
    """Floats [..., columns] as codes, each row with the scale by which its largest number has the
    largest code: to nearest, ties to even codes.

    Computed in float32. A row's codes depend on no other row. A row that holds NaN or infinity has
    a scale of NaN: what is multiplied with it is NaN, as with floats.
    """
    flat = x.reshape(-1, x.shape[-1])
    codes = torch.empty(flat.shape, dtype=CODES[kind], device=x.device)
    scales = torch.empty(len(flat), dtype=torch.float32, device=x.device)
    for at in ranges_of_rows(flat.shape, _CHUNK):
        wide = flat[at].float()
        top = wide.abs().amax(1).clamp(min=LEAST)
        numbers = wide * (top.reciprocal() * MOST[kind])[:, None]
        if kind == "INT8":
            numbers = numbers.round()
        # Beyond the largest number some versions of torch give NaN, and some the largest number.
        numbers = numbers.clamp(-MOST[kind], MOST[kind]).nan_to_num(0)
        codes[at] = numbers.to(CODES[kind])
        scales[at] = torch.where(top.isfinite(), top * (1 / MOST[kind]), torch.nan)
    return ScaledTensor(codes.view(x.shape), scales.view(x.shape[:-1]))
