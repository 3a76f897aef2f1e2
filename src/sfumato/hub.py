"""Names of models: what a name of the catalogue, or `hf:owner/name[:file]`, means, and what is in
the hub's local cache of it.

Asks no network: `sfumato pull` does. The cache is that of the hub's library, which other programs
share; the library is an optional extra, imported only when asked for.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

from sfumato import catalog
from sfumato.refused import Refused
from sfumato.values import size
from sfumato.weights.checkpoint import INDEX, is_mmproj, locate, towers_among
from sfumato.weights.errors import quoted
from sfumato.weights.files.gguf import part_names, read_gguf
from sfumato.weights.files.jsonfile import read_object
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
_FORMAT = re.compile(r"\b(I?Q\d\w*|BF16|F16|F32)", re.IGNORECASE)
_WEIGHTS = re.compile(r"\.(gguf|safetensors)$", re.IGNORECASE)
_IN_PART = (".part", ".incomplete")  # ours, and the library's
_LOCK_S = 0.2  # for which another process may hold a lock
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
    if (listing := _cached(reference.repo)) is None:
        return None
    snapshot = cache_folder(reference.repo) / "snapshots" / listing.revision
    try:
        names = choose(listing, reference, loosely=False)
        path = path_of(snapshot, names)
        if path.is_dir():
            locate(path)
            if not {"config.json", "tokenizer.json"} <= set(names):
                return None
    except ValueError:  # incomplete, or only the hub knows which file is meant
        return None
    return path


def _cached(repo: str) -> Listing | None:
    """The files of a repository in the local cache, of the revision that was downloaded last."""
    folder = cache_folder(repo)
    try:
        revision = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    if not _REVISION.fullmatch(revision):
        return None
    snapshot = folder / "snapshots" / revision
    files = (path for path in sorted(snapshot.rglob("*")) if path.is_file())
    sizes = {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in files}
    return Listing(repo, revision, sizes)


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


@dataclass(frozen=True)
class Held:
    """A model in the local cache, or what an interrupted download has left of a repository."""

    name: str  # as -m takes it
    path: Path  # what `load` takes; None of a model is complete: the repository's folder
    nbytes: int
    format: str  # as names and config.json have it; "in part" where the download is not complete
    used: float  # seconds since 1970; the file system may keep it only to the day
    model_type: str  # of config.json, or general.architecture; "" where neither can be read


def held() -> list[Held]:
    """The models in the local cache, also those that other programs have downloaded, by name."""
    cache = Path(library().constants.HF_HUB_CACHE)
    folders = [f for f in cache.glob("models--*--*") if f.is_dir() and not f.is_symlink()]
    repos = [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]
    models = [model for repo in repos if _REPO.fullmatch(repo) for model in _held(repo)]
    return sorted(models, key=lambda model: model.name)


def _held(repo: str) -> Iterator[Held]:
    folder = cache_folder(repo)
    if (listing := _cached(repo)) is not None:
        ggufs = [n for n in listing.sizes if n.lower().endswith(".gguf") and not is_mmproj(n)]
        firsts: list[str | None] = [*sorted({part_names(name)[0] for name in ggufs})]
        for file in firsts or [None]:
            if (path := local(Reference(repo, file))) is not None:
                yield _described(listing, Reference(repo, file), path)
    parts = [file for file in (folder / "blobs").glob("*") if file.suffix in _IN_PART]
    if parts:
        stats = [file.stat() for file in parts]
        used, nbytes = max(stat.st_mtime for stat in stats), sum(stat.st_size for stat in stats)
        yield Held(f"{catalog.PREFIX}{repo}", folder, nbytes, "in part", used, "")


def _described(listing: Listing, reference: Reference, path: Path) -> Held:
    entry = catalog.find(reference.repo, reference.file)
    shown = _FORMAT.search(reference.file or "")
    format: Any = shown[0].upper() if shown else "GGUF" if reference.file else "safetensors"
    model_type: Any = ""
    try:
        if reference.file is not None:
            model_type = read_gguf(path).metadata.get("general.architecture")
        else:
            config = read_object(path / "config.json")
            model_type, scheme = config.get("model_type"), config.get("quantization_config")
            format = config.get("dtype") or config.get("torch_dtype") or format
            format = scheme.get("quant_method", format) if isinstance(scheme, dict) else format
    except (OSError, ValueError):  # loading says what is wrong with it
        pass
    names = choose(listing, reference, loosely=False)
    return Held(
        entry.name if entry else str(reference),
        path,
        sum(listing.sizes[name] for name in names),
        str(format)[:40],
        max((path if path.is_file() else path / names[-1]).stat().st_atime, 0.0),
        str(model_type or "")[:40],
    )


@dataclass(frozen=True)
class Removal:
    """What of the local cache is to be removed, and what else stays of the repository."""

    folder: Path  # the repository's
    files: tuple[Path, ...]  # what is not a link first; none: the folder itself
    nbytes: int  # that it frees


def removal(reference: Reference) -> Removal:
    """What `remove` would remove of a model: the files that no other revision or model shares; the
    whole repository where no other weights are in it. Raises ValueError where nothing is there."""
    folder = cache_folder(reference.repo)
    if folder.is_symlink() or not folder.is_dir():
        raise ValueError(f"{reference}: is not on this machine; `sfumato list` shows what is")
    snapshots, blobs = folder / "snapshots", folder / "blobs"
    names: dict[Path, str] = {}  # of all revisions, as the hub has them
    for place, _, entries in os.walk(snapshots):
        for entry in entries:
            path = Path(place, entry)
            names[path] = "/".join(path.relative_to(snapshots).parts[1:])
    chosen = set(names.values())
    if reference.file is not None:
        sizes = {name: path.stat().st_size for path, name in names.items() if path.is_file()}
        listing = Listing(reference.repo, "", sizes)
        meant = choose(listing, reference, loosely=False)
        chosen = {n for n in meant if is_mmproj(n) == is_mmproj(meant[-1])}
    links = {path for path, name in names.items() if name in chosen}
    others = names.keys() - links
    if not any(_WEIGHTS.search(names[path]) and not is_mmproj(names[path]) for path in others):
        return Removal(folder, (), _bytes_in(folder))
    shared = {path.resolve() for path in others}
    # A link may point anywhere: only what lies among the repository's own blobs goes with it.
    targets = {path.resolve() for path in links if path.is_symlink()} - shared
    owned = sorted(target for target in targets if target.parent == blobs.resolve())
    files = (*owned, *sorted(links))
    return Removal(folder, files, sum(f.lstat().st_size for f in files if not f.is_symlink()))


def remove(reference: Reference, planned: Removal) -> None:
    """Removes that. Raises ValueError while the repository is downloaded, and OSError."""
    locks = planned.folder.parent / ".locks" / planned.folder.name
    with ExitStack() as held_locks:
        try:
            for lock in locks.glob("*.lock"):
                file_lock = library().utils.WeakFileLock(str(lock), timeout=_LOCK_S)
                held_locks.enter_context(file_lock)
        except TimeoutError:
            raise ValueError(f"{reference}: is being downloaded; wait, or stop that") from None
        for file in planned.files:
            file.unlink(missing_ok=True)
        if not planned.files:
            shutil.rmtree(planned.folder)  # follows no link


def _bytes_in(folder: Path) -> int:
    stats = [Path(place, file).lstat() for place, _, files in os.walk(folder) for file in files]
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())
