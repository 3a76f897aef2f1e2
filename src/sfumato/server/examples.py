"""Prompts for a page to offer, whose answers have a shape that can be watched."""

from __future__ import annotations

from typing import Any

from sfumato.api import EMBEDDED, Model

# Boards of few digits have several solutions, and take more steps than those of one.
_EMBEDDED = {
    "Solve a Sudoku": "sudoku\n1...\n....\n....\n...2",
    "Another Sudoku": "sudoku\n1..4\n....\n....\n3..2",
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


def examples(model: Model) -> list[dict[str, Any]]:
    """Titles and messages; for the embedded model, what it can do."""
    chosen = _EMBEDDED if model.path == EMBEDDED else _OTHERS
    return [
        {"title": title, "messages": [{"role": "user", "content": text}]}
        for title, text in chosen.items()
    ]
