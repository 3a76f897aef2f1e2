"""`sfumato pull`: downloads a model, after a check of free disk and memory."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from sfumato import catalog
from sfumato.cli import hub, terminal
from sfumato.cli.hub import Listing, Reference
from sfumato.cli.terminal import size
from sfumato.weights.checkpoint import INDEX
from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.jsonfile import MAX_JSON, read_object
from sfumato.weights.files.narrow import BESIDE as NARROW
from sfumato.weights.files.narrow import METHODS, read_scheme

_SHARE = {"q4_k": 0.36, "q8_0": 0.55}
"""What quantizing while loading leaves of bfloat16, the embedding's two copies included."""


_NARROW_SHARE = {"compressed-tensors": 1.07, "modelopt": 1.5}
"""What narrow matrices take as blocks, by their method: 8 bits become 8½, and ModelOpt's 4½ become
6½ or 8½. Loading predicts it exactly, from the headers."""

_READ_AT_ONCE = ("config.json", "generation_config.json", NARROW, INDEX)


def main(args: argparse.Namespace) -> int:
    """Download, and print the path. Raises ValueError or OSError where the download fails."""
    if args.name is None:
        print(catalog.advice())
        return 0
    reference = hub.parse(args.name)
    try:
        path = fetch(reference, force=args.force)
    except hub.Unreachable as error:
        cached = hub.local(reference)
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
    listing = hub.remote(reference)
    names = hub.choose(listing, reference)
    remaining = hub.missing(listing, names)
    if not remaining:
        return hub.download(listing, names, reference)
    room, lacks = _room(listing, names, remaining, memory(listing, names, quantize), device)
    reasons = [*_unreadable(listing), *lacks] or unread_scheme(listing, reference)
    if reasons and not force:
        raise ValueError(
            f"{reference}: {'; '.join(reasons)}. No weights were downloaded; "
            f"`sfumato pull --force {reference}` does so all the same"
        )
    for reason in reasons:
        terminal.print_message("warning", reason)
    what = Path(names[0]).name if len(names) == 1 else f"{len(names)} files of {listing.repo}"
    print(f"sfumato: downloading {what}\nsfumato: {room}", file=sys.stderr)
    try:
        return hub.download(listing, names, reference)
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
    stored, some kB, and no weights. Raises as `hub.download` does."""
    names = [name for name in ("config.json", NARROW) if name in listing.sizes]
    if "config.json" not in names or (listing.quantized is None and NARROW not in names):
        return []
    folder = hub.download(listing, names, reference)
    try:
        read_scheme(read_object(folder / "config.json"), folder)
    except CheckpointError as error:
        return [str(error)]
    return []


def resolve(args: argparse.Namespace, key: str) -> None:
    """Replaces an option's `hf:` name by a path, and downloads what is not in the local cache.
    Raises ValueError or OSError where a download fails or would not fit."""
    given: str = getattr(args, key)
    reference = hub.parse(given)
    quantize, device = getattr(args, "quantize", None), getattr(args, "device", "auto")
    path = hub.local(reference) or fetch(reference, quantize, device)
    setattr(args, key, str(path))
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

    folder = hub.cache_folder(listing.repo)
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
    return entry.memory if entry is not None else weights * share + catalog.MARGIN
