"""The short questions that the embedded model has learned by heart, and their answers.

The texts are in embedded/questions.toml. There is no held-out part: this is recall, not
understanding. Knows no tokens and no network.
"""

from __future__ import annotations

import string
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

_FIRST_ASKED = (
    "Hello!",
    "Hi!",
    "How are you?",
    "Who are you?",
    "What are you?",
    "What can you do?",
    "How do you work?",
)


@dataclass(frozen=True)
class Question:
    """A question as evaluation asks it, its one answer, and other wordings for training."""

    text: str
    answer: str
    also: tuple[str, ...] = ()


@cache
def questions_file() -> dict[str, Any]:
    """The tables of the file."""
    text = files(__package__).joinpath("embedded", "questions.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def all_questions() -> tuple[Question, ...]:
    """Every question, those about countries spelled out, in the order of the file."""
    file = questions_file()
    written = [*file["questions"], *file["unanswerable"]]
    answers = (
        Question(q["question"], q.get("answer", file["unknown"]), tuple(q["also"])) for q in written
    )
    return (*answers, *_questions_about_countries())


@cache
def first_asked() -> tuple[Question, ...]:
    """What people ask first of a model that they do not know."""
    return tuple(q for q in all_questions() if q.text in _FIRST_ASKED)


@cache
def countries() -> tuple[dict[str, str], ...]:
    """The facts about countries: a name and a capital each, a continent or a currency for some."""
    return tuple(questions_file()["countries"])


def _questions_about_countries() -> Iterator[Question]:
    for form in questions_file()["about_countries"]:
        needed = {name for _, name, _, _ in string.Formatter().parse(form["answer"]) if name}
        for country in countries():
            if needed <= country.keys():
                answer = form["answer"].format_map(country)
                also = tuple(wording.format_map(country) for wording in form["also"])
                text = form["question"].format_map(country)
                yield Question(text, answer[0].upper() + answer[1:], also)
