"""How people may word the short questions that the embedded model learns by heart.

Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from sfumato.embedded_questions import Question, countries, questions_file

_FINAL_MARKS = "?!."
_Choice = TypeVar("_Choice")


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
    forms = [form["question"] for form in questions_file()["about_countries"]]
    form = pick([*forms, "What is {name}?", "Who is {name}?", "Where is {name}?", "{name}"], rng)
    return Question(form.format(name=name.capitalize()), questions_file()["unknown"])
