"""Safetensors files: reads where each tensor's bytes are, and writes shards with their index.

The format (https://huggingface.co/docs/safetensors): eight bytes of header length, a JSON object
name → {dtype, shape, data_offsets}, then the data without holes. A file is treated as hostile.
Tensors are written one by one: a network's do not fit into memory. Knows no architecture.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.files.jsonfile import MAX_JSON, parse_object
from sfumato.weights.files.tensorfile import TensorFile, TensorInfo, TensorStream, map_file

# Bits per element of every dtype of the format; tensorfile.py says which of them can be read.
_BITS = {
    dtype: bits
    for bits, dtypes in (
        (4, "F4"),
        (6, "F6_E2M3 F6_E3M2"),
        (8, "BOOL U8 I8 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ F8_E8M0"),
        (16, "I16 U16 F16 BF16"),
        (32, "I32 U32 F32"),
        (64, "I64 U64 F64 C64"),
    )
    for dtype in dtypes.split()
}


INDEX = "model.safetensors.index.json"
SHARD = 5_000_000_000
"""Bytes of tensors in one file at most, unless a single tensor is larger."""

MAX_HEADERS = 64 << 20
"""Bytes of all headers of a checkpoint: its files are opened together."""


def check_header_sizes(paths: Iterable[Path]) -> None:
    """Raises CheckpointError where the headers of a checkpoint's files are too large together."""
    total = 0
    for path in paths:
        with (
            contextlib.suppress(OSError),
            path.open("rb") as file,
        ):  # opening will say what is wrong
            total += min(int.from_bytes(file.read(8), "little"), path.stat().st_size)
        if total > MAX_HEADERS:
            raise CheckpointError(
                f"{path}: header length: {total} bytes together with the files before it, above "
                f"the limit of {MAX_HEADERS >> 20} MiB for a checkpoint; download it again"
            )


def read_safetensors(path: str | Path) -> TensorFile:
    """Opens a safetensors file; reads its header only. Metadata: str → str, often empty.

    Raises CheckpointError for anything that is not a sound safetensors file.
    """
    path = Path(path)
    mapping = map_file(path)
    size = int.from_bytes(mapping[:8], "little")
    if len(mapping) < 8 or size > min(MAX_JSON, len(mapping) - 8):
        raise CheckpointError(
            f"{path}: header length: {size} bytes do not fit into a file of {len(mapping)} bytes "
            f"or the limit of {MAX_JSON >> 20} MiB; the file is truncated or not a safetensors "
            "file: download it again"
        )
    header = parse_object(mapping[8 : 8 + size], f"{path}: header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__: is not a map of strings; convert it again")
    data_start = 8 + size
    tensors = {name: _tensor(path, name, entry, data_start) for name, entry in header.items()}
    _check_layout(path, tensors, data_start, len(mapping))
    return TensorFile(path, metadata, tensors, mapping)


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    where = f"{path}: tensor {quoted(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{where}: its header entry is not {{dtype, shape, data_offsets}}; convert it again"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"{where}: unknown dtype {quoted(dtype)}; convert it again")
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where}: shape {quoted(shape)} or data_offsets {quoted(offsets)} is not a list of "
            "sizes; convert it again"
        )
    start, stop = offsets
    if math.prod(shape) * _BITS[dtype] != (stop - start) * 8:
        raise CheckpointError(
            f"{where}: shape {quoted(shape)} of {dtype} does not fill data_offsets "
            f"{quoted(offsets)}; convert it again"
        )
    return TensorInfo(name, tuple(shape), dtype, stop - start, path, data_start + start)


def _is_counts(value: Any) -> bool:
    """Whether `value` is a short list of integers that could be sizes or offsets."""
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(type(item) is int and 0 <= item < 1 << 48 for item in value)
    )


def _check_layout(path: Path, tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    """Refuses data that overlaps, leaves holes, or is shorter or longer than the file."""
    end = start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            kind = "overlaps the tensor before it" if info.offset < end else "follows a hole"
            raise CheckpointError(
                f"{path}: tensor {quoted(info.name)}: its data {kind} at byte {info.offset}; "
                "convert it again"
            )
        end += info.nbytes
    if end != size:
        raise CheckpointError(
            f"{path}: the header describes {end} bytes and the file has {size}; it is truncated "
            "or damaged: download it again"
        )


def write_safetensors(
    folder: Path,
    tensors: Sequence[TensorStream],
    wrote: Callable[[int], None] = lambda count: None,
    shard: int = SHARD,
) -> None:
    """Writes model.safetensors, or shards and their index, into a folder that exists.

    Formats F32, F16 and BF16. `wrote` is called with the bytes of tensors written since its last
    call.
    """
    shards = list(_shards(tensors, shard))
    index: dict[str, str] = {}
    for number, members in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        with (folder / name).open("xb") as stream:
            write_file(stream, members, wrote)
        index |= {tensor.name: name for tensor in members}
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def _shards(tensors: Sequence[TensorStream], limit: int) -> Iterator[list[TensorStream]]:
    members: list[TensorStream] = []
    size = 0
    for tensor in tensors:
        if members and size + tensor.nbytes > limit:
            yield members
            members, size = [], 0
        members.append(tensor)
        size += tensor.nbytes
    yield members


def write_file(
    stream: BinaryIO,
    tensors: Sequence[TensorStream],
    wrote: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes one file; formats and `wrote` as `write_safetensors` has them."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.format,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data shall be aligned
    stream.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        for chunk in tensor.chunks():
            stream.write(chunk.numpy().data)
            wrote(chunk.numel())
