"""Small JSON objects that the embedded model learns to write: the request, the object and its
schema.

What an object holds follows from the request: a statement, or a fact that the model knows.  Knows
no noise, no loss and no network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sfumato.embedded_questions import countries
from sfumato.train.canvas_rows import CanvasRow
from sfumato.train.decision_states import ADJECTIVES, ITEMS, NAMES, STATUSES, THINGS, WORDS
from sfumato.train.decisions_data import is_held_out
from sfumato.train.fill_data import FillTask, with_holes
from sfumato.train.questions import pick
from sfumato.train.vocabulary import END_OF_TURN, EOS, encode_chat, encode_text

Object = dict[str, Any]

LONGEST = 63  # characters of an object: two canvases, with the end
MOST_NAMES = 3
_PEOPLE = (*NAMES, "Ann", "Tom", "Mia", "Leo", "Nina", "Paul", "Rosa", "Sam")
_GOODS = (*ITEMS, "pears", "eggs", "tents", "bikes", "forks", "rings")
_TONES = ("negative", "negative", "neutral", "positive", "positive")
_STATES = (("door", "open", "closed"), ("shop", "open", "closed"), ("lamp", "on", "off"))


@dataclass(frozen=True)
class JsonTask:
    """A request that ends with the user, the object that answers it, and its schema: names in
    their order, all required. The order is always that of the family's names."""

    request: str
    value: Object
    schema: Object

    @property
    def text(self) -> str:
        return json.dumps(self.value)


def draw(rng: np.random.Generator, held_out: bool = False) -> JsonTask:
    """A task of the part that is trained on, or of the other one."""
    while True:
        statement, value, schemas, named = pick(_FAMILIES if held_out else _TRAINED, rng)(rng)
        names = list(value)
        listed = named or rng.random() < 0.5
        if listed:
            count = 1 + int(rng.random() * min(MOST_NAMES, len(names)))
            names = [names[i] for i in sorted(rng.permutation(len(names))[:count])]
        if named and rng.random() < 0.6:
            names = names[:2]
            request = pick(_ASKED, rng).format(statement, " and ".join(names))
        else:
            request = _request(statement, names if listed else None, rng)
        chosen = {name: value[name] for name in names}
        schema = _schema({name: schemas[name] for name in names})
        task = JsonTask(request, chosen, schema)
        # A statement is held out in all its wordings; a fact, whose statement is a name, in one.
        key = request if named else statement
        if len(task.text) <= LONGEST and is_held_out(key) == held_out:
            return task


def rows(task: JsonTask, canvas: int, slip: Callable[[str], str] = str) -> list[CanvasRow]:
    """A row for each canvas of the object. slip: what the canvas begins as, of its text."""
    prompt = encode_chat([{"role": "user", "content": task.request}])
    ids, filler = [*encode_text(task.text), END_OF_TURN], [EOS] * canvas
    ids += [EOS] * (-len(ids) % canvas)
    rows = []
    for at in range(0, len(ids), canvas):
        text = slip(task.text[at : at + canvas])
        start = [*encode_text(text), *ids[at + len(text) : at + canvas]]
        if text != task.text[at : at + canvas] and at + canvas >= len(ids):
            start = [*encode_text(text), END_OF_TURN, *filler]
        start = [*start, *filler][:canvas]
        target = ids[at : at + canvas]
        rows.append(CanvasRow("json", prompt + ids[:at], target, start=start, prompt=len(prompt)))
    return rows


def values_as_holes(task: JsonTask, canvas: int, rng: np.random.Generator) -> FillTask:
    """The object as a text whose values are holes, as a grammar pins what it forces; of an object
    that is longer than a canvas, one value."""
    text, spans, at = task.text, [], 0
    for name, value in task.value.items():
        start = text.index(f'"{name}": ', at) + len(name) + 4
        at = start + len(json.dumps(value))
        inner = isinstance(value, str)
        spans.append((start + inner, at - inner))
    parts = with_holes(text, spans if len(text) < canvas else [pick(spans, rng)])
    return FillTask(({"role": "user", "content": task.request},), parts, text, task.request)


def _request(statement: str, names: Sequence[str] | None, rng: np.random.Generator) -> str:
    """A statement with what is asked for: an object with these names, or the usual one."""
    if names is None:
        form = pick(("{0} As JSON.", "{0}\nas JSON", "JSON: {0}", "{0}"), rng)
        return form.format(statement)
    form = pick(("{0} As JSON: {1}.", "{0}\nJSON keys: {1}", "JSON with {1}: {0}"), rng)
    return form.format(statement, ", ".join(names))


