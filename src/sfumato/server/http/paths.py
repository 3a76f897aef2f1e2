"""The spellings of a path: clients leave out /v1, or put a slash behind."""

from __future__ import annotations

# Of OpenAI's API, which has them in /v1.
_SHORT = ("/chat/completions", "/completions", "/decisions", "/models", "/responses")
_SHORT_PREFIXES = ("/chat/completions/", "/models/", "/responses/")


def canonical(path: str) -> str:
    """The path as routes have it."""
    # No route and no file has a line end, and what stands for a name in a route matches none.
    path = path.replace("\n", "\ufffd").rstrip("/") or "/"
    short = path in _SHORT or path.startswith(_SHORT_PREFIXES)
    return f"/v1{path}" if short else path
