"""What is refused of questions before any of their texts is tokenized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sfumato.diffusion.constraints.listing import most_orders
from sfumato.diffusion.constraints.questions import (
    MOST_QUESTIONS,
    ChoiceQuestion,
    Question,
    ScoreQuestion,
    YesNoQuestion,
    check_question,
)
from sfumato.diffusion.constraints.wording import question_length
from sfumato.refused import Refused, TooLarge
from sfumato.weights.errors import quoted


@dataclass(frozen=True)
class QuestionLimits:
    """How long texts may be."""

    longest_token: int  # characters
    longest: int  # tokens of a state and a question
    characters: int  # of all questions, in all orders of their options
    orders: int  # that are wanted
    joint: bool  # where all questions are read as often as the one with the most orders

    def check(self, characters: int, most: int, where: str) -> None:
        """Raises TooLarge for a text that has more tokens than `most` however it is cut."""
        least = -(-characters // self.longest_token)
        if least > most:
            raise TooLarge(
                where,
                f"{characters:,} characters are {least:,} tokens or more, and there is room for "
                f"{most:,}",
                "shorten it",
                least,
                most,
            )

    def check_all(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Raises TooLarge for questions that take too long to tokenize. lengths: of each question
        its characters, and its orders."""
        most = max(orders for _, orders in lengths)
        total = sum(length * (most if self.joint else orders) for length, orders in lengths)
        if total > self.characters:
            raise TooLarge(
                "questions",
                f"with labels and in all their orders they have {total:,} characters, and one "
                f"decision has at most {self.characters:,}",
                "ask for fewer questions, options or orders",
            )


def where_of(name: str) -> str:
    """How a message names a question: by its id, which may be of any length."""
    return f"questions.{name}" if len(name) <= 80 else f"questions.{name[:80]}…"


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Has what is raised within as a ValueError name a field."""
    try:
        yield
    except ValueError as error:
        raise Refused(where, str(error)) from error


def check_questions(state: object, questions: object, limits: QuestionLimits) -> None:
    """Raises ValueError, naming the field, for what is no state or no question, or has no room."""
    if not isinstance(state, str):
        raise Refused("state", f"must be text, got {quoted(state)}")
    if not isinstance(questions, Mapping):
        raise Refused("questions", f"must be a mapping of ids, got {quoted(questions)}")
    if not 1 <= len(questions) <= MOST_QUESTIONS:
        raise Refused(
            "questions",
            f"must be 1 to {MOST_QUESTIONS:,}, got {len(questions):,}",
            "split them over several requests",
        )
    limits.check(len(state), limits.longest, "state")
    lengths: list[tuple[int, int]] = []  # of each question, and how many orders it has
    for name, question in questions.items():
        if not isinstance(name, str):
            raise Refused("questions", f"an id must be text, got {quoted(name)}")
        where = where_of(name)
        if not isinstance(question, YesNoQuestion | ChoiceQuestion | ScoreQuestion):
            raise Refused(where, f"is no question: {quoted(question)}")
        check_question(question, where)
        limits.check(_characters(question), limits.longest, where)
        lengths.append((question_length(question), most_orders(question, limits.orders)))
    limits.check_all(lengths)


def _characters(question: Question) -> int:
    """The caller's own."""
    options = sum(len(option.name) + len(option.description) for option in question.options)
    return len(question.instructions) + options
