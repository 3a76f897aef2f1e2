"""The short questions that the embedded model has learned by heart, and their answers.

The texts are in embedded/questions.toml. There is no held-out part: this is recall, not
understanding. Knows no tokens and no network.
"""

from __future__ import annotations

import re
import string
import tomllib
from collections.abc import Iterator, Sequence
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


EARLIER_TURNS = 2
"""Turns before a question in the training data, at most; with more the answers get wrong."""

_ASKS_ON = re.compile(r"and\b|.*\?$", re.IGNORECASE)
_MOST_WORDS = 5  # of a question that needs an earlier one


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
        for country in countries():
            if _fields(form) <= country.keys():
                answer = form["answer"].format_map(country)
                also = tuple(wording.format_map(country) for wording in form["also"])
                text = form["question"].format_map(country)
                yield Question(text, answer[0].upper() + answer[1:], also)


def follow_up(text: str, before: Sequence[str]) -> str | None:
    """The whole question about a country that a short text asks with the help of earlier ones:
    after "What is the capital of France?", "And of Japan?" asks "What is the capital of Japan?".
    None where the text is no such question. before: the user's earlier texts, the newest last."""
    if (
        not _ASKS_ON.match(text.strip())
        or len(text.split()) > _MOST_WORDS
        or _plain(text) in _known()
    ):
        return None
    country, form = _mentioned(text)
    if (country is None) == (form is None):
        return None
    for earlier in reversed(before):
        other, other_form = _mentioned(earlier)
        country, form = country or other, form or other_form
    if country is None or form is None:
        return None
    meant: str = form["question"].format_map(country)
    return meant if _plain(meant) in _known() else None


def _plain(text: str) -> str:
    """A wording without what training varies: case, politeness, final mark."""
    text = text.strip(" .!?").lower().removesuffix(", please")
    return text.removeprefix("please ")


@cache
def _known() -> frozenset[str]:
    """Every question in all its wordings."""
    return frozenset(_plain(word) for q in all_questions() for word in (q.text, *q.also))


def _mentioned(text: str) -> tuple[dict[str, str] | None, dict[str, Any] | None]:
    """The country that a text names, and the form of questions about what it asks of one."""

    def named(word: str) -> bool:
        return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None

    forms = questions_file()["about_countries"]
    country = next((each for each in countries() if named(each["name"].removeprefix("the "))), None)
    return country, next((form for form in forms if any(map(named, _fields(form)))), None)


def _fields(form: dict[str, Any]) -> set[str]:
    """The fields of a country that an answer has, besides the name: "capital"."""
    return {name for _, name, _, _ in string.Formatter().parse(form["answer"]) if name} - {"name"}
