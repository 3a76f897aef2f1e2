"""One mapped file and the tensors in it, which the GGUF and the safetensors parsers give back; and
tensors on their way to a file.

Opening maps the file and reads nothing; a tensor is a view of the mapping, so that its bytes come
from disk when they are used. A tensor that is written is never in memory whole in its new format.
Knows no header format.
"""

from __future__ import annotations

import contextlib
import mmap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor

from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.formats import (
    FLOAT,
    FORMATS,
    Format,
    QuantizedTensor,
    Weight,
    encoded,
    of_files,
    weight_of,
)


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor's bytes are. `name` is the file's; `shape` is in torch order (last axis
    contiguous); `format` is "F32", "BF16", "Q4_K", …; `offset` (from the start of the file) and
    `nbytes` are in bytes.

    Subclasses make a tensor of others: their fields say what `read` gives."""

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int
    file: Path
    offset: int

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        """The tensors of files that `read` takes."""
        return (self,)

    def read(self, files: Files) -> Weight:
        """The tensor; a view of its mapped file. Raises CheckpointError for what cannot be used."""
        return files[self.file].read(self.name)

    def recoded(self, files: Files, format: str) -> Iterator[Tensor]:
        """The tensor's bytes in another format, uint8, in pieces. Raises ValueError for values that
        the format cannot hold."""
        return recoded(self.read(files), format)

    def recoded_part(
        self, files: Files, format: str, number: int, part: int, parts: int
    ) -> Iterator[Tensor]:
        """One of `parts` equal ranges of the rows of a matrix of a stack [n, rows, columns], as
        `recoded`."""
        matrix = self.read(files)[number]
        rows = matrix.shape[0] // parts
        return recoded(matrix[part * rows : (part + 1) * rows], format)

    def unchanged(self) -> TensorInfo | None:
        """The same tensor with the codes and scales of its file, where `read` makes others of them
        and can leave that."""
        return None

    def in_format(self, format: Format) -> Self:
        """The same tensor in a format, with the bytes that it has then."""
        return replace(self, format=format.name, nbytes=format.nbytes(self.shape))


def map_file(path: Path) -> mmap.mmap:
    """Maps a file read-only. Raises CheckpointError if it is absent, empty or unreadable."""
    if not path.is_file():
        problem = "is not a regular file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path}: {problem}; give the path of a weight file")
    try:
        with path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path}: the file is empty; download it again") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


@dataclass(frozen=True)
class TensorFile:
    """An opened file: its metadata, its tensors by the file's names, and its mapping."""

    path: Path
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    mapping: mmap.mmap = field(repr=False)

    @cached_property
    def _bytes(self) -> Tensor:
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so of any read-only buffer.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self.mapping, dtype=torch.uint8)

    def read(self, name: str) -> Tensor | QuantizedTensor:
        """The tensor as stored, a view of the mapping: writing to it ends the process.

        Raises CheckpointError if its format is not one that this package reads, KeyError if the
        file has no such tensor.
        """
        info = self.tensors[name]
        require_readable(info)
        data, format = self.data(name), FORMATS[info.format]
        if format.form == FLOAT and info.offset % format.dtype.itemsize:
            data = data.clone()  # old safetensors files do not align their data
        return weight_of(data, format, info.shape)

    def data(self, name: str) -> Tensor:
        """A tensor's bytes, uint8 [n], whatever its format: a view of the mapping."""
        info = self.tensors[name]
        return self._bytes[info.offset : info.offset + info.nbytes]

    @property
    def address(self) -> int:
        """Where the mapping begins in memory."""
        return self._bytes.data_ptr()

    def prefetch(self, name: str) -> None:
        """Lets the system begin to read a tensor's bytes from disk, where it can."""
        info = self.tensors[name]
        start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(AttributeError, OSError):  # not every system takes the advice
            end = info.offset + info.nbytes
            self.mapping.madvise(mmap.MADV_WILLNEED, start, end - start)


Files = Mapping[Path, TensorFile]


class FileSizes:
    """Mapped files, each for as long as some tensor is a view of it. A page behind the end of a
    file that was truncated cannot be read: the process that tries ends (`ops.cpu.library`)."""

    def __init__(self, files: Iterable[TensorFile]) -> None:
        self._files = [(file.path, ref(file.mapping)) for file in files]

    def truncated(self) -> Path | None:
        """A file that is in use and shorter than when it was opened."""
        for path, mapped in self._files:
            mapping = mapped()
            if mapping is not None and mapping.size() < len(mapping):
                return path
        return None


def require_readable(info: TensorInfo) -> None:
    """Raises CheckpointError if the tensor's format is not one that this package reads."""
    if info.format not in of_files():
        supported = ", ".join(of_files())
        raise CheckpointError(
            f"{info.file}: tensor {quoted(info.name)} is stored as {info.format}, which is not "
            f"supported; use a file with {supported}"
        )


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
    def of(cls, name: str, value: Weight, format: str) -> TensorStream:
        """A tensor that is in memory, or mapped, to be written in a format."""
        return cls(name, tuple(value.shape), format, lambda: recoded(value, format))

    @property
    def nbytes(self) -> int:
        return FORMATS[self.format].nbytes(self.shape)


def recoded(value: Weight, format: str) -> Iterator[Tensor]:
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
