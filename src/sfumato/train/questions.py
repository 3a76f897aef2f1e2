"""The short questions that the embedded model learns by heart, and how people may word them.

The texts are in questions.toml. There is no held-out part: this is recall, not understanding.
Knows no tokens.
"""

from __future__ import annotations

import string
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np

_FINAL_MARKS = "?!."
_FIRST_ASKED = (
    "Hello!",
    "Hi!",
    "How are you?",
    "Who are you?",
    "What are you?",
    "What can you do?",
    "How do you work?",
)
_Choice = TypeVar("_Choice")


@dataclass(frozen=True)
class Question:
    """A question as evaluation asks it, its one answer, and other wordings for training."""

    text: str
    answer: str
    also: tuple[str, ...] = ()


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("questions.toml").read_text(encoding="utf-8"))


@cache
def all_questions() -> tuple[Question, ...]:
    """Every question, those about countries spelled out, in the order of the file."""
    answered = [
        Question(q["question"], q["answer"], tuple(q["also"])) for q in _file()["questions"]
    ]
    unknown = _file()["unknown"]
    refused = [Question(q["question"], unknown, tuple(q["also"])) for q in _file()["unanswerable"]]
    return (*answered, *refused, *_questions_about_countries())


@cache
def first_asked() -> tuple[Question, ...]:
    """What people ask first of a model that they do not know."""
    return tuple(q for q in all_questions() if q.text in _FIRST_ASKED)


@cache
def countries() -> tuple[dict[str, str], ...]:
    """The facts about countries: a name and a capital each, a continent or a currency for some."""
    return tuple(_file()["countries"])


def _questions_about_countries() -> list[Question]:
    questions = []
    for form in _file()["about_countries"]:
        needed = {name for _, name, _, _ in string.Formatter().parse(form["answer"]) if name}
        for country in countries():
            if needed <= country.keys():
                answer = form["answer"].format_map(country)
                also = tuple(wording.format_map(country) for wording in form["also"])
                text = form["question"].format_map(country)
                questions.append(Question(text, answer[0].upper() + answer[1:], also))
    return questions


def pick(choices: Sequence[_Choice], rng: np.random.Generator) -> _Choice:
    """One of the choices, evenly; many times faster than Generator.choice."""
    return choices[int(rng.random() * len(choices))]


def wording(question: Question, rng: np.random.Generator) -> str:
    """The question as a user might type it: other words, case, politeness, end."""
    text = pick(question.also, rng) if question.also and rng.random() < 0.5 else question.text
    if rng.random() < 0.3:
        text = text.rstrip(_FINAL_MARKS)
    polite = rng.random()
    if polite < 0.1 and not question.text.endswith("!"):
        bare = text.rstrip(_FINAL_MARKS)
        last = f"{bare}, please{text[len(bare) :]}"
        text = last if polite < 0.05 else f"Please {text[0].lower()}{text[1:]}"
    case = rng.random()
    if case < 0.35:
        return text.lower()
    return text[0].upper() + text[1:] if case < 0.7 else text


def about_nothing(rng: np.random.Generator) -> Question:
    """A question about a made-up word, so that the model learns to say that it does not know."""
    known = {country["name"].lower() for country in countries()}
    name = ""
    while not name or name in known:
        syllables = 2 + int(rng.random() * 2)
        name = "".join(pick("bdfgklmnprstvz", rng) + pick("aeiou", rng) for _ in range(syllables))
        name += pick(("", "", "n", "s", "r"), rng)
    forms = [form["question"] for form in _file()["about_countries"]]
    form = pick([*forms, "What is {name}?", "Who is {name}?", "Where is {name}?", "{name}"], rng)
    return Question(form.format(name=name.capitalize()), _file()["unknown"])
