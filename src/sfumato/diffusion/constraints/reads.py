"""The reads of a decision: which prompts follow its state, and which canvases are read behind them.

A question is read by itself, or all of them together, as lines of one canvas.  Each order of the
options is a prompt of its own.  The canvases depend on the labels alone, so that questions with the
same labels share them: a thousand questions of 255 options would else keep a hundred thousand
tuples.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sfumato.diffusion.constraints.answers import Sample
from sfumato.diffusion.constraints.decision_settings import DecisionSettings
from sfumato.diffusion.constraints.labels import Label, Line
from sfumato.diffusion.constraints.listing import Listing, listing_orders, means_itself
from sfumato.diffusion.constraints.question_checks import naming, where_of
from sfumato.diffusion.constraints.questions import Question
from sfumato.diffusion.constraints.template import NOISE, ReadCanvas, ReadTemplate
from sfumato.diffusion.constraints.wording import joint_line, joint_text, question_text
from sfumato.refused import Refused


@dataclass(frozen=True)
class SlotReading:
    """probabilities: of the labels, which sum to 1; label_mass: theirs together among all tokens;
    is_label: whether the most probable of all tokens is one of them; both None where only the
    labels were scored."""

    probabilities: tuple[float, ...]
    label_mass: float | None = None
    is_label: bool | None = None

    @property
    def mass(self) -> float:
        assert self.label_mass is not None
        return self.label_mass


def slot_reading(
    logits: Sequence[float], labels: Sequence[int], vocabulary: tuple[float, int] | None
) -> SlotReading:
    """Of a slot's labels and their logits; vocabulary: the labels' share of it, and the most
    probable of all tokens, where these are known."""
    if vocabulary is None:
        return SlotReading(_softmax(logits))
    mass, argmax = vocabulary
    # Sums of float32 numbers: they may round to a little over 1.
    return SlotReading(_softmax(logits), min(1.0, mass), argmax in labels)


def _softmax(logits: Sequence[float]) -> tuple[float, ...]:
    peak = max(logits)
    masses = [math.exp(logit - peak) for logit in logits]
    total = math.fsum(masses)
    return tuple(mass / total for mass in masses)


Options = tuple[tuple[int, int | None], ...]
"""Where each option is on the canvases, see `Target.options`."""


class LabelCanvases:
    """The orders of a plan's questions, and their canvases; each is made once."""

    def __init__(self, template: ReadTemplate, orders: int) -> None:
        """orders: how many are wanted of each question."""
        self._template, self._orders = template, orders
        self._listings: dict[tuple[type[Question], int, bool], list[Listing]] = {}
        self._canvases: dict[Listing, tuple[tuple[ReadCanvas, ...], Options]] = {}

    def listings(self, question: Question, labels: tuple[Label, ...]) -> list[Listing]:
        """labels: those that its line has for its kind and number of options."""
        key = type(question), len(labels), means_itself(question, labels)
        if key not in self._listings:
            self._listings[key] = listing_orders(question, labels, self._orders)
        return self._listings[key]

    def canvases(self, listing: Listing) -> tuple[tuple[ReadCanvas, ...], Options]:
        """Of one of these orders. Raises ValueError where the model's canvas is too short."""
        if listing not in self._canvases:
            self._canvases[listing] = _canvases(self._template, listing.labels)
        return self._canvases[listing]


def _canvases(
    template: ReadTemplate, labels: Sequence[Label]
) -> tuple[tuple[ReadCanvas, ...], Options]:
    if all(len(label.ids) == 1 for label in labels):
        ids = [label.ids[0] for label in labels]
        canvas = _fitting(template.canvas([NOISE], [0], [ids]), template)
        return (canvas,), tuple((number, None) for number in range(len(labels)))
    firsts = list(dict.fromkeys(label.ids[0] for label in labels))
    seconds: list[list[int]] = [
        [label.ids[1] for label in labels if label.ids[0] == first] for first in firsts
    ]
    canvases = [template.canvas([NOISE, NOISE], [0], [firsts])]
    for first, after in zip(firsts, seconds, strict=True):
        canvases.append(template.canvas([first, NOISE], [1], [after]))
    numbers = ((firsts.index(label.ids[0]), label.ids[1]) for label in labels)
    options = tuple((first, seconds[first].index(second)) for first, second in numbers)
    return tuple(_fitting(canvas, template) for canvas in canvases), options


def _fitting(canvas: ReadCanvas | None, template: ReadTemplate) -> ReadCanvas:
    if canvas is None:
        raise Refused(
            "questions",
            f"a canvas of this model has {template.canvas_length} tokens, which is too "
            "short for an answer",
            "use another model",
        )
    return canvas


@dataclass(frozen=True)
class Target:
    """Where a read has the answer to a question.

    order: the number of the order in which the question's options are listed, of its own orders;
    slot: of the first canvas; options: for each option, in the caller's order, the number of its
    label among the slot's, and, for a label of two tokens, that of its second token among the
    labels of canvas 1 + the first number.
    """

    question: str
    order: int
    slot: int
    options: Options

    def sample(self, canvases: Sequence[Sequence[SlotReading]]) -> Sample:
        """canvases: of each canvas its slots' readings."""
        first = canvases[0][self.slot]
        if all(second is None for _, second in self.options):
            chosen = tuple(first.probabilities[number] for number, _ in self.options)
            return Sample(chosen, first.label_mass, first.is_label)
        # The chain rule: P(label) = P(first token) · P(second token | first token).
        seconds = [slots[0] for slots in canvases[1:]]
        chosen = tuple(
            first.probabilities[number] * seconds[number].probabilities[second or 0]
            for number, second in self.options
        )
        if first.label_mass is None:
            return Sample(chosen, None, None)
        masses = (p * each.mass for p, each in zip(first.probabilities, seconds, strict=True))
        best = max(range(len(seconds)), key=first.probabilities.__getitem__)
        is_label = bool(first.is_label and seconds[best].is_label)
        return Sample(chosen, first.label_mass * sum(masses), is_label)


