"""The one error of this package; knows no file format."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message names the file, the field and what to do."""


def quoted(text: object, limit: int = 80) -> str:
    """`repr(text)` cut to `limit` characters: names out of a hostile file stay readable."""
    shown = repr(text)
    return shown if len(shown) <= limit else f"{shown[:limit]}…"
