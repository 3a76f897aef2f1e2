"""Questions about a state whose answers are probabilities: yes or no, a choice, a score; and their
answers, with what follows from the probabilities by arithmetic.

Knows no labels, no tokens, no network and no HTTP.  Names of questions are not here: they never
reach a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from sfumato.options.limits import AUTO_SAMPLES, MOST_READS
from sfumato.refused import Refused

MOST_QUESTIONS = 1_024
MOST_OPTIONS = 255
MOST_LEVELS = 255


@dataclass(frozen=True)
class Answer:
    """What all answers have.

    probabilities: of the options in the caller's order, yes before no; they sum to 1.
    label_mass: the probability of all labels together among the whole vocabulary, a mean over
    reads; None where it was not wanted, or no read was needed. is_label: whether the most
    probable token of the vocabulary was a label in every read; None where `label_mass` is.
    samples: reads with different noise; spread: the largest difference between two of them in the
    probability of one option, 0 for one. orders and order_spread: likewise, of the orders in which
    the options were listed, each the mean of its samples. causal: the probabilities of the options
    by the causal mode; None where it has read nothing.
    """

    probabilities: tuple[float, ...]
    label_mass: float | None = None
    is_label: bool | None = None
    samples: int = 1
    spread: float = 0.0
    orders: int = 1
    order_spread: float = 0.0
    causal: tuple[float, ...] | None = None

    @property
    def best(self) -> int:
        """The number of the most probable option; of equals the first."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def other(self) -> int | None:
        """The number of the causal mode's most probable option, where that is not `best`: the
        question is undecided then."""
        if self.causal is None:
            return None
        other = max(range(len(self.causal)), key=self.causal.__getitem__)
        return None if other == self.best else other


class YesNoAnswer(Answer):
    """Whether something holds."""

    @property
    def probability(self) -> float:
        """The probability of yes."""
        return self.probabilities[0]


class ChoiceAnswer(Answer):
    """Which option applies."""

    @property
    def confidence(self) -> float:
        """(max p - 1/n) / (1 - 1/n), as System One has it; 1 for one option."""
        n = len(self.probabilities)
        return 1.0 if n == 1 else _unit((max(self.probabilities) - 1 / n) / (1 - 1 / n))


class ScoreAnswer(Answer):
    """Which level applies."""

    @property
    def score(self) -> float:
        """Σ i · pᵢ, the first level being 0."""
        return math.fsum(i * p for i, p in enumerate(self.probabilities))

    @property
    def confidence(self) -> float:
        """max(0, 1 - Σ pᵢ · |i - best| / D) with D = Σ |i - (n - 1)/2| / n, the distance that
        equal probabilities have from the middle, as System One has it; 1 for one level."""
        n, best = len(self.probabilities), self.best
        if n == 1:
            return 1.0
        spread = math.fsum(abs(i - (n - 1) / 2) for i in range(n)) / n
        off = math.fsum(p * abs(i - best) for i, p in enumerate(self.probabilities))
        return _unit(1 - off / spread)


@dataclass(frozen=True)
class Option:
    """One answer of a choice: its name as the caller gets it back, and what it means."""

    name: str
    description: str = ""


@dataclass(frozen=True)
class YesNoQuestion:
    """Whether something holds. Instructions or a description must be there."""

    answer: ClassVar[type[Answer]] = YesNoAnswer
    instructions: str = ""
    yes: str = ""  # what "yes" means
    no: str = ""  # what "no" means

    @cached_property
    def options(self) -> tuple[Option, ...]:
        return Option("yes", self.yes), Option("no", self.no)


@dataclass(frozen=True)
class ChoiceQuestion:
    """Which of 1 to MOST_OPTIONS options applies."""

    answer: ClassVar[type[Answer]] = ChoiceAnswer
    instructions: str
    options: tuple[Option, ...]


@dataclass(frozen=True)
class ScoreQuestion:
    """Which of 1 to MOST_LEVELS levels, listed from low to high, applies."""

    answer: ClassVar[type[Answer]] = ScoreAnswer
    instructions: str
    levels: tuple[str, ...]

    @cached_property
    def options(self) -> tuple[Option, ...]:
        return tuple(Option(level) for level in self.levels)


Question = YesNoQuestion | ChoiceQuestion | ScoreQuestion


