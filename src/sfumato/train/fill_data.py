"""Texts with holes that the embedded model learns to fill: answers, facts, counts, restatements and
Sudokus.

A row is the product's own: the template of `diffusion/constraints/fill_plan.py`.  Knows no noise,
no loss and no network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from sfumato.diffusion.constraints.fill_plan import Closing, make_template
from sfumato.diffusion.constraints.hole import Hole, Part
from sfumato.embedded_questions import Question, all_questions, countries
from sfumato.train import sudoku
from sfumato.train.canvas_rows import CanvasRow
from sfumato.train.decision_states import ITEMS, NAMES
from sfumato.train.decisions_data import is_held_out
from sfumato.train.questions import pick, wording
from sfumato.train.vocabulary import BOS, END_OF_TURN, EOS, encode_chat, encode_text

Message = dict[str, str]

MOST_IN_HOLE = 8
TWO_HOLES_SHARE = 0.25
WHOLE_WORDS_SHARE = 0.6
NEAR_SHARE = 0.4
"""Of the ends of a hole for a name, those that are up to two characters off the name's own."""
ONE_HOLE_FROM = 32
"""Characters of a text that has one hole only: two might not fit a canvas."""
CLOSING = Closing(END_OF_TURN, EOS)


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


def draw(rng: np.random.Generator, held_out: bool = False) -> FillTask:
    """A task of the part that is trained on, or of the other one."""
    while True:
        task = pick(_FAMILIES if held_out else _TRAINED, rng)(rng)
        if task is not None and is_held_out(task.key) == held_out:
            return task


def row(task: FillTask, canvas: int) -> CanvasRow | None:
    """The product's canvas of the task; None where the text does not fit one canvas."""
    prompt = [BOS] if task.messages is None else encode_chat(task.messages)
    closing = None if task.messages is None else CLOSING
    template = make_template(task.parts, lambda text, _: encode_text(text), prompt, closing, canvas)
    if template.warnings:
        return None
    form = template.form({})
    text = encode_text(task.text)[len(template.prefix) - len(prompt) :]
    target = [*text, *form.ids[len(text) :]]
    is_open = [False] * len(target)
    for hole in form.holes:
        is_open[hole] = [True] * (hole.stop - hole.start)
    return CanvasRow("fill", template.prefix, target, is_open, prompt=len(prompt))


def with_holes(text: str, spans: list[tuple[int, int]]) -> tuple[Part, ...]:
    """The parts of a text whose `spans`, apart and in order, are holes of their lengths."""
    parts: list[Part] = []
    done = 0
    for start, end in spans:
        parts += [text[done:start], Hole(end - start)]
        done = end
    return tuple(part for part in [*parts, text[done:]] if part)


def _span(text: str, rng: np.random.Generator, first: int = 0) -> tuple[int, int] | None:
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


def _spans(text: str, rng: np.random.Generator) -> list[tuple[int, int]]:
    """One hole or two, at least one character apart."""
    one = _span(text, rng)
    if one is None:
        return []
    is_short = len(text) < ONE_HOLE_FROM
    other = _span(text, rng, one[1] + 1) if is_short and rng.random() < TWO_HOLES_SHARE else None
    return [one] if other is None else [one, other]


def _task(
    messages: tuple[Message, ...] | None,
    text: str,
    spans: list[tuple[int, int]],
    key: str | None = None,
) -> FillTask | None:
    if not spans:
        return None
    parts = with_holes(text, spans)
    shown = "".join(part if isinstance(part, str) else f"{{{part.tokens}}}" for part in parts)
    return FillTask(messages, parts, text, shown if key is None else key)


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _answers(rng: np.random.Generator) -> FillTask | None:
    """An answer to a question that the model knows."""
    question: Question = pick(all_questions(), rng)
    return _task(_user(wording(question, rng)), question.answer, _spans(question.answer, rng))


@cache
def _facts() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Sentences that stand by themselves, each with its names in their order."""
    facts = []
    for each in countries():
        name, capital = each["name"], each["capital"]
        facts += [
            (f"The capital of {name} is {capital}.", (name, capital)),
            (f"{capital} is the capital of {name}.", (capital, name)),
        ]
    return tuple(facts)


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


def _of_fact(text: str, span: tuple[int, int] | None) -> FillTask | None:
    """The fact with that hole; None where another fact fits too."""
    if span is None or sum(_fits(other, text, span) for other, _ in _facts()) > 1:
        return None
    return _task(None, text, [span])


def _fits(other: str, text: str, span: tuple[int, int]) -> bool:
    """Whether the other text is this one with its hole filled in some length."""
    start, end = span
    after = text[end:]
    return (
        other.startswith(text[:start]) and other.endswith(after) and len(other) > start + len(after)
    )


_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September")
_LISTS = (_DAYS, _MONTHS, tuple("abcdefghijklmnopqrstuvwxyz"), tuple(map(str, range(1, 31))))


def _sequences(rng: np.random.Generator) -> FillTask | None:
    """A part of a known list, in its order or backwards; what is left of it shows which."""
    known = pick(_LISTS, rng)
    count = 3 + int(rng.random() * (5 if len(known) > 9 else 2))
    start = int(rng.random() * (len(known) - count + 1))
    some = known[start : start + count]
    if some[0].isdigit() and rng.random() < 0.3:
        some = some[::-1]
    between = pick((" ", ", "), rng)
    text = between.join(some)
    place = 1 + int(rng.random() * (count - 2))
    at = len(between.join(some[:place])) + len(between)
    return _task(None, text, [(at, at + len(some[place]))])


_RESTATED = (
    ("{name} ordered {n} {item}.", "{n} {item} for {name}."),
    ("{n} {item} for {name}.", "{name} gets {n} {item}."),
    ("{name} has {n} {item}.", "{n} {item} are {name}'s."),
    ("{name} wants {n} {item}.", "{name} wants {n} {item}."),
)


def _restated(rng: np.random.Generator) -> FillTask | None:
    """A statement said again; held out by the statement."""
    first, again = pick(_RESTATED, rng)
    facts = {
        "name": pick(NAMES, rng),
        "item": pick(ITEMS, rng),
        "n": 2 + int(rng.random() * 8),
    }
    text = again.format_map(facts)
    statement = first.format_map(facts)
    return _task(_user(statement), text, _spans(text, rng), statement)


def _grids(rng: np.random.Generator) -> FillTask:
    """A Sudoku whose blanks are holes, with the puzzle as the prompt or by itself. The 28 grids
    that are held out are never drawn here: see `sudoku_task`."""
    grid = pick(sudoku.split()[0], rng)
    cells = sudoku.puzzle(grid, pick((8, 9, 10, 11, 12), rng), rng)
    task = sudoku_task(cells, sudoku.to_text(sudoku.all_grids()[grid]))
    return task if rng.random() < 0.7 else FillTask(None, task.parts, task.text, task.key)


def sudoku_task(cells: sudoku.Cells, solved: str) -> FillTask:
    """The blanks of a puzzle as holes, with the puzzle as the prompt too."""
    puzzle = sudoku.to_text(cells)
    parts = tuple(Hole(1) if cell == "." else cell for cell in puzzle)
    return FillTask(_user(f"sudoku\n{puzzle}"), parts, solved, "")


_Family = Callable[[np.random.Generator], FillTask | None]
_FAMILIES: tuple[_Family, ...] = (_answers, _answers, _of_facts, _sequences, _restated, _grids)
# A fact of sixty is met in every wording; recalling its names takes the most steps to learn.
_TRAINED = (*_FAMILIES, _answers, _of_facts, _of_names, _of_names, _of_names, _of_names)
