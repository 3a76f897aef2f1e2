"""A decision: questions about a state that are read rather than written."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sfumato.diffusion.constraints.decision_plan import DecisionPlan, Read
from sfumato.diffusion.constraints.questions import Answer
from sfumato.tasks.works import (
    Claim,
    Figures,
    Likelihood,
    PlacedPicture,
    Prompt,
    Score,
    Unfinished,
    prompt_work,
)


@dataclass(frozen=True)
class Answers:
    """The outcome of a decision."""

    answers: Mapping[str, Answer]  # by the question's id, in the order of the questions
    reads: int  # canvases that were read


class DecideTask:
    """Encodes the state once, and reads all questions behind it."""

    stats = None

    def __init__(self, plan: DecisionPlan, family: str = "") -> None:
        self.plan = plan
        lines = [] if plan.settings.verify is None else list(map(_likelihoods, plan.reads))
        self._lines = lines  # of each read
        beside: list[Read | Likelihood] = [*plan.reads, *chain.from_iterable(lines)]
        longest = max((len(each.ids) for each in beside), default=0)
        pictures = tuple(PlacedPicture(start, shown.content) for start, shown in plan.shown)
        # Later decisions are likely to share the whole prefix.
        prompt = Prompt(plan.prefix, (len(plan.prefix),), pictures)
        positions = len(plan.prefix)
        self.claim = Claim(prompt, positions, family, beside=longest, blocks=plan.blocks)
        self.figures = Figures(
            plan.settings.seed,
            max_steps=plan.settings.steps,
            question_tokens=plan.question_tokens,
            questions=len(plan.questions),
        )

    def run(self) -> Generator[Any, Any, Answers]:
        plan = self.plan
        if plan.reads:
            yield prompt_work(self.claim.prompt)
        samples = yield Score(plan.reads)
        counts = (len(s) * len(r.canvases) for s, r in zip(samples, plan.reads, strict=True))
        answers, reads = plan.answers(samples), sum(counts)
        if self._lines:
            scores = iter((yield Score(tuple(chain.from_iterable(self._lines)))))
            answers = plan.verified(answers, [[next(scores) for _ in own] for own in self._lines])
        return Answers(answers, reads)

    def stopped(self) -> Answers:
        raise Unfinished("the request was cancelled")


def _likelihoods(read: Read) -> list[Likelihood]:
    """Each label of a read of one question, behind it."""
    return [Likelihood([*read.ids, *label], len(read.ids)) for label in read.labels]
