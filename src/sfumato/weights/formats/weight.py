"""One weight, however its numbers are stored: what the network, `ops` and the loader ask of it.

Float tensors of torch are weights as they are.  The others are dataclasses of tensors with one
base, `Stored`: blocks, 8-bit codes with scales, what kernels of a device read these from, and
matrices that lie apart in files.  Code asks `form` which of them a function serves.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, overload

import torch
from torch import Tensor

from sfumato.weights.formats.format import FLOAT, Format


class Weight(Protocol):
    """A matrix, or several of one size, stacked."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, index: int | slice, /) -> Weight:
        """Entry or range (step 1) of the first axis, without a copy."""
        ...

    def index_select(self, dim: int, ids: Tensor, /) -> Weight:
        """Copies the entries `ids` (int64 [n]) of the first axis, which `dim` is."""
        ...

    @overload
    def to(self, dtype: torch.dtype, /) -> Tensor: ...

    @overload
    def to(self, device: torch.device, /) -> Weight: ...


class Stored:
    """A weight in another form than floats: a frozen dataclass, in whose fields are its tensors."""

    form: ClassVar[str]

    if TYPE_CHECKING:  # dataclasses would take these for the defaults of their fields

        @property
        def format(self) -> Format:
            """Of the numbers, however they stand in memory."""

        @property
        def shape(self) -> tuple[int, ...]:
            """In elements."""

    @abstractmethod
    def __getitem__(self, index: int | slice, /) -> Stored:
        """Entry or range (step 1) of the first axis, without a copy. Raises IndexError for an entry
        out of range, ValueError for a step and for an axis whose entries do not lie apart."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All elements as a new tensor: computed in float32, then rounded to `dtype`."""

    def index_select(self, dim: int, ids: Tensor, /) -> Stored:
        """Copies the entries `ids` (int64 [n]) of the first axis, which `dim` is. Raises ValueError
        where they do not lie apart."""
        raise ValueError(f"{self!r}: single rows do not lie apart: dequantize first")

    def part_of_rows(self, ids: Tensor, first: int, end: int, /) -> Stored:
        """Copies columns first..end, of whole blocks, of the rows `ids` (int64 [n]) of a matrix.
        Raises ValueError where rows do not lie apart."""
        raise ValueError(f"{self!r}: single rows do not lie apart: dequantize first")

    def factor(self, x: Tensor) -> Tensor:
        """What the weight is multiplied with instead of x [..., in], in x's dtype."""
        return x

    @property
    def device(self) -> torch.device:
        return self._tensors()[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(each.nbytes for each in self._tensors())

    @overload
    def to(self, dtype: torch.dtype, /) -> Tensor: ...

    @overload
    def to(self, device: torch.device | str, /) -> Self: ...

    def to(self, to: torch.dtype | torch.device | str, /) -> Tensor | Self:
        """The weight as floats of a dtype, or on a device."""
        if isinstance(to, torch.dtype):
            return self.dequantize(to)
        return self.moved(lambda each: each.to(to))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        """The weight with each of its tensors moved."""
        values: Any = self
        own = {each.name: getattr(self, each.name) for each in fields(values)}
        changed = {name: move(each) for name, each in own.items() if isinstance(each, Tensor)}
        moved: Self = replace(values, **changed)
        return moved

    def _tensors(self) -> list[Tensor]:
        values: Any = self
        own = (getattr(self, each.name) for each in fields(values))
        return [each for each in own if isinstance(each, Tensor)]


def form_of(weight: object) -> str:
    """The form of a weight: that of its class, or FLOAT."""
    return weight.form if isinstance(weight, Stored) else FLOAT


def in_steps_of_1(index: int | slice, what: str = "rows") -> None:
    """Raises ValueError for a range with another step."""
    if isinstance(index, slice) and index.step not in (None, 1):
        raise ValueError(f"{what} are taken in steps of 1, not {index.step}; use index_select")
