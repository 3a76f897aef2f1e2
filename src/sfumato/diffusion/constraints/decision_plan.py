"""A decision before it begins: its checks, and the reads that it takes, as ids.

`Model.decide` and the engine plan their decisions here, and so refuse the same ones and read the
same tokens.  Knows no network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sfumato.diffusion.constraints.answers import Answer, Sample, answer_of, certain
from sfumato.diffusion.constraints.canvas_noise import NoiseKey
from sfumato.diffusion.constraints.decision_settings import DecisionSettings
from sfumato.diffusion.constraints.question_checks import (
    QuestionLimits,
    check_questions,
    naming,
    where_of,
)
from sfumato.diffusion.constraints.questions import Question, check_reads
from sfumato.diffusion.constraints.reads import Read, joint_reads, single_reads
from sfumato.diffusion.constraints.template import ReadTemplate
from sfumato.refused import TooLarge

MOST_CHARACTERS = 1 << 20
"""Of all questions of a decision, in all orders of their options: as many are tokenized in about a
second."""
MOST_TOKENS = 1 << 21
"""Of all reads of a decision: more than its questions have, unless each is followed by the
state."""


@dataclass(frozen=True)
class DecisionPlan:
    """A decision that can be done."""

    prefix: list[int]  # what is encoded once
    reads: tuple[Read, ...]
    questions: Mapping[str, Question]
    settings: DecisionSettings
    vocab_size: int
    key: NoiseKey  # of the prefix

    @property
    def question_tokens(self) -> int:
        """Of all reads, encoded apart from the prefix."""
        return sum(len(read.ids) for read in self.reads)

    @property
    def longest(self) -> int:
        """Positions behind the prefix that a read takes at most, its canvas with them."""
        return max((len(read.ids) + read.width for read in self.reads), default=0)

    def answers(self, results: Sequence[Sequence[Sequence[Sample]]]) -> dict[str, Answer]:
        """The answers by question. results: of each read its samples, of each of them a `Sample`
        for each of the read's targets. Reads of a question in the same order count as samples of
        that order, so that all orders weigh the same."""
        orders: dict[str, dict[int, list[Sample]]] = {}
        for read, samples in zip(self.reads, results, strict=True):
            for number, target in enumerate(read.targets):
                own = orders.setdefault(target.question, {}).setdefault(target.order, [])
                own += [each[number] for each in samples]
        return {
            name: answer_of(question, [*orders[name].values()])
            if name in orders
            else certain(question)
            for name, question in self.questions.items()
        }


def plan_decision(
    template: ReadTemplate,
    state: str,
    questions: Mapping[str, Question],
    settings: DecisionSettings,
    longest: int,
) -> DecisionPlan:
    """All checks of a decision before it begins, in an order in which nothing large is made of what
    is refused. longest: positions that a state, a question and its canvas can have together.

    Raises ValueError, naming the field or "questions.<id>", and TooLarge, a ValueError, for texts
    that have no room."""
    settings.check()
    limits = QuestionLimits(
        template.longest_token, longest, MOST_CHARACTERS, settings.orders, settings.joint
    )
    check_questions(state, questions, limits)
    with naming("samples, orders"):
        check_reads(len(questions), settings.samples, settings.orders)
    unsure = {name: each for name, each in questions.items() if len(each.options) > 1}
    prefix, after = _state(template, state.strip() if unsure else "", settings)
    make = joint_reads if settings.joint else single_reads
    reads: list[Read] = []
    tokens = 0
    for read in make(template, unsure, settings, after):
        _check_room(len(prefix), read, longest)
        tokens += len(read.ids)
        if tokens > MOST_TOKENS:
            raise TooLarge(
                "questions",
                "in all their orders, with the state where it follows each, they have more "
                f"than {MOST_TOKENS:,} tokens",
                "ask for fewer questions or orders",
            )
        reads.append(read)
    key = NoiseKey(settings.seed, prefix)
    return DecisionPlan(prefix, tuple(reads), questions, settings, template.vocab_size, key)


def _state(
    template: ReadTemplate, state: str, settings: DecisionSettings
) -> tuple[list[int], list[int] | None]:
    """The ids that are encoded once, and the state's where it follows each question."""
    with naming("state"):
        if settings.order == "schema":
            return [*template.head], template.then(state)
        return template.prefix(state), None


def _check_room(prefix: int, read: Read, longest: int) -> None:
    need = prefix + len(read.ids) + read.width
    if need > longest:
        names = ", ".join(where_of(target.question) for target in read.targets[:3])
        raise TooLarge(
            None,
            f"{names}: state, question and canvas take {prefix:,} + {len(read.ids):,} + "
            f"{read.width} tokens, and there is room for {longest:,}",
            "shorten the state or the question",
            need,
            longest,
        )