@dataclass(frozen=True)
class Read:
    """A prompt that follows a prefix, and the canvases that are read behind it, all of them once
    for each sample."""

    ids: array[int]  # int32
    canvases: tuple[ReadCanvas, ...]
    targets: tuple[Target, ...]

    @property
    def width(self) -> int:
        """Of the widest canvas."""
        return max(len(canvas.ids) for canvas in self.canvases)

    @property
    def canvas_tokens(self) -> int:
        """Of one sample."""
        return sum(len(canvas.ids) for canvas in self.canvases)


def single_reads(
    template: ReadTemplate,
    questions: Mapping[str, Question],
    settings: DecisionSettings,
    state: Sequence[int] | None,
) -> Iterator[Read]:
    """A read for each question and order of its options. state: its ids where it follows the
    question; None where it comes before."""
    line = template.line() if questions else None
    shared = LabelCanvases(template, settings.orders)
    for name, question in questions.items():
        assert line
        labels = _labels(question, line, name)
        for number, order in enumerate(shared.listings(question, labels)):
            text = question_text(question, order.texts, order.listed)
            ids = _prompt(template, text, state, where_of(name))
            canvases, options = shared.canvases(order)
            yield Read(ids, canvases, (Target(name, number, 0, options),))


def joint_reads(
    template: ReadTemplate,
    questions: Mapping[str, Question],
    settings: DecisionSettings,
    state: Sequence[int] | None,
) -> Iterator[Read]:
    """Reads of as many questions at a time as a canvas holds, in even parts. A question whose
    labels have two tokens is read by itself."""
    joint: dict[str, Question] = {}
    for name, question in questions.items():
        if any(len(label.ids) > 1 for label in _labels(question, template.line(), name)):
            yield from single_reads(template, {name: question}, settings, state)
        else:
            joint[name] = question
    for part in _even_parts(template, joint):
        yield from _joint_orders(template, part, settings, state)


def _joint_orders(
    template: ReadTemplate,
    questions: Mapping[str, Question],
    settings: DecisionSettings,
    state: Sequence[int] | None,
) -> Iterator[Read]:
    """A read for each order; a question that has fewer orders than others has each several times
    less often or more, of which `DecisionPlan.answers` takes the mean."""
    lines = _lines(template, len(questions))
    orders = [
        listing_orders(question, _labels(question, line, name), settings.orders)
        for line, (name, question) in zip(lines, questions.items(), strict=True)
    ]
    for number in range(max(map(len, orders))):
        chosen = [own[number % len(own)] for own in orders]
        texts = [
            question_text(question, order.texts, order.listed)
            for question, order in zip(questions.values(), chosen, strict=True)
        ]
        labels = [[label.ids[0] for label in order.labels] for order in chosen]
        ids = _prompt(template, joint_text(texts), state, "questions")
        canvas = _joint_canvas(template, lines, labels)
        assert canvas
        targets = tuple(
            Target(name, number % len(own), slot, tuple((i, None) for i in range(len(labelled))))
            for slot, (name, own, labelled) in enumerate(
                zip(questions, orders, labels, strict=True)
            )
        )
        yield Read(ids, (canvas,), targets)


def _even_parts(
    template: ReadTemplate, questions: Mapping[str, Question]
) -> Iterator[dict[str, Question]]:
    """The questions in as few parts as canvases hold, of sizes that differ by one at most."""
    items = list(questions.items())
    if not items:
        return
    count = 1
    while _joint_canvas(template, _lines(template, -(-len(items) // count))) is None:
        count += 1
        if count > len(items):
            raise Refused(
                "joint",
                f"a canvas of {template.canvas_length} tokens holds no line of a question",
                "leave joint out",
            )
    for part in range(count):
        a, b = part * len(items) // count, (part + 1) * len(items) // count
        yield dict(items[a:b])


def _lines(template: ReadTemplate, count: int) -> list[Line]:
    """The lines of a canvas of so many questions; the last one has no line break behind it."""
    texts = [joint_line(number) for number in range(1, count + 1)]
    texts[-1] = texts[-1][0], ""
    return [template.line(*each) for each in texts]


def _joint_canvas(
    template: ReadTemplate,
    lines: Sequence[Line],
    labels: Sequence[Sequence[int]] = (),
) -> ReadCanvas | None:
    """A canvas of lines, each tokenized by itself, so that no token reaches over two of them."""
    body: list[int] = []
    slots: list[int] = []
    for line in lines:
        slots.append(len(body) + line.position)
        body += line.ids
        body[slots[-1]] = NOISE
        if len(body) > template.canvas_length:
            return None
    return template.canvas(body, slots, labels)


def _labels(question: Question, line: Line, name: str) -> tuple[Label, ...]:
    with naming(where_of(name)):
        return line.labels(question)


def _prompt(
    template: ReadTemplate, text: str, state: Sequence[int] | None, where: str
) -> array[int]:
    with naming(where):
        if state is None:
            return array("i", template.after_state(text))
        return array("i", template.before_state(text, state))
