"""`sfumato list` and `sfumato remove`: the models on this machine and those that can be downloaded,
and how the former go again.

The local cache is the hub's (`sfumato.hub`), which other programs share.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from sfumato import catalog, hub
from sfumato.cli.terminal import columns, print_message, print_report, size, table, wrapped
from sfumato.model.families import FAMILIES
from sfumato.refused import Refused


def main(args: argparse.Namespace) -> int:
    """Run the one that the options name. Raises ValueError or OSError, saying what is wrong."""
    return _remove(args) if args.command == "remove" else _list(args)


def _list(args: argparse.Namespace) -> int:
    findings = facts()
    lines = ["On this machine:"]
    lines += _rows(
        [each["name"], size(each["bytes"]), each["format"], each["used"] or "-", each["path"]]
        for each in findings["models"]
    )
    absent = [each for each in findings["published"] if not each["here"]]
    if absent:
        lines.append(wrapped("To download, by `sfumato pull NAME` or where -m names it:"))
        about = {entry.name: entry.size for entry in catalog.CATALOGUE.values()}
        lines += _rows(
            [each["name"], about[each["name"]], each["licence"], each["good_for"]]
            for each in absent
        )
    if others := findings["others"]:
        lines.append(wrapped(f"{others} more in {findings['cache']} are not Sfumato's to run."))
    if findings["problem"]:
        print_message("note", findings["problem"])
    print_report(args.json, findings, lines)
    return 0


def facts() -> dict[str, Any]:
    """The models on this machine and the published ones as plain values; sizes in bytes."""
    known = {name for family in FAMILIES for name in (family.architecture, family.model_type)}
    problem, cache, held = "", "", []
    try:
        cache, held = str(hub.library().constants.HF_HUB_CACHE), hub.held()
    except ValueError as error:  # the library is not there
        problem = str(error)
    ours = [
        each
        for each in held
        if each.model_type in known or each.name in catalog.CATALOGUE or not each.model_type
    ]
    own = [
        {
            "name": name,
            "path": str(path),
            "bytes": (path / "model.safetensors").stat().st_size,
            "format": "bfloat16",
            "used": None,
        }
        for name, path in catalog.PACKAGED.items()
    ]
    models = [
        {
            "name": each.name,
            "path": str(each.path),
            "bytes": each.nbytes,
            "format": each.format,
            "used": time.strftime("%Y-%m-%d", time.localtime(each.used)),
        }
        for each in ours
    ]
    here = {each.name for each in ours}
    return {
        "cache": cache,
        "models": [*own, *models],
        "others": len(held) - len(ours),
        "published": [_published(entry, here) for entry in catalog.CATALOGUE.values()],
        "problem": problem,
    }


def _published(entry: catalog.Published, here: set[str]) -> dict[str, Any]:
    return {
        "name": entry.name,
        "title": entry.title,
        "format": entry.format,
        "address": entry.address,
        "bytes": entry.nbytes,
        "about": entry.about,
        "memory": entry.needs(),
        "licence": entry.licence,
        "good_for": entry.good_for,
        "verified": entry.verified or catalog.NOT_VERIFIED,
        "here": entry.name in here,
    }


def _rows(cells: Any) -> list[str]:
    """A table; in a terminal that is too narrow for it, each row as a paragraph of its own."""
    rows = list(cells)
    lines = table(rows)
    if not sys.stdout.isatty() or max(map(len, lines)) < columns(sys.stdout):
        return lines
    return [wrapped(f"{row[0]}: {', '.join(row[1:])}", "  ", "    ") for row in rows]


def _remove(args: argparse.Namespace) -> int:
    if args.name in catalog.PACKAGED:
        raise Refused(None, f"{args.name} is part of the package, and stays")
    reference = hub.parse(args.name)
    planned = hub.removal(reference)
    what = f"{len(planned.files)} files in" if planned.files else "all of"
    freed = f"{what} {planned.folder}, which frees {size(planned.nbytes)}"
    if not args.force:
        if not sys.stdin.isatty():
            raise Refused(None, f"{reference}: would remove {freed}", "--force does so unasked")
        question = f"Removes {freed}. Other programs use this cache too."
        print(wrapped(question, file=sys.stderr), file=sys.stderr)
        print("Remove it? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("Nothing was removed.", file=sys.stderr)
            return 0
    hub.remove(reference, planned)
    print(f"removed {freed}")
    return 0
