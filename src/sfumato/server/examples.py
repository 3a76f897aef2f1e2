"""Examples for the page: prompts, decisions, fills, JSON and edits; and what is said of the
embedded model.

Knows which texts the embedded model was trained on, and no page.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.util import find_spec
from typing import Any

from sfumato.api import Reply
from sfumato.embedded_questions import all_questions
from sfumato.fills import edit_message

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


_DECISION_NOTE = (
    "This demonstration model decides about short English texts like those of the examples: "
    "orders, countries, reviews, counts, chances. About other texts its answers mean nothing."
)


def _yes_no(text: str) -> dict[str, Any]:
    return {"type": "noul", "instructions": text}


def _choice(text: str, *options: str, **described: str) -> dict[str, Any]:
    criteria = {**dict.fromkeys(options), **described}
    return {"type": "choice", "instructions": text, "criteria": criteria}


def _score(text: str, *levels: str) -> dict[str, Any]:
    return {"type": "score", "instructions": text, "criteria": list(levels)}


# States and questions as train/decision_states.py makes them. The second leaves its questions open.
_DECISIONS = (
    {
        "title": "An order",
        "state": "Emma ordered 3 cups. The order is late.",
        "questions": {
            "late": _yes_no("Is it late?"),
            "goods": _choice("What was ordered?", "cups", "books", "pens", "shoes"),
            "number": _score("How many were ordered?", "1 to 3", "4 to 6", "7 to 9"),
        },
    },
    {
        "title": "A drawn ball",
        "state": "A bag holds 3 red and 7 blue balls. One is drawn.",
        "questions": {
            "red": _yes_no("Is it red?"),
            "colour": _choice("Which colour is it?", "red", "blue"),
        },
    },
    {
        "title": "A review",
        "state": "Hugo says that the hotel is superb.",
        "questions": {
            "complaint": _yes_no("Is it a complaint?"),
            "tone": _choice("What is the tone?", "positive", "neutral", "negative"),
            "rating": _score("How good is it?", "awful", "bad", "okay", "good", "great"),
        },
    },
)

_OTHER_DECISIONS = (
    {
        "title": "A ticket",
        "state": "Subject: charged twice\n\nThis is my third mail. You took the money for October "
        "twice, and unless it is back today I cancel.",
        "questions": {
            "urgent": _yes_no("Does the customer need a reply today?"),
            "team": _choice(
                "Which team should answer?",
                billing="payments, refunds, invoices",
                technical="faults of the product",
                sales="offers and new contracts",
                other="none of these",
            ),
            "anger": _score("How angry is the customer?", "calm", "annoyed", "furious"),
        },
    },
    {
        "title": "A review",
        "state": "The room was clean and the breakfast superb, but the street is loud all night.",
        "questions": {
            "again": _yes_no("Would this guest come again?"),
            "topic": _choice("What is the complaint about?", "room", "food", "noise", "staff"),
            "rating": _score("How good was the stay?", "awful", "bad", "okay", "good", "great"),
        },
    },
)


def decisions(embedded: bool) -> dict[str, Any]:
    """`note`: what the embedded model can decide, None for other models; `examples`: titles with
    a state and questions in System One's form."""
    return {
        "note": _DECISION_NOTE if embedded else None,
        "examples": list(_DECISIONS if embedded else _OTHER_DECISIONS),
    }


_ONLY = "This demonstration model knows "

_MODE_NOTES = {
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

_MODES = {
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

_OTHER_MODES = {
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
    chosen = _MODES if embedded else _OTHER_MODES
    available: dict[str, Any] = {
        name: {"note": _MODE_NOTES[name] if embedded else None, "examples": examples}
        for name, examples in chosen.items()
    }
    prompt = edit_message("{text}", "{instruction}")["content"]
    available["edit"]["prompt"] = "{instruction}" if embedded else prompt
    return available if find_spec("llguidance") else available | {"json": None}
