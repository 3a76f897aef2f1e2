"""`sfumato pull`, and `hf:owner/name[:file]` in other commands: which files of a hub's repository a
name means, and their download after a check of free disk and memory.

What is in the hub's local cache is found without the network. Other files are downloaded into that
cache, and interrupted downloads resumed. The hub's library is an optional extra, imported only when
asked for.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlparse

from sfumato import catalog
from sfumato.cli import terminal
from sfumato.cli.terminal import size
from sfumato.weights.checkpoint import INDEX, is_mmproj, locate, towers_among
from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.gguf import part_names
from sfumato.weights.files.jsonfile import MAX_JSON, read_object
from sfumato.weights.files.narrow import BESIDE as NARROW
from sfumato.weights.files.narrow import METHODS, read_scheme

PREFIX = "hf:"
USAGE = "hf:owner/name, or hf:owner/name:file with a file's name or a part of it, as Q4_K_M"
BESIDE = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json", NARROW, INDEX),
)
"""What is read beside safetensors."""

WHOLE = 50e9
"""Bytes; the hub serves larger files only by a protocol of its own, through its library."""

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_NETWORK = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "socket", "ssl"}

_SHARE = {"q4_k": 0.36, "q8_0": 0.55}
"""What quantizing while loading leaves of bfloat16, the embedding's two copies included."""

_NARROW_SHARE = {"compressed-tensors": 1.07, "modelopt": 1.5}
"""What narrow matrices take as blocks, by their method: 8 bits become 8½, and ModelOpt's 4½ become
6½ or 8½. Loading predicts it exactly, from the headers."""

_READ_AT_ONCE = ("config.json", "generation_config.json", NARROW, INDEX)


@dataclass(frozen=True)
class Reference:
    """What follows `hf:`."""

    repo: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}" + (f":{self.file}" if self.file else "")


@dataclass(frozen=True)
class Listing:
    """What a repository holds, as the hub or the local cache has it."""

    repo: str
    revision: str
    sizes: Mapping[str, int]  # by the file's name
    hashes: Mapping[str, str] = field(default_factory=dict)  # SHA-256, of large files
    architecture: str | None = None  # None: it is not known
    quantized: str | None = None  # by what method, other than in GGUF: quant_method of config.json


class Unreachable(ValueError):
    """The hub does not answer, or may not be asked."""


def main(args: argparse.Namespace) -> int:
    """Download, and print the path. Raises ValueError or OSError where the download fails."""
    if args.name is None:
        print(catalog.advice())
        return 0
    reference = parse(args.name)
    try:
        path = fetch(reference, force=args.force)
    except Unreachable as error:
        cached = local(reference)
        if cached is None:
            raise
        terminal.print_message("note", f"{error}; it was downloaded before")
        path = cached
    print(path)
    if sys.stdout.isatty():
        print(f'Run it: sfumato run -m {reference} "Why is the sky blue?"', file=sys.stderr)
    return 0


def fetch(
    reference: Reference,
    quantize: str | None = None,
    device: str = "auto",
    force: bool = False,
) -> Path:
    """Downloads what is not in the local cache, if it fits; returns the model's path.

    quantize: the format of float matrices once the model is loaded, on that device. Raises
    ValueError or OSError, also where disk or memory do not suffice, unless `force` is given.
    """
    listing = remote(reference)
    names = choose(listing, reference)
    remaining = missing(listing, names)
    if not remaining:
        return download(listing, names, reference)
    room, lacks = _room(listing, names, remaining, memory(listing, names, quantize), device)
    reasons = [*_unreadable(listing), *lacks] or unread_scheme(listing, reference)
    if reasons and not force:
        raise ValueError(
            f"{reference}: {'; '.join(reasons)}. No weights were downloaded; "
            f"`sfumato pull --force {reference}` does so all the same"
        )
    for reason in reasons:
        terminal.print_message("warning", reason)
    shown = [Path(name).name for name in names]
    what = " and ".join(shown) if len(names) < 3 else f"{len(names)} files of {listing.repo}"
    print(f"sfumato: downloading {what}\nsfumato: {room}", file=sys.stderr)
    try:
        return download(listing, names, reference)
    except KeyboardInterrupt:
        print("\nsfumato: the same command continues the download", file=sys.stderr)
        raise


def _unreadable(listing: Listing) -> list[str]:
    """Why these files cannot be loaded, as far as the hub says."""
    from sfumato.model.families import FAMILIES  # loads torch, as the prediction of memory does

    reasons = []
    readable = {name for family in FAMILIES for name in (family.architecture, family.model_type)}
    if listing.architecture not in (None, *readable):
        known = " or ".join(family.architecture for family in FAMILIES)
        reasons.append(f"the model is a {listing.architecture!r}, not a {known}")
    if listing.quantized and listing.quantized not in METHODS:
        reasons.append(
            f"its weights are quantized by {listing.quantized!r}, which is not read; take "
            f"hf:{catalog.GGUF}"
        )
    for name in _READ_AT_ONCE:
        if listing.sizes.get(name, 0) > MAX_JSON:
            reasons.append(
                f"{name} has {size(listing.sizes[name])}, above the limit of {MAX_JSON >> 20} MiB"
            )
    return reasons


