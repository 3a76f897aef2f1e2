"""The short questions that the embedded model has learned by heart, and their answers.

The texts are in embedded/questions.toml. There is no held-out part: this is recall, not
understanding. Knows no tokens and no network.
"""

from __future__ import annotations

import re
import string
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

MOST_TOKENS = 256
"""Tokens at most of a packaged model's reply to an HTTP request that names no limit: no answer that
it has learned is as long, and a text that a schema leaves free would end nowhere else."""

_ASKS_ON = re.compile(r"and\b|.*\?$", re.IGNORECASE)
_MOST_WORDS = 5  # of a question that needs an earlier one
_LONGEST = 200  # characters of a text that is searched


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


Messages = Sequence[Mapping[str, Any]]
_Heard = tuple[dict[str, str] | None, dict[str, Any] | None]  # a country, and a form of questions


def rewritten(messages: Messages) -> tuple[Messages, tuple[str, ...]]:
    """Makes of a conversation what the packaged models read of it, and what a reply says of that.

    Messages before the first question stay, and the last EARLIER_TURNS turns before the last one. A
    short question that needs those before it becomes the whole one that it asks: after "What is the
    capital of France?", "And of Japan?" is "What is the capital of Japan?". messages: as
    `sfumato.text.messages.check_messages` lets them pass."""
    result, note = list(messages), ""
    questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
    heard: deque[_Heard] = deque(maxlen=EARLIER_TURNS)  # of the questions before, the newest first
    for i in questions:
        text, note = _text(messages[i].get("content")), ""
        named, named_form = _mentioned(text) if len(text) <= _LONGEST else (None, None)
        if (named is None) != (named_form is None) and _asks_on(text):
            country = next(filter(None, (named, *(before for before, _ in heard))), None)
            form = next(filter(None, (named_form, *(before for _, before in heard))), None)
            if meant := _known_question(country, form):
                result[i] = {**messages[i], "content": meant}
                note = f'the question was read as "{meant}"'
                named, named_form = country, form
        heard.appendleft((named, named_form))
    if len(questions) > EARLIER_TURNS + 1:
        del result[questions[0] : questions[-EARLIER_TURNS - 1]]
    return result, (note,) if note else ()


def _text(content: Any) -> str:
    """The text of a message; empty where it has other parts."""
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in content or ()]
    return "" if None in parts else "".join(parts)


def _asks_on(text: str) -> bool:
    """Whether a text may be a question that needs an earlier one."""
    is_short = len(text.split()) <= _MOST_WORDS
    return is_short and bool(_ASKS_ON.match(text.strip())) and _plain(text) not in _known()


def _known_question(country: dict[str, str] | None, form: dict[str, Any] | None) -> str | None:
    """The question of that form about a country, where it is one of `all_questions`."""
    if country is None or form is None:
        return None
    question: str = form["question"].format_map(country)
    return question if _plain(question) in _known() else None


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

    country, form = (pattern.search(text) for pattern in _words())
    return (
        None if country is None else _countries_by_name()[country[0].lower()],
        None if form is None else _forms_by_field()[form[0].lower()],
    )


@cache
def _countries_by_name() -> dict[str, dict[str, str]]:
    return {each["name"].removeprefix("the ").lower(): each for each in countries()}


@cache
def _forms_by_field() -> dict[str, dict[str, Any]]:
    forms = questions_file()["about_countries"]
    return {field: form for form in reversed(forms) for field in _fields(form)}


@cache
def _words() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns of the names of countries, and of what is asked of them."""

    def one_of(words: Iterable[str]) -> re.Pattern[str]:
        longest_first = sorted(words, key=len, reverse=True)
        return re.compile(rf"\b(?:{'|'.join(map(re.escape, longest_first))})\b", re.I | re.A)

    return one_of(_countries_by_name()), one_of(_forms_by_field())


def _fields(form: dict[str, Any]) -> set[str]:
    """The fields of a country that an answer has, besides the name: "capital"."""
    return {name for _, name, _, _ in string.Formatter().parse(form["answer"]) if name} - {"name"}
