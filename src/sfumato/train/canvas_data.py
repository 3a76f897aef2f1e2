"""Canvases that the embedded model learns to complete or to mend: texts with holes, small JSON
objects, and replies that begin as a prediction.

A row is the product's own: a hole's is the template of `diffusion/constraints/filling.py`.  Knows
no noise, no loss and no network.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from sfumato.diffusion.constraints.filling import Closing, make_template
from sfumato.diffusion.constraints.hole import Hole, Part
from sfumato.embedded_questions import all_questions, countries
from sfumato.train import embedded_data, sudoku
from sfumato.train.canvas_rows import CanvasRow
from sfumato.train.decision_states import (
    ADJECTIVES,
    ITEMS,
    NAMES,
    NAMES_OF_TONES,
    STATUSES,
    THINGS,
    TONES,
    WORDS,
)
from sfumato.train.decisions_data import is_held_out
from sfumato.train.embedded_data import (
    FIRST_ASKED,
    Example,
    Message,
    Mixture,
    ask,
    pick,
    trained_sudoku,
    wording,
)
from sfumato.train.vocabulary import BOS, END_OF_TURN, EOS, encode_chat, encode_text

VALUES_SHARE = 0.15
"""Share of pinned names and holes for values among the rows with an object."""
SLIPS_SHARE = 0.3
"""Share of the rows with an object that begin with a letter too many, too few, or another one."""
PREDICTED_SUDOKU_SHARE = 0.8
RIGHT_SHARE = 0.25
"""Share of right texts among the predictions."""
MOST_IN_HOLE = 8
TWO_HOLES_SHARE = 0.25
WHOLE_WORDS_SHARE = 0.6
NEAR_SHARE = 0.4
"""Share of the ends of a hole for a name that are up to two characters off the name's own."""
ONE_HOLE_FROM = 32
"""Characters of a text that has one hole only: two might not fit a canvas."""
CLOSING = Closing(END_OF_TURN, EOS)
LONGEST = 63  # characters of an object: two canvases, with the end
MOST_NAMES = 3


class Shares(NamedTuple):
    """Shares of the canvases; answers to questions are the rest."""

    sudoku: float = 0.12
    fill: float = 0.34
    json: float = 0.24
    predicted: float = 0.04


SHARES = Shares()


def draw(rng: np.random.Generator, canvas: int, shares: Shares = SHARES) -> CanvasRow:
    """One canvas to train on; depends on the generator's state alone."""
    at = rng.random()
    for name, share in zip(shares._fields, shares, strict=True):
        at -= share
        if at < 0:
            return _row(name, rng, canvas)
    return _row("questions", rng, canvas)


def _row(kind: str, rng: np.random.Generator, canvas: int) -> CanvasRow:
    if kind == "predicted":
        return predicted_row(rng, canvas)
    if kind == "json":
        task = draw_json(rng)
        if rng.random() < VALUES_SHARE and (
            row := fill_row(values_as_holes(task, canvas, rng), canvas)
        ):
            return row
        slip = partial(changed, rng=rng) if rng.random() < SLIPS_SHARE else str
        return pick(json_rows(task, canvas, slip), rng)
    if kind == "fill":
        while True:
            if row := fill_row(draw_fill(rng), canvas):
                return row
    example = embedded_data.sample(rng, Mixture(float(kind == "sudoku"), FIRST_ASKED))
    prefix, target = pick(embedded_data.canvases(example, canvas), rng)
    return CanvasRow(kind, prefix, target, prompt=len(example.prompt_ids))


@dataclass(frozen=True)
class FillTask:
    """A text with holes of exact lengths, and the one text that fills them. `key` decides whether
    it is held out; messages: what it replies to, or None."""

    messages: tuple[Message, ...] | None
    parts: tuple[Part, ...]
    text: str
    key: str

    @property
    def length(self) -> int:
        """Tokens of the first hole."""
        return next(part.tokens or 0 for part in self.parts if isinstance(part, Hole))


