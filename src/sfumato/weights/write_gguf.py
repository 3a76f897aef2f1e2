"""Writes GGUF files, version 3, little-endian, tensor by tensor.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Knows no architecture.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from sfumato.weights.blocks import BLOCK_FORMATS
from sfumato.weights.tensor_stream import TensorStream

ALIGNMENT = 32

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_UINT64, _INT64, _FLOAT64 = 10, 11, 12
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
_TENSOR_TYPES = {"F32": 0, "F16": 1, "BF16": 30} | {
    block.name: block.ggml_type for block in BLOCK_FORMATS.values()
}


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
        kind = _U32.pack(_TENSOR_TYPES[tensor.format])
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
    if 0 <= value < 1 << 32:
        return struct.pack("<II", _UINT32, value)
    if -(1 << 31) <= value < 0:
        return struct.pack("<Ii", _INT32, value)
    if value < 1 << 63:
        return struct.pack("<Iq", _INT64, value)
    return struct.pack("<IQ", _UINT64, value)


def _float(value: float) -> bytes:
    with np.errstate(over="ignore"):
        narrow = float(np.float32(value))
    in_range = not math.isfinite(value) or math.isclose(narrow, value, rel_tol=1e-6)
    if in_range and not isinstance(value, np.float64):
        return struct.pack("<If", _FLOAT32, value)
    return struct.pack("<Id", _FLOAT64, value)
