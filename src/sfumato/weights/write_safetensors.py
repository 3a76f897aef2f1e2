"""Writes safetensors files, one or several shards with their index, tensor by tensor.

The format: https://huggingface.co/docs/safetensors. (The `safetensors` library writes whole
tensors only, and a network's do not fit into memory.) Knows no names of a network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from sfumato.weights.locate import INDEX
from sfumato.weights.tensor_stream import TensorStream

SHARD = 5_000_000_000
"""Bytes of tensors in one file at most, unless a single tensor is larger."""


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
            _write_file(stream, members, wrote)
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


def _write_file(
    stream: BinaryIO, tensors: Sequence[TensorStream], wrote: Callable[[int], None]
) -> None:
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