def draw_fill(rng: np.random.Generator, held_out: bool = False) -> FillTask:
    """A text of the part that is trained on, or of the other one."""
    while True:
        task = pick(_TEXTS if held_out else _TRAINED_TEXTS, rng)(rng)
        if task is not None and is_held_out(task.key) == held_out:
            return task


def fill_row(task: FillTask, canvas: int) -> CanvasRow | None:
    """The product's canvas of the task; None where the text does not fit one canvas."""
    prompt = [BOS] if task.messages is None else encode_chat(task.messages)
    closing = None if task.messages is None else CLOSING
    template = make_template(
        task.parts, lambda text, _: encode_text(text), prompt, closing, lambda _: canvas
    )
    if template.warnings:
        return None
    form = template.form({})
    text = encode_text(task.text)[len(template.prefix) - len(prompt) :]
    target = [*text, *form.ids[len(text) :]]
    is_open = [False] * len(target)
    for hole in form.holes:
        is_open[hole] = [True] * (hole.stop - hole.start)
    return CanvasRow("fill", template.prefix, target, is_open, prompt=len(prompt))


Span = tuple[int, int]  # where in a text a hole starts and ends


def with_holes(text: str, holes: Sequence[Span]) -> tuple[Part, ...]:
    """The parts of a text whose `holes`, apart and in order, are holes of their lengths."""
    parts: list[Part] = []
    done = 0
    for start, end in holes:
        parts += [text[done:start], Hole(end - start)]
        done = end
    return tuple(part for part in [*parts, text[done:]] if part)


def _span(text: str, rng: np.random.Generator, first: int = 0) -> Span | None:
    """Some of the text from `first` on: a word, or any characters."""
    if rng.random() < WHOLE_WORDS_SHARE:
        ends = [i for i in range(first, len(text) + 1) if i == len(text) or not text[i].isalnum()]
        starts = [first, *[end + 1 for end in ends]]
        words = [(a, b) for a, b in zip(starts, ends, strict=False) if 0 < b - a <= MOST_IN_HOLE]
        return pick(words, rng) if words else None
    if first >= len(text):
        return None
    start = first + int(rng.random() * (len(text) - first))
    return start, min(len(text), start + 1 + int(rng.random() * MOST_IN_HOLE))


def _holes(text: str, rng: np.random.Generator) -> list[Span]:
    """One hole or two, at least one character apart."""
    one = _span(text, rng)
    if one is None:
        return []
    is_short = len(text) < ONE_HOLE_FROM
    other = _span(text, rng, one[1] + 1) if is_short and rng.random() < TWO_HOLES_SHARE else None
    return [one] if other is None else [one, other]


def _task(
    messages: Sequence[Message] | None, text: str, holes: Sequence[Span], key: str | None = None
) -> FillTask | None:
    if not holes:
        return None
    parts = with_holes(text, holes)
    if key is None:
        key = "".join(part if isinstance(part, str) else f"{{{part.tokens}}}" for part in parts)
    return FillTask(None if messages is None else tuple(messages), parts, text, key)


def _answers(rng: np.random.Generator) -> FillTask | None:
    """An answer to a question that the model knows."""
    question = pick(all_questions(), rng)
    return _task(ask(wording(question, rng)), question.answer, _holes(question.answer, rng))


