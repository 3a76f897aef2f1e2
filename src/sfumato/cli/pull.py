"""`sfumato pull`, and names of models in other commands: the download of what a name means, after a
check of free disk and memory.

What is in the hub's local cache is found without the network (`sfumato.hub`). Other files are
downloaded into that cache, and interrupted downloads resumed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from sfumato import catalog
from sfumato.cli import terminal
from sfumato.cli.terminal import size
from sfumato.hub import Listing, Reference, cache_folder, choose, library, local, parse, path_of
from sfumato.weights.checkpoint import INDEX, is_mmproj
from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.jsonfile import MAX_JSON, read_object
from sfumato.weights.files.narrow import BESIDE as NARROW
from sfumato.weights.files.narrow import METHODS, read_scheme

WHOLE = 50e9
"""Bytes; the hub serves larger files only by a protocol of its own, through its library."""

_NETWORK = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "socket", "ssl"}

_NARROW_SHARE = {"compressed-tensors": 1.07, "modelopt": 1.5}
"""What narrow matrices take as blocks, by their method: 8 bits become 8½, and ModelOpt's 4½ become
6½ or 8½. Loading predicts it exactly, from the headers."""

_READ_AT_ONCE = ("config.json", "generation_config.json", NARROW, INDEX)


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
    """Replaces an option's name of a model by a path, and downloads what is not in the local cache.
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
        plain = path.name if path.is_file() else reference.repo.split("/")[1]
        args.name = reference.name or plain


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
        return weights * catalog.SHARE[quantize] + catalog.MARGIN
    share = _NARROW_SHARE.get(listing.quantized or "", 1.0)
    towers = sum(listing.sizes[name] for name in names if is_mmproj(name))
    if entry is not None and entry.memory is not None:
        return entry.memory + towers
    return weights * share + catalog.MARGIN


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