def _schema(properties: Object) -> Object:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT, _INTEGER, _BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_Drawn = tuple[str, Object, Object, bool]
"""A statement, all of an object's values and their schemas, and whether names must be listed."""


def _orders(rng: np.random.Generator) -> _Drawn:
    name, item, count = pick(_PEOPLE, rng), pick(_GOODS, rng), 1 + int(rng.random() * 20)
    forms = ("{2} {1} for {0}", "{0} ordered {2} {1}.", "{0} wants {2} {1}.", "{2} {1} are for {0}")
    statement = pick(forms, rng).format(name, item, count)
    value = {"name": name, "item": item, "count": count}
    return statement, value, {"name": _TEXT, "item": _TEXT, "count": _INTEGER}, False


def _statuses(rng: np.random.Generator) -> _Drawn:
    number, status, name = 10 + int(rng.random() * 90), pick(STATUSES, rng), pick(_PEOPLE, rng)
    forms = ("Order {0} for {1} is {2}.", "{1}'s order {0} is {2}.", "Order {0}: {1}, {2}.")
    statement = pick(forms, rng).format(number, name, status)
    value = {"order": number, "status": status, "name": name}
    schemas = {"order": _INTEGER, "status": {"enum": list(STATUSES)}, "name": _TEXT}
    return statement, value, schemas, False


def _persons(rng: np.random.Generator) -> _Drawn:
    name, age, city = pick(_PEOPLE, rng), 20 + int(rng.random() * 70), pick(countries(), rng)
    forms = ("{0} is {1} and lives in {2}.", "{0}, {1}, from {2}", "{0} ({1}) lives in {2}.")
    statement = pick(forms, rng).format(name, age, city["capital"])
    value = {"name": name, "age": age, "city": city["capital"]}
    return statement, value, {"name": _TEXT, "age": _INTEGER, "city": _TEXT}, False


def _reviews(rng: np.random.Generator) -> _Drawn:
    level = int(rng.random() * len(ADJECTIVES))
    thing, name, word = pick(THINGS, rng), pick(_PEOPLE, rng), pick(ADJECTIVES[level], rng)
    forms = ("{0}: the {1} was {2}.", "{0} says that the {1} is {2}.")
    statement = pick(forms, rng).format(name, thing, word)
    value = {"thing": thing, "tone": _TONES[level]}
    enum = {"enum": ["positive", "neutral", "negative"]}
    return statement, value, {"thing": _TEXT, "tone": enum}, False


def _switches(rng: np.random.Generator) -> _Drawn:
    thing, yes, no = pick(_STATES, rng)
    room = 1 + int(rng.random() * 99)
    is_so = bool(rng.random() < 0.5)
    statement = f"The {thing} of house {room} is {yes if is_so else no}."
    value = {"house": room, yes: is_so}
    return statement, value, {"house": _INTEGER, yes: _BOOLEAN}, False


def _words(rng: np.random.Generator) -> _Drawn:
    words = [WORDS[i] for i in rng.permutation(len(WORDS))[: 1 + int(rng.random() * 3)]]
    schema = {"type": "array", "items": _TEXT}
    return f"Words: {', '.join(words)}.", {"words": words}, {"words": schema}, False


def _numbers(rng: np.random.Generator) -> _Drawn:
    numbers = [int(n) for n in rng.integers(1, 100, 1 + int(rng.random() * 3))]
    schema = {"type": "array", "items": _INTEGER}
    shown = ", ".join(map(str, numbers))
    return f"Numbers: {shown}.", {"numbers": numbers}, {"numbers": schema}, False


def _facts(rng: np.random.Generator) -> _Drawn:
    """Of a country: what the request lists."""
    country = pick(countries(), rng)
    value = {"country": country["name"].removeprefix("the ")} | {
        name: country[name] for name in ("capital", "continent") if name in country
    }
    return country["name"], value, dict.fromkeys(value, _TEXT), True


_ASKED = (
    "Name the {1} of {0} as JSON",
    "What is the {1} of {0}? As JSON.",
    "The {1} of {0} as JSON.",
    "JSON: the {1} of {0}",
    "{1} of {0}, JSON",
)


_FAMILIES: tuple[Callable[[np.random.Generator], _Drawn], ...] = (
    _orders,
    _orders,
    _statuses,
    _persons,
    _reviews,
    _switches,
    _words,
    _numbers,
    _facts,
)
_TRAINED = (*_FAMILIES, _facts, _facts, _facts)  # recalling takes more steps than copying
