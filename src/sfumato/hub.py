"""Names of models: what a name of the catalogue, or `hf:owner/name[:file]`, means, and what is in
the hub's local cache of it.

Asks no network. The cache is that of the hub's library, which other programs share; the library is
an optional extra, imported only when asked for.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

from sfumato import catalog
from sfumato.refused import Refused
from sfumato.values import size
from sfumato.weights.checkpoint import INDEX, is_mmproj, locate, towers_among
from sfumato.weights.errors import quoted
from sfumato.weights.files.gguf import part_names
from sfumato.weights.files.narrow import BESIDE as NARROW

USAGE = (
    "hf:owner/name, hf:owner/name:file with a file's name or a part of it, as Q4_K_M, or a name of "
    "the catalogue, as sdar-1.7b"
)
BESIDE = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json", NARROW, INDEX),
)
"""What is read beside safetensors."""

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_REVISION = re.compile("[0-9a-f]{40,64}")


@dataclass(frozen=True)
class Reference:
    """A repository, and a file of it: what a name of the catalogue stands for, or what follows
    `hf:`."""

    repo: str
    file: str | None = None
    name: str = field(default="", compare=False)  # of the catalogue

    def __str__(self) -> str:
        return self.name or f"{catalog.PREFIX}{self.repo}" + (f":{self.file}" if self.file else "")


@dataclass(frozen=True)
class Listing:
    """What a repository holds, as the hub or the local cache has it."""

    repo: str
    revision: str
    sizes: Mapping[str, int]  # by the file's name
    hashes: Mapping[str, str] = field(default_factory=dict)  # SHA-256, of large files
    architecture: str | None = None  # None: it is not known
    quantized: str | None = None  # by what method, other than in GGUF: quant_method of config.json


def parse(text: str) -> Reference:
    """The repository and file of a name. Raises ValueError where the text is no such name."""
    if (entry := catalog.CATALOGUE.get(text.lower())) is not None:
        return Reference(entry.repo, entry.file, entry.name)
    repo, _, file = text.removeprefix(catalog.PREFIX).partition(":")
    parts = file.split("/")
    if not _REPO.fullmatch(repo) or (file and not all(parts)) or ".." in parts or len(file) > 400:
        near = get_close_matches(text.lower(), catalog.CATALOGUE, 1)
        meant = f"; the nearest name is {near[0]!r}" if near else ""
        raise ValueError(f"{quoted(text)}: is no name of a model{meant}; write {USAGE}")
    return Reference(repo, file or None)


def located(given: str) -> Path:
    """The path of a model that is in the local cache, by its name. Raises ValueError where it is
    not there, saying how large it is and how to get it."""
    if (path := local(reference := parse(given))) is not None:
        return path
    entry = catalog.find(reference.repo, reference.file)
    what = f" ({entry.offer})" if entry is not None else ""
    raise Refused(
        "path",
        f"{reference}{what} is not on this machine",
        f"`sfumato pull {reference}` downloads it",
    )


def library() -> Any:
    """The hub's library. Raises ValueError, which says what to install, where it is missing."""
    try:
        hub = importlib.import_module("huggingface_hub")
        for part in ("utils", "errors", "constants", "file_download"):
            importlib.import_module(f"huggingface_hub.{part}")
    except ImportError:
        raise ValueError(
            f"models of the hub need the package huggingface_hub, which is not installed; "
            f"{sys.executable} -m pip install huggingface_hub"
        ) from None
    return hub


def local(reference: Reference) -> Path | None:
    """The path of a complete model in the local cache, or None. Needs no network."""
    folder = cache_folder(reference.repo)
    try:
        revision = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    if not _REVISION.fullmatch(revision):
        return None
    snapshot = folder / "snapshots" / revision
    sizes = {
        path.relative_to(snapshot).as_posix(): path.stat().st_size
        for path in sorted(snapshot.rglob("*"))
        if path.is_file()
    }
    try:
        names = choose(Listing(reference.repo, revision, sizes), reference, loosely=False)
        path = path_of(snapshot, names)
        if path.is_dir():
            locate(path)
            if not {"config.json", "tokenizer.json"} <= set(names):
                return None
    except ValueError:  # incomplete, or only the hub knows which file is meant
        return None
    return path


