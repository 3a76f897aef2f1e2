"""What a model is good for: prompts to offer, and what is to be said of the embedded model."""

from __future__ import annotations

from typing import Any

from sfumato.api import Reply
from sfumato.engine import ServedModel

DEMONSTRATION = (
    "This demonstration model solves 4x4 Sudoku and answers a fixed set of simple questions."
)
CANNOT = "this demonstration model cannot answer that"

# Boards with one solution, of held-out grids; with four digits they take the most steps.
_EMBEDDED = {
    "Solve a Sudoku": "sudoku\n....\n..32\n....\n4..1",
    "Another Sudoku": "sudoku\n.2..\n..3.\n2...\n...1",
    "Who are you?": "Who are you?",
    "How do you work?": "How do you work?",
    "A capital": "What is the capital of Japan?",
}
_OTHERS = {
    "A table": "Compare coffee, tea and cocoa in a Markdown table: origin, caffeine, taste.",
    "Code": "Write a Python function that merges two sorted lists, with a docstring.",
    "JSON": "Give me three fictional users as a JSON array with name, age and city.",
    "A poem": "Write a sonnet about mist on a lake.",
    "Arithmetic": "A train leaves at 9:40 and takes 2 h 35 min. When does it arrive? Show steps.",
}


def demonstration(model: ServedModel) -> str | None:
    """What the embedded model can do, and that this is all; None for other models."""
    return DEMONSTRATION if model.embedded else None


def warnings(model: ServedModel, reply: Reply) -> list[str]:
    """The reply's, and one where the embedded model ran out of steps: more would not help it."""
    capped = demonstration(model) and "step_cap" in reply.stats.convergence
    return [*reply.warnings, *([CANNOT] if capped else [])]


def remark(model: ServedModel, reply: Reply) -> str:
    """What stands below a reply, as the page has it (page/footer.js); empty: nothing does."""
    found = warnings(model, reply)
    return f"{CANNOT.capitalize()}." if CANNOT in found else " ".join(found)


def examples(model: ServedModel) -> list[dict[str, Any]]:
    """Titles and messages; for the embedded model, what it can do."""
    chosen = _EMBEDDED if model.embedded else _OTHERS
    return [
        {"title": title, "messages": [{"role": "user", "content": text}]}
        for title, text in chosen.items()
    ]
