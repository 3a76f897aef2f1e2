"""One weight, however its numbers are stored: what the network, `ops` and the loader ask of it.

Float tensors of torch are weights as they are.  The others are dataclasses of tensors with one
base, `Stored`: blocks (`QuantizedTensor`), 8-bit codes with scales, and what kernels of a device
read these from.  Code asks `form` which of them a function serves.  Blocks become floats, and
floats blocks, in chunks, so that temporaries stay small whatever the tensor's size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, overload

import torch
from torch import Tensor

from sfumato.weights.formats.format import BLOCKS, FLOAT, Format


class Stored:
    """A weight in another form than floats: a frozen dataclass, in whose fields are its tensors."""

    form: ClassVar[str]

    if TYPE_CHECKING:  # dataclasses would take these for the defaults of their fields

        @property
        def format(self) -> Format:
            """The format of the numbers, whatever their layout in memory."""

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


Weight = Tensor | Stored
"""A matrix, or several of one size, stacked."""


def form_of(weight: object) -> str:
    """The form of a weight: that of its class, or FLOAT."""
    return weight.form if isinstance(weight, Stored) else FLOAT


def in_steps_of_1(index: int | slice, what: str = "rows") -> None:
    """Raises ValueError for a range with another step."""
    if isinstance(index, slice) and index.step not in (None, 1):
        raise ValueError(f"{what} are taken in steps of 1, not {index.step}; use index_select")


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
