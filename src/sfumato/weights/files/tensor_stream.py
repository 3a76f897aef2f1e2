"""Tensors on their way to a file: name, shape, format, and their bytes in pieces.

A tensor is never in memory whole in its new format. Knows no format of files: `write_gguf.py` and
`write_safetensors.py` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from sfumato.weights.formats import FORMATS, QuantizedTensor, Stored, encoded, nbytes

_CHUNK = 1 << 22  # elements read at a time: what is in memory stays at some tens of megabytes


@dataclass(frozen=True)
class TensorStream:
    """A tensor to be written: its name in the file, its shape in torch order, its format ("F32",
    "Q4_K", …), and how to get its bytes, uint8 tensors one after the other."""

    name: str
    shape: tuple[int, ...]
    format: str
    chunks: Callable[[], Iterator[Tensor]] = field(repr=False)

    @classmethod
    def of(cls, name: str, value: Tensor | Stored, format: str) -> TensorStream:
        """A tensor that is in memory, or mapped, to be written in a format."""
        return cls(name, tuple(value.shape), format, lambda: recoded(value, format))

    @property
    def nbytes(self) -> int:
        return nbytes(self.format, self.shape)


def recoded(value: Tensor | Stored, format: str) -> Iterator[Tensor]:
    """The bytes of a tensor in another format, uint8, chunk by chunk; blocks that are of this
    format already stay as they are. Raises ValueError for values that a format cannot hold."""
    if isinstance(value, QuantizedTensor):
        if value.format.name == format:
            yield from value.data.view(-1).split(_CHUNK)
            return
        blocks = value.data.view(-1, value.format.block_bytes)
        for part in blocks.split(_CHUNK // value.format.block_size):
            yield from _encoded(value.format.dequantize(part).view(-1), format)
        return
    assert isinstance(value, Tensor), f"{value!r}: codes of files are joined from pieces"
    for part in value.reshape(-1).split(_CHUNK):
        yield from _encoded(part, format)


def _encoded(values: Tensor, format: str) -> Iterator[Tensor]:
    """Float [n], n a multiple of every block size unless it is the end, as bytes of a format."""
    yield from (chunk.view(-1) for chunk in encoded(values, FORMATS[format]))
