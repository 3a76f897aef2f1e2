"""GGUF files, little-endian: reads versions 2 and 3, metadata and where each tensor's bytes are,
also in several parts as llama.cpp's `gguf-split` writes them; writes version 3, tensor by tensor.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file is treated as hostile:
every count and length is checked against the bytes left before anything is allocated or looped
over. Knows no architecture: any GGUF file's metadata can be read here.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from sfumato.weights.errors import CheckpointError, first_of, quoted
from sfumato.weights.files.tensorfile import TensorFile, TensorInfo, TensorStream, map_file
from sfumato.weights.formats import FORMATS

# Far above any real file (the published one: 16 MB of header, 777 thousand strings, 692 tensors),
# and low enough that a hostile header costs well under a second.
_MAX_HEADER = 256 << 20
_MAX_STRINGS = 1 << 21
_MAX_ENTRIES = 1 << 16
_MAX_NAME = 1 << 16
_MAX_DIMENSIONS = 4

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_BOOL, _STRING, _ARRAY, _FLOAT64 = 7, 8, 9, 12
# Metadata value type → how one value is stored.
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    _FLOAT64: np.dtype("<f8"),
}
# Tensor type → (name, elements per block, bytes per block) of what is not read here, so that it can
# be named (ggml.h, ggml-common.h); `FORMATS` has the others.
_UNREADABLE = {
    3: ("Q4_1", 32, 20),
    9: ("Q8_1", 32, 40),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    19: ("IQ1_S", 256, 50),
    22: ("IQ2_S", 256, 82),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

MOST_PARTS = 512
_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.[gG][gG][uU][fF])$")

ALIGNMENT = 32

_UINT32, _INT32, _FLOAT32, _UINT64, _INT64 = 4, 5, 6, 10, 11
_ARRAYS = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "int16": 3,
    "uint32": _UINT32,
    "int32": _INT32,
    "float32": _FLOAT32,
    "bool": _BOOL,
    "uint64": _UINT64,
    "int64": _INT64,
    "float64": _FLOAT64,
}


def tensor_types() -> dict[int, tuple[str, int, int]]:
    """Tensor type → (name, elements per block, bytes per block)."""
    readable = {
        format.ggml_type: (format.name, format.block_size, format.block_bytes)
        for format in FORMATS.values()
        if format.ggml_type is not None
    }
    return _UNREADABLE | readable


def read_gguf(path: str | Path) -> TensorFile:
    """Opens a GGUF file; reads its header only.

    Metadata: key → int, float (NumPy's, a subclass, where it is stored as float64), bool, str, a
    list of str, or a NumPy array (bool or the stored numeric type). Tensor shapes are in torch
    order, GGUF's reversed. Raises CheckpointError for anything that is not a sound GGUF file.
    """
    path = Path(path)
    mapping = map_file(path)
    header = _Header(path, mapping)
    metadata, tensors = header.parse()
    return TensorFile(path, metadata, tensors, mapping)


class _Header:
    """A cursor over the header of one file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.end = min(len(data), _MAX_HEADER)
        self.strings_left = _MAX_STRINGS
        self.types = tensor_types()

    def fail(self, what: str, problem: str) -> NoReturn:
        raise CheckpointError(
            f"{self.path}: {what}: {problem} (at byte {self.at}); the file is damaged or not a "
            "GGUF file: download or convert it again"
        )

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        self._version()
        tensor_count = self._count("number of tensors", smallest=24)
        entry_count = self._count("number of metadata entries", smallest=13)
        metadata: dict[str, Any] = {}
        for index in range(entry_count):
            key = self._name(f"metadata key {index}")
            if key in metadata:
                self.fail(f"metadata key {quoted(key)}", "occurs twice")
            metadata[key] = self._value(f"metadata key {quoted(key)}")
        alignment = self._alignment(metadata)
        tensors: dict[str, TensorInfo] = {}
        for index in range(tensor_count):
            info = self._tensor(f"tensor {index}", alignment)
            if info.name in tensors:
                self.fail(f"tensor {quoted(info.name)}", "occurs twice")
            tensors[info.name] = info
        return metadata, self._placed(tensors, alignment)

    def _version(self) -> None:
        if self.data[:4] != b"GGUF":
            self.fail("magic", f"the file begins with {self.data[:4]!r} instead of b'GGUF'")
        self.at = 4
        version = self._integer(_U32, "version")
        if version and version & 0xFFFF == 0:
            raise CheckpointError(
                f"{self.path}: version: this is a big-endian GGUF file, which is not supported; "
                "use the little-endian one"
            )
        if version not in (2, 3):
            raise CheckpointError(
                f"{self.path}: version: GGUF version {version} is not supported; use a file of "
                "version 2 or 3"
            )

    def _advance(self, size: int, what: str) -> int:
        """Steps over `size` bytes and returns where they begin."""
        if size > self.end - self.at:
            if self.end < len(self.data):
                self.fail(what, f"the header is longer than {_MAX_HEADER >> 20} MiB")
            self.fail(what, f"needs {size} bytes where the file has {self.end - self.at} left")
        start = self.at
        self.at += size
        return start

    def _integer(self, layout: struct.Struct, what: str) -> int:
        value: int = layout.unpack_from(self.data, self._advance(layout.size, what))[0]
        return value

    def _count(self, what: str, smallest: int) -> int:
        """A number of entries of at least `smallest` bytes each."""
        count = self._integer(_U64, what)
        if count > _MAX_ENTRIES or count * smallest > self.end - self.at:
            self.fail(what, f"{count} cannot be: the file has {self.end - self.at} bytes left")
        return count

    def _name(self, what: str) -> str:
        size = self._integer(_U64, what)
        if not 0 < size <= _MAX_NAME:
            self.fail(what, f"a name of {size} bytes")
        return self._text(size, what)

    def _text(self, size: int, what: str) -> str:
        start = self._advance(size, what)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            self.fail(what, "is not UTF-8")

    def _value(self, what: str) -> Any:
        kind = self._integer(_U32, what)
        if kind == _STRING:
            return self._text(self._integer(_U64, what), what)
        if kind == _ARRAY:
            return self._array(what)
        value = self._numbers(kind, 1, what)[0]
        if kind == _FLOAT64:
            return value  # a writer then knows that it was 64 bits wide
        return bool(value) if kind == _BOOL else value.item()

    def _array(self, what: str) -> list[str] | np.ndarray:
        kind = self._integer(_U32, what)
        count = self._integer(_U64, what)
        if kind == _STRING:
            return self._strings(count, what)
        if kind == _ARRAY:
            self.fail(what, "is an array of arrays, which no known writer makes")
        numbers = self._numbers(kind, count, what)
        return numbers.astype(bool) if kind == _BOOL else numbers

    def _numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        if kind not in _SCALARS:
            self.fail(what, f"unknown value type {kind}")
        dtype = _SCALARS[kind]
        start = self._advance(count * dtype.itemsize, what)
        return np.frombuffer(self.data[start : self.at], dtype)

    def _strings(self, count: int, what: str) -> list[str]:
        """The hot loop: a vocabulary has hundreds of thousands of strings."""
        if count * _U64.size > self.end - self.at or count > self.strings_left:
            self.fail(what, f"an array of {count} strings")
        self.strings_left -= count
        data, at, end, size_at = self.data, self.at, self.end, _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + size_at(data, at)[0]
                if at > end:
                    raise IndexError
                strings.append(data[start:at].decode())
        except (IndexError, struct.error):
            self.fail(what, f"string {len(strings)} runs past the end of the file")
        except UnicodeDecodeError:
            self.fail(what, f"string {len(strings)} is not UTF-8")
        self.at = at
        return strings

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        power_of_two = type(alignment) is int and alignment & (alignment - 1) == 0
        if not (power_of_two and 8 <= alignment <= _MAX_HEADER):
            shown = quoted(alignment)
            self.fail("general.alignment", f"{shown} is not a power of two from 8 upwards")
        return int(alignment)

    def _tensor(self, what: str, alignment: int) -> TensorInfo:
        """One tensor's entry; its offset is still relative to the data section."""
        name = self._name(what)
        what = f"tensor {quoted(name)}"
        dimensions = self._integer(_U32, what)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self.fail(what, f"{dimensions} dimensions (1 to {_MAX_DIMENSIONS} can be)")
        shape = tuple(self._integer(_U64, what) for _ in range(dimensions))[::-1]
        kind = self._integer(_U32, what)
        offset = self._integer(_U64, what)
        if kind not in self.types:
            self.fail(what, f"unknown tensor type {kind}")
        type_name, block_size, block_bytes = self.types[kind]
        if 0 in shape:
            self.fail(what, f"has no elements (shape {shape})")
        if shape[-1] % block_size:
            self.fail(what, f"rows of {shape[-1]} are no multiple of {type_name}'s {block_size}")
        if offset % alignment:
            self.fail(what, f"offset {offset} is not aligned to {alignment}")
        nbytes = math.prod(shape) // block_size * block_bytes
        return TensorInfo(name, shape, type_name, nbytes, self.path, offset)

    def _placed(self, tensors: dict[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """Makes the offsets absolute, and refuses tensors that overlap or leave the file."""
        data_start = -(-self.at // alignment) * alignment
        placed = {}
        end, previous = 0, ""
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            what = f"tensor {quoted(info.name)}"
            if info.offset < end:
                self.fail(what, f"overlaps tensor {quoted(previous)}")
            end, previous = info.offset + info.nbytes, info.name
            if data_start + end > len(self.data):
                missing = data_start + end - len(self.data)
                self.fail(what, f"ends {missing} bytes past the end of the file: it is truncated")
            placed[info.name] = replace(info, offset=data_start + info.offset)
        return placed


def part_names(name: str) -> list[str]:
    """The names of all parts of the checkpoint that a file of this name is a part of, in order; the
    name itself where it is no part's. Raises CheckpointError for more than MOST_PARTS."""
    match = _PART.search(name)
    if match is None:
        return [name]
    number, count = int(match[1]), int(match[2])
    if not 1 <= number <= count <= MOST_PARTS:
        raise CheckpointError(
            f"{name}: names part {number} of {count}; parts are numbered from 1, and a checkpoint "
            f"has at most {MOST_PARTS}"
        )
    stem, end = name[: match.start()], match[3]
    return [f"{stem}-{part:05}-of-{count:05}{end}" for part in range(1, count + 1)]


def part_files(path: Path) -> list[Path]:
    """The files of the checkpoint that this file is, or is a part of. Raises CheckpointError where
    some are absent."""
    files = [path.with_name(name) for name in part_names(path.name)]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise CheckpointError(
            f"{path}: is one of {len(files)} parts, of which {len(absent)} are absent "
            f"({first_of(absent)}); download them into the same folder"
        )
    return files


def check_parts(files: Sequence[TensorFile]) -> None:
    """Checks that these files, in order, are all parts of one checkpoint, by the numbers that they
    hold. Raises CheckpointError."""
    if len(files) == 1:
        # 0 is what gguf-split writes into a file that it merged of parts.
        if files[0].metadata.get("split.count") != 0:
            _check_value(files[0], "split.count", 1, 1)
        return
    for number, file in enumerate(files):
        _check_value(file, "split.count", None, len(files))
        _check_value(file, "split.no", None, number)
    tensors = sum(len(file.tensors) for file in files)
    _check_value(files[0], "split.tensors.count", tensors, tensors)


def _check_value(file: TensorFile, key: str, default: int | None, expected: int) -> None:
    value: Any = file.metadata.get(key, default)
    if value != expected or isinstance(value, bool):
        raise CheckpointError(
            f"{file.path}: {key}: is {quoted(value)}, and by the names and tensors of the files it "
            f"is {expected}; download all parts again, and keep their names"
        )


def write_gguf(
    stream: BinaryIO,
    metadata: Mapping[str, Any],
    tensors: Sequence[TensorStream],
    wrote: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes a file. `wrote` is called with the bytes of tensors written since its last call.

    metadata: key → str, bool, int, float, a list of str, or a NumPy array. Readers ask for exact
    types: integers become uint32 where they fit, floats float32, as other writers have it. Those
    outside float32's range become float64, and NumPy's float64, which `read_gguf` gives, stay it.
    """
    head, starts = layout(metadata, tensors)
    stream.write(head)
    for tensor, start in zip(tensors, starts, strict=True):
        stream.write(bytes(start - stream.tell()))
        for chunk in tensor.chunks():
            stream.write(chunk.numpy().data)
            wrote(chunk.numel())
        assert stream.tell() == start + tensor.nbytes, f"{tensor.name}: bytes are missing"


def layout(metadata: Mapping[str, Any], tensors: Sequence[TensorStream]) -> tuple[bytes, list[int]]:
    """The file's header, and where each tensor starts, in bytes from the start of the file."""
    entries = [_text(key) + _value(key, value) for key, value in metadata.items()]
    offset, infos, offsets = 0, [], []
    for tensor in tensors:
        shape = tensor.shape[::-1] or (1,)
        sizes = b"".join(map(_U64.pack, shape))
        kind = _U32.pack(FORMATS[tensor.format].ggml_type)
        infos.append(_text(tensor.name) + _U32.pack(len(shape)) + sizes + kind + _U64.pack(offset))
        offsets.append(offset)
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    counts = _U64.pack(len(tensors)) + _U64.pack(len(entries))
    head = b"".join((b"GGUF", _U32.pack(3), counts, *entries, *infos))
    head += bytes(-len(head) % ALIGNMENT)
    return head, [len(head) + offset for offset in offsets]


def _text(text: str) -> bytes:
    data = text.encode()
    return _U64.pack(len(data)) + data


def _value(key: str, value: Any) -> bytes:
    """Type and value of one metadata entry."""
    if isinstance(value, str):
        return _U32.pack(_STRING) + _text(value)
    if isinstance(value, bool):
        return _U32.pack(_BOOL) + bytes([value])
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, np.ndarray):
        kind = _U32.pack(_ARRAYS[value.dtype.name])
        data = value.astype(value.dtype.newbyteorder("<")).tobytes()
        return _U32.pack(_ARRAY) + kind + _U64.pack(value.size) + data
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        head = _U32.pack(_ARRAY) + _U32.pack(_STRING) + _U64.pack(len(value))
        return head + b"".join(map(_text, value))
    raise TypeError(f"{key}: GGUF metadata cannot hold {type(value).__name__}")


def _integer(value: int) -> bytes:
    kinds = ((_UINT32, "I", 0, 32), (_INT32, "i", -(1 << 31), 31), (_INT64, "q", -(1 << 63), 63))
    for kind, code, least, bits in kinds:
        if least <= value < 1 << bits:
            return struct.pack(f"<I{code}", kind, value)
    return struct.pack("<IQ", _UINT64, value)


def _float(value: float) -> bytes:
    with np.errstate(over="ignore"):
        narrow = float(np.float32(value))
    in_range = not math.isfinite(value) or math.isclose(narrow, value, rel_tol=1e-6)
    if in_range and not isinstance(value, np.float64):
        return struct.pack("<If", _FLOAT32, value)
    return struct.pack("<Id", _FLOAT64, value)
