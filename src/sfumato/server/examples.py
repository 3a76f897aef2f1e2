"""Example prompts for a model, and the notes and warnings about the embedded one."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from sfumato.api import Reply
from sfumato.embedded_questions import all_questions

DEMONSTRATION = (
    "This demonstration model solves 4x4 Sudoku, answers a fixed set of simple questions, and "
    "writes small JSON objects."
)
_SUDOKU = re.compile(r"[1-4.]{4}(\n[1-4.]{4}){3}")
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


def demonstration(embedded: bool) -> str | None:
    """What the embedded model can do; None for other models."""
    return DEMONSTRATION if embedded else None


def warnings(embedded: bool, reply: Reply) -> list[str]:
    """The reply's warnings, and one where the embedded model could not answer."""
    cannot = embedded and reply.filled is None and not is_answered(reply)
    return [*reply.warnings, *([CANNOT] if cannot else [])]


def is_answered(reply: Reply) -> bool:
    """Whether a reply of the embedded model is one that the model was trained to write: four rows
    of a Sudoku, a JSON object, or one of its answers, or a part of one where the reply begins or
    ends inside it.
    A canvas of anything else may settle too, and its entropy is as low as that of a right answer.
    A canvas that ran out of steps is no answer: more steps would not help."""
    if "step_cap" in reply.stats.convergence:
        return False
    text = reply.text
    if reply.stop_reason != "eos":
        return any(text in answer for answer in _answers()) or not set(text) - set("1234\n")
    if _SUDOKU.fullmatch(text):
        return True
    return _is_object(text) or (bool(text) and any(answer.endswith(text) for answer in _answers()))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@cache
def _answers() -> frozenset[str]:
    return frozenset(question.answer for question in all_questions())


def remark(embedded: bool, reply: Reply) -> str:
    """The line below a reply, as on the page (page/footer.js); empty where there is none."""
    lines = warnings(embedded, reply)
    return f"{CANNOT.capitalize()}." if CANNOT in lines else " ".join(lines)


def examples(embedded: bool) -> list[dict[str, Any]]:
    """Titles and messages; for the embedded model, those that it can answer."""
    chosen = _EMBEDDED if embedded else _OTHERS
    return [
        {"title": title, "messages": [{"role": "user", "content": text}]}
        for title, text in chosen.items()
    ]
