"""Downloads files of a hub's repository into the local cache of the hub's library, and resumes
interrupted downloads.

The library would start again from the beginning. So a large file is written to a file of a fixed
name beside its place in the cache, and the next attempt continues that file. Knows no models.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from sfumato.cli import hub
from sfumato.cli.hub import Listing, Reference

WHOLE = 50e9
"""Bytes; the hub serves larger files only by a protocol of its own, through its library."""

_CHUNK = 1 << 20


def missing(listing: Listing, names: list[str]) -> int:
    """Bytes that are still to be downloaded."""
    return sum(listing.sizes[name] - _held(listing, name) for name in names)


def download(listing: Listing, names: list[str], reference: Reference) -> Path:
    """Downloads these files, one after another; returns the model's path. Raises ValueError or
    OSError; after an error or Ctrl-C a second call resumes the download."""
    library = hub.library()
    with hub.explained(reference):
        for name in names:
            if _resumable(listing, name) and not _cached(listing, name):
                _fetch(library, listing, name)
            # Registers a file that is in the cache, and downloads the small files.
            place = Path(library.hf_hub_download(listing.repo, name, revision="main"))
    depth = names[-1].count("/")
    return hub.path_of(place.parents[depth], names)


def _held(listing: Listing, name: str) -> int:
    """Bytes of a file that are already downloaded."""
    if _cached(listing, name):
        return listing.sizes[name]
    if not _resumable(listing, name):
        return 0
    blob = _blob(listing, name)
    for path in (blob, _part(blob)):
        if path.exists():
            return min(path.stat().st_size, listing.sizes[name])
    return 0


def _cached(listing: Listing, name: str) -> bool:
    find = hub.library().try_to_load_from_cache
    return isinstance(find(listing.repo, name, revision=listing.revision), str)


def _resumable(listing: Listing, name: str) -> bool:
    return name in listing.hashes and listing.sizes[name] <= WHOLE


def _blob(listing: Listing, name: str) -> Path:
    digest = listing.hashes[name]
    if not re.fullmatch("[0-9a-f]{64}", digest):  # it becomes the name of a file
        raise ValueError(f"{listing.repo}: {name}: the hub gives no SHA-256 for it")
    return hub.cache_folder(listing.repo) / "blobs" / digest


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.part")


def _fetch(library: Any, listing: Listing, name: str) -> None:
    """Downloads a file to its place in the cache."""
    blob, expected = _blob(listing, name), listing.sizes[name]
    part = _part(blob)
    blob.parent.mkdir(parents=True, exist_ok=True)
    locks = blob.parents[2] / ".locks" / blob.parents[1].name  # the library's own
    locks.mkdir(parents=True, exist_ok=True)
    lock = importlib.import_module("huggingface_hub.utils").WeakFileLock
    with lock(str(locks / f"{blob.name}.lock")):
        if blob.exists():  # another process has downloaded it
            return
        held = part.stat().st_size if part.exists() else 0
        if held > expected:
            held = 0
        with part.open("r+b" if held else "wb") as file:
            file.seek(held)
            _stream(library, listing, name, file, held)
        if _sha256(part) != listing.hashes[name]:
            part.unlink()
            raise OSError(f"{name}: what was downloaded is damaged; it is removed, try again")
        os.replace(part, blob)


def _stream(library: Any, listing: Listing, name: str, file: Any, held: int) -> None:
    url = library.hf_hub_url(listing.repo, name, revision=listing.revision)
    headers = importlib.import_module("huggingface_hub.utils").build_hf_headers()
    location = library.get_hf_file_metadata(url).location
    if urlparse(location).netloc != urlparse(url).netloc:
        headers.pop("authorization", None)  # the token is the hub's, and no other server's
    get = importlib.import_module("huggingface_hub.file_download").http_get
    get(
        location,
        file,
        resume_size=held,
        headers=headers,
        expected_size=listing.sizes[name],
        displayed_filename=Path(name).name,
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