def cache_folder(repo: str) -> Path:
    """Where the hub's library keeps a repository."""
    return Path(library().constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def path_of(snapshot: Path, names: list[str]) -> Path:
    """What to give to `load`: a GGUF file or its first part, or the folder of safetensors."""
    return snapshot if (model := _model_file(names)) is None else snapshot / model


def _model_file(names: list[str]) -> str | None:
    """The GGUF file of these, or its first part; a vision tower where there is nothing else."""
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    return next((name for name in ggufs if not is_mmproj(name)), next(iter(ggufs), None))


def choose(listing: Listing, reference: Reference, loosely: bool = True) -> list[str]:
    """The files that a reference means: a GGUF file or its parts and the vision tower beside it, or
    safetensors with what is read beside them; the model's weights last. Raises ValueError where it
    means none, or several.

    loosely: any part of a file's name serves; for that all names must be listed.
    """
    names, wanted = sorted(listing.sizes), reference.file
    is_tower = wanted is not None and "mmproj" in wanted.lower()
    ggufs = [n for n in names if n.lower().endswith(".gguf") and is_mmproj(n) == is_tower]
    if wanted is None or wanted.lower().endswith(".safetensors"):
        tensors = _tensors(names) if wanted is None else [n for n in names if n == wanted]
        if len(tensors) > 1 and INDEX not in names:
            raise ValueError(
                f"{reference}: {len(tensors)} safetensors files and no {INDEX}; "
                f"{_files(listing, tensors)}; name one, as hf:{listing.repo}:{tensors[0]}"
            )
        if tensors:
            return [*(n for n in BESIDE if n in listing.sizes), *tensors]
    matches = ggufs if wanted is None else _matching(ggufs, wanted, loosely)
    # Of a checkpoint in parts, any part's name means all of them.
    if len({part_names(name)[0] for name in matches}) != 1:
        several = f"{len(matches)} files match" if matches else "no such file"
        if wanted is None:
            several = f"holds {len(matches)} GGUF files" if matches else "holds no weights to read"
        raise ValueError(
            f"{reference}: {several}; {_files(listing, matches or ggufs)}"
            + (f"; name one, as hf:{listing.repo}:{Path(ggufs[0]).name}" if ggufs else "")
        )
    parts = part_names(matches[0])
    if absent := [name for name in parts if name not in listing.sizes]:
        raise ValueError(
            f"{reference}: {len(absent)} of {len(parts)} parts are missing in the repository "
            f"({absent[0]}); choose another format"
        )
    return parts if is_tower else [*_tower(names, parts), *parts]


def _tower(names: list[str], parts: list[str]) -> list[str]:
    """The vision tower that loading finds beside a GGUF file, where there is one."""
    folders = [
        PurePosixPath(parts[0]).parent,
        *[PurePosixPath(parts[0]).parent.parent] * (len(parts) > 1),
    ]
    towers = towers_among(names)
    beside = ([n for n in towers if PurePosixPath(n).parent == folder] for folder in folders)
    return next(filter(None, beside), [])[:1]


def _tensors(names: list[str]) -> list[str]:
    """The safetensors files that `weights.locate` would read in a folder of these files."""
    tensors = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if INDEX in names:
        return [name for name in tensors if _SHARD.search(name)] or tensors
    return ["model.safetensors"] if "model.safetensors" in tensors else tensors


def _matching(names: list[str], wanted: str, loosely: bool) -> list[str]:
    """Names that are `wanted`, or else that end in it as a format does, or else have it in them."""
    part = r"(-\d{5}-of-\d{5})?"
    ends = re.compile(rf"(^|[-_./]){re.escape(wanted)}{part}(\.gguf)?$", re.IGNORECASE)
    for fits in (
        lambda name: name == wanted or name.split("/")[-1] == wanted,
        lambda name: ends.search(name),
        lambda name: loosely and wanted.lower() in name.lower(),
    ):
        if matches := [name for name in names if fits(name)]:
            return matches
    return []


def _files(listing: Listing, names: list[str], limit: int = 20) -> str:
    shown = names or sorted(listing.sizes)
    listed = ", ".join(f"{name} ({size(listing.sizes[name])})" for name in shown[:limit])
    more = f", and {len(shown) - limit} more" if len(shown) > limit else ""
    return f"there are {listed}{more}" if shown else "the repository is empty"
