"""Finds and opens a checkpoint, safetensors or GGUF, under canonical tensor names, and names its
weights.

`locate` finds the weight file or files behind a path and opens none. Opening reads headers only;
each tensor is mapped when it is read. The caller brings the table of tensor names, and the list of
tensors that a network needs (`Checkpoint.check_tensors`). `fingerprint` is a short name for the
weights, which retraining changes. Knows no model.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from sfumato.weights.errors import CheckpointError, first_of, listed, quoted
from sfumato.weights.files.gguf import check_parts, part_files, part_names, read_gguf
from sfumato.weights.files.jsonfile import read_object
from sfumato.weights.files.narrow import Scheme, read_scheme
from sfumato.weights.files.safetensors import INDEX, check_header_sizes, read_safetensors
from sfumato.weights.files.tensorfile import TensorFile, TensorInfo, require_readable
from sfumato.weights.formats import Weight
from sfumato.weights.joined import group_pieces, join, stacked
from sfumato.weights.names import TensorNames, TensorPlace

_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_WEIGHTS = {".safetensors", ".gguf"}

Kind = Literal["safetensors", "gguf"]

_log = logging.getLogger(__name__)


_TOWERS = ("bf16", "f16", "q8_0")  # formats in names of vision towers, the first choice first


def is_mmproj(name: str) -> bool:
    """Whether a file of that name holds a vision tower."""
    return "mmproj" in name.lower() and name.lower().endswith(".gguf")


def towers_among(names: Iterable[str]) -> list[str]:
    """The names of vision towers: in BF16, F16 and Q8_0, then the others, by name."""

    def place(name: str) -> tuple[int, str]:
        written = Path(name).name.lower()
        return next((i for i, each in enumerate(_TOWERS) if each in written), len(_TOWERS)), name

    return sorted(filter(is_mmproj, names), key=place)


def mmproj_beside(checkpoint: Checkpoint) -> list[Path]:
    """The vision towers in the folder of a GGUF file, the first choice first; where there are none,
    and the file is in parts, those of the folder above."""
    if checkpoint.kind != "gguf":
        return []
    beside = _towers_in(checkpoint.folder)
    return beside if beside or len(checkpoint.files) < 2 else _towers_in(checkpoint.folder.parent)


def _towers_in(folder: Path) -> list[Path]:
    try:
        names = [path.name for path in folder.iterdir() if path.is_file()]
    except OSError:  # a folder that may not be listed can have files that may be read
        return []
    return [folder / name for name in towers_among(names)]


def locate(path: str | Path) -> tuple[Kind, list[Path]]:
    """The kind and the files of the checkpoint at `path`, a weight file, an index or a folder.

    A folder is searched for an index, else `model.safetensors` or the one safetensors file, else
    one GGUF file, in parts or not (vision projectors, "mmproj" in their name, are passed over).
    Where it holds other weights too, one logging.info line says what was chosen. Raises
    CheckpointError.
    """
    if path == "":  # which pathlib takes for the current folder
        raise CheckpointError("path: is empty; give a weight file or a folder ('.' is this one)")
    path = Path(path)
    try:
        if path.is_dir():
            kind, chosen = _in_folder(path)
            _log_choice(path, chosen)
            return kind, chosen
        if not path.exists():
            raise _absent(path)
        return _of_file(path)
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{quoted(str(path))}: cannot be opened ({error})") from error


def _absent(path: Path) -> CheckpointError:
    """The error of a path where nothing is."""
    if str(path).startswith("hf:"):
        return CheckpointError(
            f"{path}: names a repository, which the command line downloads; `sfumato pull {path}` "
            "does so and prints the path to give here"
        )
    return CheckpointError(
        f"{path}: does not exist; give a weight file or a folder (`sfumato pull` lists models to "
        "download)"
    )


def _of_file(path: Path) -> tuple[Kind, list[Path]]:
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise CheckpointError(
            f"{path}: is a pickle, which can run code when it is read, and is refused; "
            "convert it to safetensors"
        )
    if path.name.endswith(".safetensors.index.json"):
        return "safetensors", _shards(path)
    if suffix == ".safetensors":
        return "safetensors", [path]
    if suffix == ".gguf":
        return "gguf", part_files(path)
    raise CheckpointError(
        f"{path}: is neither .gguf nor .safetensors; give a file of one of these kinds, or a "
        "folder that holds one"
    )


def _in_folder(folder: Path) -> tuple[Kind, list[Path]]:
    if (folder / INDEX).exists():
        return "safetensors", _shards(folder / INDEX)
    if (folder / "model.safetensors").exists():
        return "safetensors", [folder / "model.safetensors"]
    files = sorted(item for item in folder.iterdir() if item.is_file())
    tensors = [item for item in files if item.suffix.lower() == ".safetensors"]
    if len(tensors) > 1:
        raise CheckpointError(
            f"{folder}: has {len(tensors)} safetensors files ({_listed(tensors)}) and no {INDEX}; "
            "add the index, or give the path of one file"
        )
    if tensors:
        return "safetensors", tensors
    ggufs = [item for item in files if item.suffix.lower() == ".gguf" and not is_mmproj(item.name)]
    if ggufs and {item.name for item in ggufs} <= set(part_names(ggufs[0].name)):
        return "gguf", part_files(ggufs[0])
    if len(ggufs) > 1:
        raise CheckpointError(
            f"{folder}: has {len(ggufs)} GGUF files ({_listed(ggufs)}); give the path of one"
        )
    pickles = [item for item in files if item.suffix.lower() in _PICKLES]
    if pickles:
        raise CheckpointError(
            f"{folder}: holds pickles only ({_listed(pickles)}), which can run code when they are "
            "read, and are refused; convert them to safetensors"
        )
    raise CheckpointError(
        f"{folder}: holds no weights: no {INDEX}, no .safetensors and no .gguf file"
    )


def _log_choice(folder: Path, chosen: list[Path]) -> None:
    weights = {f for f in folder.iterdir() if f.suffix.lower() in _WEIGHTS and f.is_file()}
    if others := sorted(weights - set(chosen)):
        _log.info(
            "%s: reads %s and passes over %s; give a file's path to choose another",
            folder,
            _listed(chosen),
            _listed(others),
        )


def _shards(index: Path) -> list[Path]:
    """The shard files that an index names, each of which exists."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: weight_map: is not a map of tensors to files; download it again"
        )
    for name in weight_map.values():
        # A name with a folder in it could lead anywhere on the disk.
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise CheckpointError(
                f"{index}: weight_map: {quoted(name)} is not the name of a file beside the index; "
                "download it again"
            )
    shards = [index.parent / name for name in sorted(set(weight_map.values()))]
    absent = [shard for shard in shards if not shard.is_file()]
    if absent:
        raise CheckpointError(
            f"{index}: weight_map: {len(absent)} of {len(shards)} shards are absent "
            f"({_listed(absent)}); download them"
        )
    return shards