def unread_scheme(listing: Listing, reference: Reference) -> list[str]:
    """Why the narrow matrices of a repository cannot be loaded. Downloads what says how they are
    stored, some kB, and no weights. Raises as `download` does."""
    names = [name for name in ("config.json", NARROW) if name in listing.sizes]
    if "config.json" not in names or (listing.quantized is None and NARROW not in names):
        return []
    folder = download(listing, names, reference)
    try:
        read_scheme(read_object(folder / "config.json"), folder)
    except CheckpointError as error:
        return [str(error)]
    return []


def resolve(args: argparse.Namespace, key: str) -> None:
    """Replaces an option's `hf:` name by a path, and downloads what is not in the local cache.
    Raises ValueError or OSError where a download fails or would not fit."""
    given: str = getattr(args, key)
    reference = parse(given)
    quantize, device = getattr(args, "quantize", None), getattr(args, "device", "auto")
    path = local(reference) or fetch(reference, quantize, device)
    setattr(args, key, str(path))
    if key == "mmproj":
        return
    # For messages and for clients: the folder of a snapshot is only a hash.
    args.asked_for = given
    if getattr(args, "name", "") is None:
        args.name = path.name if path.is_file() else reference.repo.split("/")[1]


def _room(
    listing: Listing, names: list[str], remaining: int, need: float, device: str
) -> tuple[str, list[str]]:
    """The disk and memory that a model needs and that are free, and what does not fit.

    remaining: bytes to be downloaded; need: bytes of memory, to run it."""
    from sfumato.engine.memory.device_memory import budget
    from sfumato.model.placement import pick_device

    folder = cache_folder(listing.repo)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    disk, memory = shutil.disk_usage(existing).free, budget(pick_device(device))
    total = sum(listing.sizes[name] for name in names)
    lacks = []
    if remaining > disk:
        lacks.append(
            f"{size(remaining)} are to be downloaded, and {size(disk)} of disk are free in "
            f"{existing}"
        )
    if memory is not None and need > memory.nbytes:
        lacks.append(
            f"running it takes about {size(need)}, and {size(memory.nbytes)} are free "
            f"({memory.source})"
        )
    rest = f" of {size(total)}" if remaining < total else ""
    free = "" if memory is None else f" ({size(memory.nbytes)} free)"
    text = (
        f"{size(remaining)}{rest} ({size(disk)} of disk free); running it takes {size(need)}{free}"
    )
    return text, lacks


def memory(listing: Listing, names: list[str], quantize: str | None) -> float:
    """Bytes that running the model is predicted to take."""
    entry = catalog.find(listing.repo, names[-1])
    weights = sum(listing.sizes[n] for n in names if n.endswith((".gguf", ".safetensors")))
    if quantize is not None and names[-1].endswith(".safetensors"):
        return weights * _SHARE[quantize] + catalog.MARGIN
    share = _NARROW_SHARE.get(listing.quantized or "", 1.0)
    towers = sum(listing.sizes[name] for name in names if is_mmproj(name))
    return entry.memory + towers if entry is not None else weights * share + catalog.MARGIN


def parse(text: str) -> Reference:
    """The repository and file of a name. Raises ValueError where the text is no such name."""
    repo, _, file = text.removeprefix(PREFIX).partition(":")
    parts = file.split("/")
    if not _REPO.fullmatch(repo) or (file and not all(parts)) or ".." in parts or len(file) > 400:
        raise ValueError(f"{text[:200]}: is no name of a model; write {USAGE}")
    return Reference(repo, file or None)


