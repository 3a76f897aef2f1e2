"""Finds the weight file or files behind a path; opens none of them and knows no tensors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from sfumato import catalog
from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.files.gguf import part_files, part_names
from sfumato.weights.files.jsonfile import read_object
from sfumato.weights.files.safetensors import INDEX

_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_WEIGHTS = {".safetensors", ".gguf"}

Kind = Literal["safetensors", "gguf"]

_log = logging.getLogger(__name__)


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
    """The error of a path where nothing is; a note of it says how to get a model."""
    if str(path).startswith("hf:"):
        return CheckpointError(
            f"{path}: names a repository, which the command line downloads; `sfumato pull {path}` "
            "does so and prints the path to give here"
        )
    error = CheckpointError(f"{path}: does not exist; give a weight file or a folder")
    error.add_note(catalog.advice())
    return error


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
    ggufs = [item for item in files if item.suffix.lower() == ".gguf"]
    ggufs = [item for item in ggufs if "mmproj" not in item.name.lower()]
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


def _listed(files: list[Path], limit: int = 8) -> str:
    names = ", ".join(file.name for file in files[:limit])
    return names if len(files) <= limit else f"{names}, …"
