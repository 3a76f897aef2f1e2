"""Opens a checkpoint, safetensors or GGUF, under canonical tensor names.

Opening reads headers only; each tensor is mapped when it is read. The caller brings the table of
tensor names, and the list of tensors that a network needs (`Checkpoint.check_tensors`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from sfumato.weights.blocks import QuantizedTensor
from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.gguf import read_gguf
from sfumato.weights.gguf_parts import check_parts
from sfumato.weights.jsonfile import read_object
from sfumato.weights.locate import Kind, locate
from sfumato.weights.names import TensorNames, TensorPlace
from sfumato.weights.safetensors import read_safetensors
from sfumato.weights.tensorfile import TensorFile, TensorInfo, require_readable

__all__ = ["Checkpoint", "TensorInfo", "open_with"]

_log = logging.getLogger(__name__)

_LISTED = 8
"""Tensors listed of each kind of fault."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    tensors: canonical name → where its bytes are; a tensor of no known name keeps the file's.
    vision: the vision tower's tensors, by the file's names, kept aside.
    metadata: for safetensors {"config": …, "generation_config": … or {}}, the JSON files beside
    the weights; for GGUF the flat key → value of the file, or of the first part.
    """

    path: Path
    kind: Kind
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    vision: Mapping[str, TensorInfo] = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)
    files: Mapping[Path, TensorFile] = field(repr=False)

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.path if self.path.is_dir() else self.path.parent

    def read(self, name: str) -> Tensor | QuantizedTensor:
        """The tensor of this canonical name as stored: blocks, or a plain tensor of the stored
        dtype. A view of the mapped file: writing to it ends the process, so clone first.

        Raises KeyError if `tensors` has no such name.
        """
        info = self.tensors[name]
        return self.files[info.file].read(info.name)

    def prefetch(self, name: str) -> None:
        """Lets the system begin to read the tensor of this canonical name from disk."""
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
            _fault("missing", missing),
            _fault("left over", leftover),
            _fault("wrongly shaped", misshapen),
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
    path = Path(path)
    if kind == "gguf":
        files = [read_gguf(location) for location in locations]
        check_parts(files)
        metadata, origin = files[0].metadata, files[0].path
    else:
        files = [read_safetensors(location) for location in locations]
        origin = locations[0].parent
        generation = origin / "generation_config.json"
        metadata = {
            "config": read_object(origin / "config.json"),
            "generation_config": read_object(generation) if generation.exists() else {},
        }
    try:
        names = names_of(kind, metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{origin}: {error}") from error
    tensors, vision = _sort(files, names.place_gguf if kind == "gguf" else names.place_transformers)
    for info in tensors.values():
        require_readable(info)
    if vision:
        _log.info("%s: %d vision tensors are kept aside", path, len(vision))
    return Checkpoint(path, kind, tensors, vision, metadata, {file.path: file for file in files})


def _sort(
    files: Sequence[TensorFile], place: Callable[[str], TensorPlace]
) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """The files' tensors by canonical name, and the vision tensors."""
    tensors: dict[str, TensorInfo] = {}
    aliases: dict[str, TensorInfo] = {}
    vision: dict[str, TensorInfo] = {}
    for info in (info for file in files for info in file.tensors.values()):
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


def _fault(kind: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    listed = ", ".join(name if len(name) <= 160 else f"{name[:160]}…" for name in names[:_LISTED])
    return f"{len(names)} {kind}: {listed}{more}"