@cache
def _facts() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Sentences that stand by themselves, each with its names in their order."""
    names = [(each["name"], each["capital"]) for each in countries()]
    return tuple(
        fact
        for name, capital in names
        for fact in (
            (f"The capital of {name} is {capital}.", (name, capital)),
            (f"{capital} is the capital of {name}.", (capital, name)),
        )
    )


def _of_facts(rng: np.random.Generator) -> FillTask | None:
    text, _ = pick(_facts(), rng)
    return _of_fact(text, _span(text, rng))


def _of_names(rng: np.random.Generator) -> FillTask | None:
    """A fact whose hole begins and ends at or near a name."""
    text, names = pick(_facts(), rng)
    place = int(rng.random() * len(names))
    start = text.index(names[place]) if place == 0 else text.rindex(names[place])
    near = rng.integers(-2, 3, 2) * (rng.random(2) < NEAR_SHARE)
    end = min(len(text), start + len(names[place]) + int(near[1]))
    start = max(0, start + int(near[0]))
    return _of_fact(text, (start, end) if 0 < end - start <= MOST_IN_HOLE else None)


def _of_fact(text: str, span: Span | None) -> FillTask | None:
    """The fact with that hole; None where another fact fits too."""
    if span is None or sum(fits(other, text, span) for other, _ in _facts()) > 1:
        return None
    return _task(None, text, [span])


def fits(other: str, text: str, span: Span) -> bool:
    """Whether the other text is this one with its hole filled in some length."""
    before, after = text[: span[0]], text[span[1] :]
    is_longer = len(other) > len(before) + len(after)
    return other.startswith(before) and other.endswith(after) and is_longer


_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September")
_LISTS = (_DAYS, _MONTHS, tuple(string.ascii_lowercase), tuple(map(str, range(1, 31))))


def _sequences(rng: np.random.Generator) -> FillTask | None:
    """A part of a known list, in its order or backwards; what is left of it shows which."""
    known = pick(_LISTS, rng)
    count = 3 + int(rng.random() * (5 if len(known) > 9 else 2))
    start = int(rng.random() * (len(known) - count + 1))
    some = known[start : start + count]
    if some[0].isdigit() and rng.random() < 0.3:
        some = some[::-1]
    between = pick((" ", ", "), rng)
    place = 1 + int(rng.random() * (count - 2))
    at = len(between.join(some[:place])) + len(between)
    return _task(None, between.join(some), [(at, at + len(some[place]))])


_RESTATED = (
    ("{name} ordered {n} {item}.", "{n} {item} for {name}."),
    ("{n} {item} for {name}.", "{name} gets {n} {item}."),
    ("{name} has {n} {item}.", "{n} {item} are {name}'s."),
    ("{name} wants {n} {item}.", "{name} wants {n} {item}."),
)


def _restated(rng: np.random.Generator) -> FillTask | None:
    """A statement said again; held out by the statement."""
    first, again = pick(_RESTATED, rng)
    facts = {"name": pick(NAMES, rng), "item": pick(ITEMS, rng), "n": pick(range(2, 10), rng)}
    text, statement = again.format_map(facts), first.format_map(facts)
    return _task(ask(statement), text, _holes(text, rng), statement)


def _grids(rng: np.random.Generator) -> FillTask:
    """A Sudoku whose blanks are holes, with the puzzle as the prompt or by itself. The 28 grids
    that are held out are never drawn here: see `sudoku_task`."""
    task = sudoku_task(*trained_sudoku((8, 9, 10, 11, 12), rng))
    return task if rng.random() < 0.7 else FillTask(None, task.parts, task.text, task.key)


def sudoku_task(cells: sudoku.Cells, solved: str) -> FillTask:
    """The blanks of a puzzle as holes, with the puzzle as the prompt too."""
    parts = tuple(Hole(1) if cell == "." else cell for cell in sudoku.to_text(cells))
    return FillTask(tuple(ask(sudoku.prompt(cells))), parts, solved, "")


_TEXTS: tuple[Callable[[np.random.Generator], FillTask | None], ...] = (
    *2 * (_answers,),
    _of_facts,
    _sequences,
    _restated,
    _grids,
)
# A fact of sixty is met in every wording; recalling its names takes the most steps to learn.
_TRAINED_TEXTS = (*_TEXTS, _answers, _of_facts, *4 * (_of_names,))


Object = dict[str, Any]
_PEOPLE = (*NAMES, "Ann", "Tom", "Mia", "Leo", "Nina", "Paul", "Rosa", "Sam")
_GOODS = (*ITEMS, "pears", "eggs", "tents", "bikes", "forks", "rings")
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


def draw_json(rng: np.random.Generator, held_out: bool = False) -> JsonTask:
    """A task of the part that is trained on, or of the other one."""
    while True:
        statement, value = pick(_OBJECTS if held_out else _TRAINED_OBJECTS, rng)(rng)
        names, is_fact = list(value), "country" in value
        listed = is_fact or rng.random() < 0.5
        if listed:
            count = 1 + int(rng.random() * min(MOST_NAMES, len(names)))
            names = [names[i] for i in sorted(rng.permutation(len(names))[:count])]
        if is_fact and rng.random() < 0.6:
            names = names[:2]
            request = pick(_ASKED, rng).format(statement, " and ".join(names))
        else:
            forms = _LISTED if listed else _USUAL
            request = pick(forms, rng).format(statement, ", ".join(names))
        task = JsonTask(request, {name: value[name] for name in names}, _schema(value, names))
        # A statement is held out in all its wordings; a fact, whose statement is a name, in one.
        key = request if is_fact else statement
        if len(task.text) <= LONGEST and is_held_out(key) == held_out:
            return task


def json_rows(task: JsonTask, canvas: int, slip: Callable[[str], str] = str) -> list[CanvasRow]:
    """A row for each canvas of the object. slip: what the canvas begins as, of its text."""
    prompt = encode_chat(ask(task.request))
    example, rows = Example(prompt, [*encode_text(task.text), END_OF_TURN]), []
    for prefix, target in embedded_data.canvases(example, canvas):
        at = len(prefix) - len(prompt)
        text, own = slip(task.text[at : at + canvas]), task.text[at : at + canvas]
        moves_end = text != own and END_OF_TURN in target
        rest = [END_OF_TURN] if moves_end else target[len(text) :]
        start = [*encode_text(text), *rest, *[EOS] * canvas][:canvas]
        rows.append(CanvasRow("json", prefix, target, start=start, prompt=len(prompt)))
    return rows


def values_as_holes(task: JsonTask, canvas: int, rng: np.random.Generator) -> FillTask:
    """The object as a text whose values are holes, as a grammar pins what it forces; of an object
    that is longer than a canvas, one value."""
    text, holes, at = task.text, [], 0
    for name, value in task.value.items():
        start = text.index(f'"{name}": ', at) + len(name) + 4
        at = start + len(json.dumps(value))
        inner = isinstance(value, str)
        holes.append((start + inner, at - inner))
    parts = with_holes(text, holes if len(text) < canvas else [pick(holes, rng)])
    return FillTask(tuple(ask(task.request)), parts, text, task.request)


_USUAL = ("{0} As JSON.", "{0}\nas JSON", "JSON: {0}", "{0}")
_LISTED = ("{0} As JSON: {1}.", "{0}\nJSON keys: {1}", "JSON with {1}: {0}")
_ASKED = (
    "Name the {1} of {0} as JSON",
    "What is the {1} of {0}? As JSON.",
    "The {1} of {0} as JSON.",
    "JSON: the {1} of {0}",
    "{1} of {0}, JSON",
)
_ENUMS = {"status": [*STATUSES], "tone": [*NAMES_OF_TONES]}
_TYPES = {bool: "boolean", int: "integer", str: "string"}


def _schema(value: Object, names: Sequence[str]) -> Object:
    properties: Object = {}
    for name in names:
        own = value[name]
        if name in _ENUMS:
            properties[name] = {"enum": _ENUMS[name]}
        elif isinstance(own, list):
            properties[name] = {"type": "array", "items": {"type": _TYPES[type(own[0])]}}
        else:
            properties[name] = {"type": _TYPES[type(own)]}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_Drawn = tuple[str, Object]
"""A statement, and all of an object's values."""