def library() -> Any:
    """The hub's library. Raises ValueError, which says what to install, where it is missing."""
    try:
        hub = importlib.import_module("huggingface_hub")
        for part in ("utils", "errors", "constants", "file_download"):
            importlib.import_module(f"huggingface_hub.{part}")
    except ImportError:
        raise ValueError(
            f"{PREFIX} names need the package huggingface_hub, which is not installed; "
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


def remote(reference: Reference) -> Listing:
    """The hub's list of a repository's files. Raises ValueError; Unreachable where the hub does not
    answer."""
    hub = library()
    with explained(reference):
        info = hub.HfApi().model_info(reference.repo, files_metadata=True, timeout=30)
    config, gguf = _object(info.config), _object(info.gguf)
    quantized = _object(config.get("quantization_config")).get("quant_method")
    architecture = gguf.get("architecture") or config.get("model_type")
    # Names are printed: control characters could change the terminal.
    files = [file for file in info.siblings or [] if file.rfilename.isprintable()]
    return Listing(
        reference.repo,
        str(info.sha),
        {file.rfilename: max(0, int(file.size or 0)) for file in files},
        {file.rfilename: file.lfs.sha256 for file in files if file.lfs},
        None if architecture is None else str(architecture)[:40],
        None if quantized is None else str(quantized)[:40],
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


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


@contextmanager
def explained(reference: Reference) -> Iterator[None]:
    """Within, the library's errors become a ValueError that says what to do."""
    errors = library().errors
    page = f"https://huggingface.co/{reference.repo}"
    login = "log in with `hf auth login` (or set HF_TOKEN)"
    try:
        yield
    except errors.GatedRepoError:
        raise ValueError(
            f"{reference}: is gated; accept its terms at {page}, then {login} and try again"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"{reference}: no such repository, or it is private; check the name, or {login}"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise Unreachable(
            f"{reference}: the hub may not be asked, for HF_HUB_OFFLINE is set"
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        raise Unreachable(f"{reference}: the hub answered {status}; try again later") from None
    except Exception as error:
        # The library's own transfer, for the largest files, fails with RuntimeError.
        kinds = ConnectionError | TimeoutError | RuntimeError | errors.XetDownloadError
        if type(error).__module__.split(".")[0] not in _NETWORK and not isinstance(error, kinds):
            raise
        raise Unreachable(
            f"{reference}: the hub cannot be reached ({type(error).__name__}: {str(error)[:100]}); "
            "check the network, then try again: a download goes on where it stopped"
        ) from None


def missing(listing: Listing, names: list[str]) -> int:
    """Bytes that are still to be downloaded."""
    return sum(listing.sizes[name] - _held(listing, name) for name in names)


def download(listing: Listing, names: list[str], reference: Reference) -> Path:
    """Downloads these files, one after another; returns the model's path. Raises ValueError or
    OSError; after an error or Ctrl-C a second call resumes the download."""
    hub = library()
    with explained(reference):
        for name in names:
            if not _cached(listing, name) and (blob := _blob(listing, name)):
                _resume(hub, listing, name, blob)
            # Registers a file that is in the cache, and downloads the small files.
            place = Path(hub.hf_hub_download(listing.repo, name, revision="main"))
    depth = names[-1].count("/")
    return path_of(place.parents[depth], names)


def _held(listing: Listing, name: str) -> int:
    """Bytes of a file that are already downloaded."""
    size, blob = listing.sizes[name], _blob(listing, name)
    if _cached(listing, name):
        return size
    places = (blob, blob.with_suffix(".part")) if blob else ()
    return next((min(path.stat().st_size, size) for path in places if path.exists()), 0)


def _cached(listing: Listing, name: str) -> bool:
    find = library().try_to_load_from_cache
    return isinstance(find(listing.repo, name, revision=listing.revision), str)


def _blob(listing: Listing, name: str) -> Path | None:
    """A file's place in the cache; None where the library alone downloads the file."""
    digest = listing.hashes.get(name)
    if digest is None or listing.sizes[name] > WHOLE:
        return None
    if not re.fullmatch("[0-9a-f]{64}", digest):  # it becomes the name of a file
        raise ValueError(f"{listing.repo}: {name}: the hub gives no SHA-256 for it")
    return cache_folder(listing.repo) / "blobs" / digest


def _resume(hub: Any, listing: Listing, name: str, blob: Path) -> None:
    """Downloads a file to its place in the cache. What is there of an interrupted download is kept
    beside that place: the library itself would start again from the beginning."""
    part = blob.with_suffix(".part")
    blob.parent.mkdir(parents=True, exist_ok=True)
    locks = blob.parents[2] / ".locks" / blob.parents[1].name  # the library's own
    locks.mkdir(parents=True, exist_ok=True)
    with hub.utils.WeakFileLock(str(locks / f"{blob.name}.lock")):
        if blob.exists():  # another process has downloaded it
            return
        held = part.stat().st_size if part.exists() else 0
        held = 0 if held > listing.sizes[name] else held
        with part.open("r+b" if held else "wb") as file:
            file.seek(held)
            _stream(hub, listing, name, file, held)
        with part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != listing.hashes[name]:
            part.unlink()
            raise OSError(f"{name}: what was downloaded is damaged; it is removed, try again")
        os.replace(part, blob)


def _stream(hub: Any, listing: Listing, name: str, file: Any, held: int) -> None:
    url = hub.hf_hub_url(listing.repo, name, revision=listing.revision)
    headers = hub.utils.build_hf_headers()
    location = hub.get_hf_file_metadata(url).location
    if urlparse(location).netloc != urlparse(url).netloc:
        headers.pop("authorization", None)  # the token is the hub's, and no other server's
    hub.file_download.http_get(
        location,
        file,
        resume_size=held,
        headers=headers,
        expected_size=listing.sizes[name],
        displayed_filename=Path(name).name,
    )