def _listed(files: list[Path]) -> str:
    return first_of([file.name for file in files])


__all__ = ["Checkpoint", "TensorInfo", "open_with"]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    tensors: canonical name → where its bytes are; a tensor of no known name keeps the file's.
    vision: the vision tower's tensors, by the file's names, kept aside.
    metadata: for safetensors {"config": …, "generation_config": … or {}}, the JSON files beside
    the weights; for GGUF the flat key → value of the file, or of the first part.
    `tensors` says what reading gives: blocks instead of narrow codes, and stacks of matrices.
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

    def read(self, name: str) -> Weight:
        """The tensor of this canonical name as `tensors` has it: blocks, codes with scales, or a
        plain tensor of the stored dtype. A view of the mapped file, unless it is made of others
        (see `is_view`): writing to it ends the process, so clone first.

        Raises KeyError if `tensors` has no such name, CheckpointError for narrow matrices that
        cannot be used.
        """
        return self.tensors[name].read(self.files)

    def recoded(self, name: str, format: str) -> Iterator[Tensor]:
        """The tensor's bytes in another format, uint8, in pieces. Raises ValueError for values that
        the format cannot hold."""
        return self.tensors[name].recoded(self.files, format)

    def recoded_part(
        self, name: str, format: str, number: int, part: int, parts: int
    ) -> Iterator[Tensor]:
        """One of `parts` equal ranges of the rows of a matrix of a stack [n, rows, columns], as
        `recoded`."""
        return self.tensors[name].recoded_part(self.files, format, number, part, parts)

    def is_view(self, name: str) -> bool:
        """Whether `read` gives a view of the mapped file, without memory of the process."""
        info = self.tensors[name]
        return info.stored == (info,) and info.file in self.files

    def prefetch(self, name: str) -> None:
        """Lets the system begin to read the tensor of this canonical name from disk."""
        for info in self.tensors[name].stored:
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
    tensors, vision = _sort(infos if scheme is None else group_pieces(infos, scheme), place)
    if scheme is None:
        tensors = stacked(tensors, names, metadata if kind == "gguf" else metadata["config"])
    else:
        tensors = join(tensors, names, metadata["config"], scheme)
    for info in tensors.values():
        require_readable(info)
    if vision:
        _log.info("%s: %d vision tensors are kept aside", path, len(vision))
    mapped = {file.path: file for file in files}
    return Checkpoint(path, kind, tensors, vision, metadata, mapped)


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
