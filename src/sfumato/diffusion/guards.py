"""Guards against degenerate output: they report, they never cut."""

from __future__ import annotations

LONGEST = 16  # tokens of a phrase
REPEATS = 4  # as often, or it may be style
LEAST = 12  # tokens in all, or it may be a number or a rule of dashes


def repetition(ids: list[int], reason: str | None) -> str | None:
    """A warning where a token or phrase repeats to the end of a canvas without an end token; None
    where nothing repeats. `ids` are the canvas's visible tokens."""
    if reason == "eos":
        return None
    for size in range(1, min(LONGEST, len(ids) // REPEATS) + 1):
        run = size
        while run < len(ids) and ids[-run - 1] == ids[-run - 1 + size]:
            run += 1
        if run >= max(REPEATS * size, LEAST):
            what = "one token" if size == 1 else f"a phrase of {size} tokens"
            return f"{what} repeats over the last {run} positions; the text may be degenerate"
    return None
