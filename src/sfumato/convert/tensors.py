"""Streams a checkpoint's tensors into files of the other kind, or of another format.

One tensor is read, recoded and written at a time, in pieces. Metadata are the caller's to make:
this module knows names and formats, and nothing of a network or its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sfumato.model.families import family_of
from sfumato.weights.atomic_write import Outgoing, beside, recoded
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.quant_recipes import Target, formats
from sfumato.weights.write_gguf import layout, write_gguf
from sfumato.weights.write_safetensors import write_safetensors

Progress = Callable[[int, int], None]
"""(bytes written so far, bytes in all)"""


def gguf_tensors(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], target: Target, rotary: Tensor
) -> list[Outgoing]:
    """The tensors of a GGUF file of this target, in the order of `shapes` (canonical name → shape,
    all of the network's); `rotary` is `rope_freqs.weight`."""
    first = Outgoing(
        "rope_freqs.weight", tuple(rotary.shape), "F32", lambda: recoded(rotary, "F32")
    )
    chosen, theirs = formats(shapes, target), family_of(checkpoint).tensor_names.gguf_name
    return [first, *(_outgoing(checkpoint, theirs(name), name, chosen[name]) for name in shapes)]


def hf_tensors(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], format: str
) -> list[Outgoing]:
    """The tensors of a safetensors folder, all in one format: F32, F16 or BF16."""
    theirs = family_of(checkpoint).tensor_names.transformers_name
    return [_outgoing(checkpoint, theirs(name), name, format) for name in shapes]


def _outgoing(checkpoint: Checkpoint, theirs: str, name: str, format: str) -> Outgoing:
    def chunks() -> Iterator[Tensor]:
        try:
            yield from recoded(checkpoint.read(name), format)
        except ValueError as error:
            info = checkpoint.tensors[name]
            raise ValueError(f"{info.file}: {info.name}: as {format}: {error}") from error

    return Outgoing(theirs, checkpoint.tensors[name].shape, format, chunks)


def save_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[Outgoing],
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes a GGUF file that has its name only when it is complete.

    Raises ValueError, naming the path or the tensor, and OSError.
    """
    size = len(layout(metadata, ())[0]) + sum(tensor.nbytes for tensor in tensors)
    with beside(path, size, force) as part, part.open("xb") as stream:
        write_gguf(stream, metadata, tensors, _counted(tensors, progress))


def save_hf(
    path: Path,
    write_others: Callable[[Path], None],
    tensors: Sequence[Outgoing],
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes a folder of safetensors that has its name only when it is complete.

    write_others: writes the other files into the folder it is given. Raises as `save_gguf`.
    """
    with beside(path, sum(tensor.nbytes for tensor in tensors), force) as part:
        part.mkdir()
        write_others(part)
        write_safetensors(part, tensors, _counted(tensors, progress))


def _counted(tensors: Sequence[Outgoing], progress: Progress | None) -> Callable[[int], None]:
    total, done = sum(tensor.nbytes for tensor in tensors), 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return wrote