@dataclass(frozen=True)
class _Stated:
    """Statements of one of these forms, whose values are drawn each for itself, in this order."""

    forms: tuple[str, ...]
    values: Mapping[str, Sequence[str | int]]

    def __call__(self, rng: np.random.Generator) -> _Drawn:
        value = {name: pick(choices, rng) for name, choices in self.values.items()}
        return pick(self.forms, rng).format_map(value), value


def _reviews(rng: np.random.Generator) -> _Drawn:
    level = int(rng.random() * len(ADJECTIVES))
    thing, name, word = pick(THINGS, rng), pick(_PEOPLE, rng), pick(ADJECTIVES[level], rng)
    forms = ("{0}: the {1} was {2}.", "{0} says that the {1} is {2}.")
    return pick(forms, rng).format(name, thing, word), {"thing": thing, "tone": TONES[level]}


def _switches(rng: np.random.Generator) -> _Drawn:
    thing, yes, no = pick(_STATES, rng)
    house, is_so = pick(range(1, 100), rng), bool(rng.random() < 0.5)
    statement = f"The {thing} of house {house} is {yes if is_so else no}."
    return statement, {"house": house, yes: is_so}


def _words(rng: np.random.Generator) -> _Drawn:
    words = [WORDS[i] for i in rng.permutation(len(WORDS))[: 1 + int(rng.random() * 3)]]
    return f"Words: {', '.join(words)}.", {"words": words}


