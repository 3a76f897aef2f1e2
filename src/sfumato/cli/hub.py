"""`hf:owner/name[:file]`: which files of a hub's repository such a name means, and their download.

What is in the hub's local cache is found without the network. Other files are downloaded into that
cache, and interrupted downloads resumed. Knows no memory (`pull.py`). The hub's library is an
optional extra, imported only when asked for.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from sfumato.cli.terminal import size
from sfumato.weights.checkpoint import INDEX, locate
from sfumato.weights.files.gguf import part_names
from sfumato.weights.files.narrow import BESIDE as NARROW

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
    return snapshot / names[0] if names[0].lower().endswith(".gguf") else snapshot


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
    """The files that a reference means: a GGUF file or its parts, or safetensors with what is read
    beside them, the weights last. Raises ValueError where it means none, or several.

    loosely: any part of a file's name serves; for that all names must be listed.
    """
    names, wanted = sorted(listing.sizes), reference.file
    ggufs = [n for n in names if n.lower().endswith(".gguf") and "mmproj" not in n.lower()]
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
    return parts


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
            if _resumable(listing, name) and not _cached(listing, name):
                _fetch(hub, listing, name)
            # Registers a file that is in the cache, and downloads the small files.
            place = Path(hub.hf_hub_download(listing.repo, name, revision="main"))
    depth = names[-1].count("/")
    return path_of(place.parents[depth], names)


def _held(listing: Listing, name: str) -> int:
    """Bytes of a file that are already downloaded."""
    if _cached(listing, name):
        return listing.sizes[name]
    if not _resumable(listing, name):
        return 0
    blob = _blob(listing, name)
    for path in (blob, blob.with_suffix(".part")):
        if path.exists():
            return min(path.stat().st_size, listing.sizes[name])
    return 0


def _cached(listing: Listing, name: str) -> bool:
    find = library().try_to_load_from_cache
    return isinstance(find(listing.repo, name, revision=listing.revision), str)


def _resumable(listing: Listing, name: str) -> bool:
    return name in listing.hashes and listing.sizes[name] <= WHOLE


def _blob(listing: Listing, name: str) -> Path:
    digest = listing.hashes[name]
    if not re.fullmatch("[0-9a-f]{64}", digest):  # it becomes the name of a file
        raise ValueError(f"{listing.repo}: {name}: the hub gives no SHA-256 for it")
    return cache_folder(listing.repo) / "blobs" / digest


def _fetch(hub: Any, listing: Listing, name: str) -> None:
    """Downloads a file to its place in the cache. What is there of an interrupted download is kept
    beside that place: the library itself would start again from the beginning."""
    blob, expected = _blob(listing, name), listing.sizes[name]
    part = blob.with_suffix(".part")
    blob.parent.mkdir(parents=True, exist_ok=True)
    locks = blob.parents[2] / ".locks" / blob.parents[1].name  # the library's own
    locks.mkdir(parents=True, exist_ok=True)
    with hub.utils.WeakFileLock(str(locks / f"{blob.name}.lock")):
        if blob.exists():  # another process has downloaded it
            return
        held = part.stat().st_size if part.exists() else 0
        if held > expected:
            held = 0
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
