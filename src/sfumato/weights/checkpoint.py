"""Opens a checkpoint, safetensors or GGUF, under canonical tensor names, and names its weights.

Opening reads headers only; each tensor is mapped when it is read. The caller brings the table of
tensor names, and the list of tensors that a network needs (`Checkpoint.check_tensors`).
`fingerprint` is a short name for the weights, which retraining changes. Knows no model.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from sfumato.weights.errors import CheckpointError, listed, quoted
from sfumato.weights.files.gguf import check_parts, read_gguf
from sfumato.weights.files.jsonfile import read_object
from sfumato.weights.files.locate import Kind, locate
from sfumato.weights.files.narrow import Scheme, read_scheme
from sfumato.weights.files.safetensors import check_header_sizes, read_safetensors
from sfumato.weights.files.tensorfile import TensorFile, TensorInfo, recoded, require_readable
from sfumato.weights.formats import Stored
from sfumato.weights.joined import JoinedTensor, group_pieces, join
from sfumato.weights.names import TensorNames, TensorPlace

__all__ = ["Checkpoint", "TensorInfo", "open_with"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    tensors: canonical name → where its bytes are; a tensor of no known name keeps the file's.
    vision: the vision tower's tensors, by the file's names, kept aside.
    metadata: for safetensors {"config": …, "generation_config": … or {}}, the JSON files beside
    the weights; for GGUF the flat key → value of the file, or of the first part.
    scheme: of the narrow matrices, where there are such; joined: canonical name → the pieces that
    reading makes the tensor of. `tensors` says what reading gives: blocks instead of narrow codes.
    """

    path: Path
    kind: Kind
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    vision: Mapping[str, TensorInfo] = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)
    files: Mapping[Path, TensorFile] = field(repr=False)
    scheme: Scheme | None = field(default=None, kw_only=True)
    joined: Mapping[str, JoinedTensor] = field(default_factory=dict, repr=False, kw_only=True)

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.path if self.path.is_dir() else self.path.parent

    def read(self, name: str) -> Tensor | Stored:
        """The tensor of this canonical name as stored: blocks, codes with scales where `tensors`
        says so (see `JoinedTensor.of_codes`), or a plain tensor of the stored dtype. A view of the
        mapped file, unless it is joined: writing to it ends the process, so clone first.

        Raises KeyError if `tensors` has no such name, CheckpointError for narrow matrices that
        cannot be used.
        """
        if name in self.joined:
            return self.joined[name].read(self.files)
        info = self.tensors[name]
        return self.files[info.file].read(info.name)

    def recoded(self, name: str, format: str) -> Iterator[Tensor]:
        """The tensor's bytes in another format, uint8, in pieces. Raises ValueError for values that
        the format cannot hold."""
        if name in self.joined:
            return self.joined[name].recoded(self.files, format)
        return recoded(self.read(name), format)

    def is_view(self, name: str) -> bool:
        """Whether `read` gives a view of the mapped file, without memory of the process."""
        # Subclasses make their tensors as they are read.
        return type(self) is Checkpoint and name not in self.joined

    def prefetch(self, name: str) -> None:
        """Lets the system begin to read the tensor of this canonical name from disk."""
        if name in self.joined:
            self.joined[name].prefetch(self.files)
            return
        info = self.tensors[name]
        if info.file in self.files:
            self.files[info.file].prefetch(info.name)

    def check_tensors(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Checks that the tensors are exactly the expected ones.

        expected: canonical name → shape. Raises one CheckpointError naming all that is missing,
        left over or of another shape.
        """
        missing = [name for name in expected if name not in self.tensors]
        leftover = [info.name for name, info in self.tensors.items() if name not in expected]
        misshapen = [
            f"{name} (the file has {list(self.tensors[name].shape)}, the config asks for "
            f"{list(shape)})"
            for name, shape in expected.items()
            if name in self.tensors and self.tensors[name].shape != tuple(shape)
        ]
        faults = [
            listed("missing", missing),
            listed("left over", leftover),
            listed("wrongly shaped", misshapen),
        ]
        if any(faults):
            raise CheckpointError(
                f"{self.path}: the tensors do not match the config: "
                f"{'; '.join(filter(None, faults))}. Use weights and config of one checkpoint"
            )


NamesOf = Callable[[Kind, Mapping[str, Any]], TensorNames]
"""The tensor names of a checkpoint of this kind and metadata. Raises CheckpointError where the
metadata are of no known family of models."""


def open_with(path: str | Path, names_of: NamesOf) -> Checkpoint:
    """Opens the checkpoint at `path`: a .gguf or .safetensors file, an index, or a folder.

    Raises CheckpointError, naming file and field, if anything in it cannot be used.
    """
    kind, locations = locate(path)
    path, scheme = Path(path), None
    if kind == "gguf":
        files = [read_gguf(location) for location in locations]
        check_parts(files)
        metadata, origin = files[0].metadata, files[0].path
    else:
        origin = locations[0].parent
        files, metadata, scheme = _open_safetensors(locations, origin)
    try:
        names = names_of(kind, metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{origin}: {error}") from error
    infos = [info for file in files for info in file.tensors.values()]
    place = names.place_gguf if kind == "gguf" else names.place_transformers
    joined: dict[str, JoinedTensor] = {}
    if scheme is None:
        tensors, vision = _sort(infos, place)
    else:
        pieces, others = group_pieces(infos, scheme)
        tensors, vision = _sort([*(p.info for p in pieces.values()), *others], place)
        tensors, joined = join(tensors, pieces, names, metadata["config"], scheme)
    for info in tensors.values():
        require_readable(info)
    if vision:
        _log.info("%s: %d vision tensors are kept aside", path, len(vision))
    mapped = {file.path: file for file in files}
    return Checkpoint(path, kind, tensors, vision, metadata, mapped, scheme=scheme, joined=joined)


def _open_safetensors(
    locations: Sequence[Path], folder: Path
) -> tuple[list[TensorFile], dict[str, Any], Scheme | None]:
    """The files, what the JSON files beside them say, and the scheme of narrow matrices, which is
    refused before a file is opened."""
    config, generation = folder / "config.json", folder / "generation_config.json"
    values = read_object(config) if config.exists() else None
    scheme = None if values is None else read_scheme(values, folder)
    check_header_sizes(locations)
    files = [read_safetensors(location) for location in locations]
    metadata = {
        "config": read_object(config) if values is None else values,
        "generation_config": read_object(generation) if generation.exists() else {},
    }
    return files, metadata, scheme


def _sort(
    infos: Iterable[TensorInfo], place: Callable[[str], TensorPlace]
) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """Tensors by canonical name, and the vision tensors."""
    tensors: dict[str, TensorInfo] = {}
    aliases: dict[str, TensorInfo] = {}
    vision: dict[str, TensorInfo] = {}
    for info in infos:
        role = place(info.name)
        if role.kind == "constant":
            continue
        if role.kind == "alias":
            aliases.setdefault(role.name, info)
            continue
        group = vision if role.kind == "vision" else tensors
        other = group.setdefault(role.name, info)
        if other is not info:
            raise CheckpointError(
                f"{info.file}: tensor {quoted(info.name)} holds the same as {quoted(other.name)} "
                f"of {other.file.name}; remove one of them"
            )
    # A tied copy is used where the decoder's tensor was not saved.
    return {**aliases, **tensors}, vision


_SAMPLE = 64  # bytes of each tensor, at its begin and from its middle
_SAMPLED = 2048  # tensors: each costs a read of the disk, and experts saved one by one are many


def fingerprint(checkpoint: Checkpoint) -> str:
    """16 hex digits of a SHA-256 over the files' sizes, the tensors' names, shapes and formats, and
    a few bytes of every tensor, or of some thousands of them where there are more: milliseconds,
    whatever the size. Names of files do not count."""
    digest = hashlib.sha256()
    tensors = sum(len(file.tensors) for file in checkpoint.files.values())
    every, number = 1 + tensors // _SAMPLED, 0
    for path in sorted(checkpoint.files):
        file = checkpoint.files[path]
        digest.update(str(len(file.mapping)).encode())
        for name in sorted(file.tensors):
            info = file.tensors[name]
            digest.update(repr((name, info.shape, info.format, info.offset)).encode())
            number += 1
            if number % every:
                continue
            for start in (info.offset, info.offset + info.nbytes // 2):
                stop = min(start + _SAMPLE, info.offset + info.nbytes)
                digest.update(file.mapping[start:stop])
    return digest.hexdigest()[:16]
