"""Examples of fills, JSON and edits for the page, and notes about the embedded model.

Knows which texts the embedded model was trained on, and no page.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from sfumato.fills import edit_message

_ONLY = "This demonstration model knows "
NOTES = {
    "fill": f"{_ONLY}capitals, days, counts and 4x4 Sudoku, and little else.",
    "json": f"{_ONLY}objects like those of the examples. Others are valid, and mean nothing.",
    "edit": f"{_ONLY}no instructions: it answers a question, and the text is what it begins with.",
}


def _fill(title: str, text: str, question: str = "") -> dict[str, Any]:
    return {"title": title, "text": text, "question": question}


def _sudoku(title: str, prompt: str, rows: str) -> dict[str, Any]:
    """prompt: what stands before the rows in the question; rows: "." where a digit is wanted."""
    return {"title": title, "prompt": prompt, "rows": rows}


def _json(title: str, prompt: str, /, **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"title": title, "prompt": prompt, "schema": schema}


def _edit(title: str, text: str, instruction: str) -> dict[str, Any]:
    return {"title": title, "text": text, "instruction": instruction}


_TEXT = {"type": "string", "maxLength": 20}
_SOLVE = "Solve this Sudoku. Answer with the completed rows and nothing else."

_EMBEDDED = {
    "fill": [
        _fill("A capital", "The capital of France is {{5}}."),
        _fill("A day", "Monday, {{7}}, Wednesday, Thursday"),
        _fill("A number", "3, 4, 5, {{1}}, 7, 8"),
        _fill("Length left open", "The capital is {{<=8}}.", "What is the capital of Japan?"),
        _fill(
            "One of three", "Egypt is in {{Asia|Africa|Europe}}.", "Which continent is Egypt in?"
        ),
        # Of held-out grids, with one solution.
        _sudoku("A Sudoku", "sudoku", "....\n..32\n....\n4..1"),
        _sudoku("Another Sudoku", "sudoku", ".2..\n..3.\n2...\n...1"),
    ],
    "json": [
        _json("A capital", "What is the capital of France? As JSON.", capital=_TEXT),
        _json(
            "An order",
            "Emma ordered 3 cups. As JSON.",
            name=_TEXT,
            item=_TEXT,
            count={"type": "integer", "minimum": 0, "maximum": 99},
        ),
        _json(
            "A review",
            "Hugo says that the hotel is superb. As JSON: thing, tone.",
            thing=_TEXT,
            tone={"enum": ["positive", "neutral", "negative"]},
        ),
    ],
    "edit": [
        _edit("A wrong capital", "The capital is Rome.", "What is the capital of France?"),
        _edit("A wrong continent", "Egypt is in Asia.", "Which continent is Egypt in?"),
        _edit("A wrong currency", "China uses the euro.", "What is the currency of China?"),
    ],
}
_OTHERS = {
    "fill": [
        _fill("A letter", "Dear {{<=6}},\n\nthank you for {{<=24}}. I will answer by Friday.\n"),
        _fill(
            "Code",
            "def area(radius):\n    return{{<=16}}\n\nprint(area(2))  # 12.57\n",
        ),
        _fill("A tone", 'The review "The room was loud all night." is {{positive|negative}}.'),
        _sudoku(
            "A Sudoku",
            _SOLVE,
            "53..7....\n6..195...\n.98....6.\n8...6...3\n4..8.3..1\n7...2...6\n.6....28.\n...419..5"
            "\n....8..79",
        ),
    ],
    "json": [
        _json(
            "A city",
            "Describe Lisbon.",
            name={"type": "string"},
            country={"type": "string"},
            inhabitants={"type": "integer", "minimum": 0},
            on_the_sea={"type": "boolean"},
        ),
        _json(
            "A recipe",
            "A quick soup for two.",
            title={"type": "string"},
            minutes={"type": "integer", "minimum": 1, "maximum": 60},
            ingredients={"type": "array", "items": {"type": "string"}, "maxItems": 6},
        ),
        _json(
            "A ticket",
            'Sort this mail: "You took the money twice. Unless it is back today, I cancel."',
            team={"enum": ["billing", "technical", "sales"]},
            urgent={"type": "boolean"},
        ),
    ],
    "edit": [
        _edit(
            "Names of code",
            "def f(a, b):\n    c = a * b\n    return c\n",
            "Rename f to area, a to width and b to height.",
        ),
        _edit(
            "A tone",
            "Your order is late. We do not know when it will come. Wait.",
            "Make it friendly, and keep it short.",
        ),
        _edit("Spelling", "Their is a mistakes in this sentense.", "Correct the spelling."),
    ],
}


def modes(embedded: bool) -> dict[str, Any]:
    """`fill`, `json` and `edit`: `note` (of the embedded model, None for others) and `examples`;
    json is None where the package that reads grammars is missing. `prompt` of edit is what the
    model is asked, with {instruction} and {text} in it."""
    chosen = _EMBEDDED if embedded else _OTHERS
    available: dict[str, Any] = {
        name: {"note": NOTES[name] if embedded else None, "examples": examples}
        for name, examples in chosen.items()
    }
    prompt = edit_message("{text}", "{instruction}")["content"]
    available["edit"]["prompt"] = "{instruction}" if embedded else prompt
    return available if find_spec("llguidance") else available | {"json": None}
