"""Questions about a state whose answers are probabilities: yes or no, a choice, a score.

Knows no labels, no tokens and no HTTP.  Names of questions are not here: they never reach a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from sfumato.options.limits import AUTO_SAMPLES, MOST_READS
from sfumato.refused import Refused

MOST_QUESTIONS = 1_024
MOST_OPTIONS = 255
MOST_LEVELS = 255


@dataclass(frozen=True)
class Option:
    """One answer of a choice: its name as the caller gets it back, and what it means."""

    name: str
    description: str = ""


@dataclass(frozen=True)
class YesNoQuestion:
    """Whether something holds. Instructions or a description must be there."""

    instructions: str = ""
    yes: str = ""  # what "yes" means
    no: str = ""  # what "no" means

    @cached_property
    def options(self) -> tuple[Option, ...]:
        return Option("yes", self.yes), Option("no", self.no)


@dataclass(frozen=True)
class ChoiceQuestion:
    """Which of 1 to MOST_OPTIONS options applies."""

    instructions: str
    options: tuple[Option, ...]


@dataclass(frozen=True)
class ScoreQuestion:
    """Which of 1 to MOST_LEVELS levels, listed from low to high, applies."""

    instructions: str
    levels: tuple[str, ...]

    @cached_property
    def options(self) -> tuple[Option, ...]:
        return tuple(Option(level) for level in self.levels)


Question = YesNoQuestion | ChoiceQuestion | ScoreQuestion


def check_reads(questions: int, samples: int | Literal["auto"], orders: int) -> None:
    """Raises ValueError for more reads than one decision has. questions: how many."""
    each = AUTO_SAMPLES if samples == "auto" else samples
    reads = questions * each * orders
    if reads > MOST_READS:
        raise Refused(
            None,
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
