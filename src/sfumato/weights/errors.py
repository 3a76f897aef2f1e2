"""The one error of this package; knows no file format."""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message names the file, the field and what to do."""


LISTED = 8
"""Names listed of each kind of fault."""


def listed(kind: str, names: Sequence[str]) -> str:
    """ "2 missing: a, b", or "" where there are no names."""
    if not names:
        return ""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    shown = ", ".join(name if len(name) <= 160 else f"{name[:160]}…" for name in names[:LISTED])
    return f"{len(names)} {kind}: {shown}{more}"


def quoted(text: object, limit: int = 80) -> str:
    """`repr(text)` cut to `limit` characters: names out of a hostile file stay readable."""
    shown = repr(text)
    return shown if len(shown) <= limit else f"{shown[:limit]}…"