@dataclass(frozen=True)
class Reading:
    """How questions are read, whatever their state, their words and the seed.

    samples: reads of different noise, whose probabilities are averaged; "auto" is one, and three
    more where its options have an entropy over 0.1 nats. orders: how many orders of the options
    are read and averaged, as far as there are so many. order: "state" encodes the state once
    before all questions, "schema" puts each question before the state. steps: denoising steps of
    a read. joint: all questions in one canvas, rather than each by itself.
    """

    samples: int | Literal["auto"] = 1
    orders: int = 1
    order: Literal["state", "schema"] = "state"
    steps: int = 1
    joint: bool = False


def check_reads(questions: int, samples: int | Literal["auto"], orders: int) -> None:
    """Raises ValueError for more reads than one decision has. questions: how many."""
    each = AUTO_SAMPLES if samples == "auto" else samples
    reads = questions * each * orders
    if reads > MOST_READS:
        raise Refused(
            ("samples", "orders"),
            f"{questions:,} questions x {each:,} samples x {orders:,} orders are {reads:,} reads, "
            f"and {MOST_READS:,} are the most",
            "ask for fewer",
        )


def check_question(question: Question, where: str) -> None:
    """Raises ValueError, naming the field below `where`, for a question that cannot be asked."""
    if isinstance(question, YesNoQuestion):
        if not (question.instructions or question.yes or question.no):
            raise Refused(
                where, "a yes/no question needs instructions or a description of yes or no"
            )
        return
    name, most = (
        ("options", MOST_OPTIONS)
        if isinstance(question, ChoiceQuestion)
        else ("levels", MOST_LEVELS)
    )
    count = len(question.options)
    if not 1 <= count <= most:
        raise Refused(f"{where}.{name}", f"must be 1 to {most}, got {count}")
    names = [option.name for option in question.options]
    if isinstance(question, ChoiceQuestion) and len(set(names)) < count:
        double = next(name for name in names if names.count(name) > 1)
        raise Refused(f"{where}.{name}", f"{double[:80]!r} is there twice", "name each option once")


UNSURE = 0.1
"""Nats of entropy over the options from which samples "auto" are read again: on 20 held-out tickets
it named 5 of 5 answers that moved with the noise and none of 55 that did not."""


@dataclass(frozen=True)
class Sample:
    """What one read gave, of a question's options or of the labels at one place of a canvas.

    probabilities: of these, which sum to 1; label_mass: theirs together among all tokens; is_label:
    whether the most probable of all tokens is a label; both None where only labels were scored.
    """

    probabilities: tuple[float, ...]
    label_mass: float | None = None
    is_label: bool | None = None

    @property
    def entropy(self) -> float:
        """In nats."""
        return -math.fsum(p * math.log(p) for p in self.probabilities if p > 0)


def answer_of(question: Question, orders: Sequence[Sequence[Sample]]) -> Answer:
    """The answer of the samples that were read under each order of the options. The means are of
    probabilities: of the samples of an order, and then of the orders."""
    samples = [sample for order in orders for sample in order]
    means = [mean([sample.probabilities for sample in order]) for order in orders]
    spreads = (_spread([sample.probabilities for sample in order]) for order in orders)
    masses = [sample.label_mass for sample in samples if sample.label_mass is not None]
    labels = [sample.is_label for sample in samples if sample.is_label is not None]
    return question.answer(
        mean(means),
        math.fsum(masses) / len(masses) if masses else None,
        all(labels) if labels else None,
        max(len(order) for order in orders),
        max(spreads),
        len(orders),
        _spread(means),
    )


def softmax(logits: Sequence[float]) -> tuple[float, ...]:
    """The probabilities of logits, in nats."""
    peak = max(logits)
    masses = [math.exp(logit - peak) for logit in logits]
    total = math.fsum(masses)
    return tuple(mass / total for mass in masses)


def mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The means of columns of one length."""
    return tuple(math.fsum(column) / len(rows) for column in zip(*rows, strict=True))


def _spread(rows: Sequence[Sequence[float]]) -> float:
    return max(max(column) - min(column) for column in zip(*rows, strict=True))


def _unit(value: float) -> float:
    """Within 0 to 1, which rounding may leave."""
    return min(1.0, max(0.0, value))
