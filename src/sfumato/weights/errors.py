"""The one error of this package; knows no file format."""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message names the file, the field and what to do."""


LISTED = 8
"""Names listed of each kind of fault."""


def listed(kind: str, names: Sequence[str]) -> str:
    """ "2 missing: a, b", or "" where there are no names."""
    return f"{len(names)} {kind}: {first_of(names)}" if names else ""


def first_of(names: Sequence[str]) -> str:
    """The first LISTED names, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(n if len(n) <= 160 else f"{n[:160]}…" for n in names[:LISTED]) + more


def quoted(text: object, limit: int = 80) -> str:
    """`repr(text)` cut to `limit` characters: names out of a hostile file stay readable."""
    shown = repr(text)
    return shown if len(shown) <= limit else f"{shown[:limit]}…"