def _numbers(rng: np.random.Generator) -> _Drawn:
    numbers = [int(n) for n in rng.integers(1, 100, 1 + int(rng.random() * 3))]
    return f"Numbers: {', '.join(map(str, numbers))}.", {"numbers": numbers}


def _countries(rng: np.random.Generator) -> _Drawn:
    """A country, of which the request lists what it asks for."""
    country = pick(countries(), rng)
    value = {"country": country["name"].removeprefix("the ")}
    value |= {name: country[name] for name in ("capital", "continent") if name in country}
    return country["name"], value


_ORDERS = _Stated(
    (
        "{count} {item} for {name}",
        "{name} ordered {count} {item}.",
        "{name} wants {count} {item}.",
        "{count} {item} are for {name}",
    ),
    {"name": _PEOPLE, "item": _GOODS, "count": range(1, 21)},
)
_STATED = _Stated(
    (
        "Order {order} for {name} is {status}.",
        "{name}'s order {order} is {status}.",
        "Order {order}: {name}, {status}.",
    ),
    {"order": range(10, 100), "status": STATUSES, "name": _PEOPLE},
)
_PERSONS = _Stated(
    (
        "{name} is {age} and lives in {city}.",
        "{name}, {age}, from {city}",
        "{name} ({age}) lives in {city}.",
    ),
    {"name": _PEOPLE, "age": range(20, 90), "city": [each["capital"] for each in countries()]},
)
_OBJECTS: tuple[Callable[[np.random.Generator], _Drawn], ...] = (
    *2 * (_ORDERS,),
    _STATED,
    _PERSONS,
    _reviews,
    _switches,
    _words,
    _numbers,
    _countries,
)
_TRAINED_OBJECTS = (*_OBJECTS, *3 * (_countries,))  # recalling takes more steps than copying


def predicted_row(rng: np.random.Generator, canvas: int) -> CanvasRow:
    """The first canvas of a reply that begins as a prediction, right or wrong."""
    if rng.random() < PREDICTED_SUDOKU_SHARE:
        cells, answer = trained_sudoku((8, 9, 10, *2 * (11, 12)), rng)
        request = sudoku.prompt(cells)
        given = sudoku.to_text(sudoku.all_grids()[pick(sudoku.split()[0], rng)])
    else:
        question = pick(all_questions(), rng)
        request, answer = wording(question, rng), question.answer
        other = pick(all_questions(), rng).answer
        given = other if rng.random() < 0.5 else changed(answer, rng)
    if rng.random() < RIGHT_SHARE:
        given = answer
    target, start = (
        [*encode_text(text), END_OF_TURN, *[EOS] * canvas][:canvas] for text in (answer, given)
    )
    return CanvasRow("predicted", encode_chat(ask(request)), target, start=start)


def changed(text: str, rng: np.random.Generator) -> str:
    """The text with up to two of its letters left out, put in or exchanged at one place."""
    at, count = int(rng.random() * len(text)), 1 + int(rng.random() * 2)
    letters = "".join(pick(string.ascii_lowercase, rng) for _ in range(count))
    kind = int(rng.random() * 3)
    if kind == 0:
        return text[:at] + text[at + count :]
    return text[:at] + letters + text[at if kind == 1 else at + count :]
