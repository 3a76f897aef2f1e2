"""How well a model decides: questions read as the product reads them, and what they come to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sfumato.api import Model
from sfumato.diffusion.constraints.decision_plan import DecisionSettings
from sfumato.diffusion.constraints.questions import ScoreQuestion
from sfumato.train.decision_states import Case, in_order


@dataclass(frozen=True)
class ReadPair:
    """The probabilities of a case's options in their order, read in that order and in another
    (the same one for scores), and the labels' share of the vocabulary in the first read."""

    given: tuple[float, ...]
    moved: tuple[float, ...]
    label_mass: float


@dataclass(frozen=True)
class DecisionScore:
    """Figures of held-out decisions; NaN where a set has no question of the kind."""

    tasks: int
    known_error: float
    """Mean over questions that their state leaves open of mean |p - known| over their options."""
    yes_no: float  # of settled yes/no questions: the right answer is the likelier one
    choice: float  # of settled choices: the right option has the highest probability
    score_error: float  # of settled scores: mean |Σ i·pᵢ - level|, in levels
    moved: float
    """Mean over yes/no questions and choices of the mean |p - p'| over their options, p' being
    read with the options in another order."""
    most_moved: float  # the same with the largest |p - p'| of each question
    label_mass: float


def figures(cases: Sequence[Case], pairs: Sequence[ReadPair]) -> DecisionScore:
    """What the reads of these cases come to."""
    groups: dict[str, list[float]] = {
        name: [] for name in ("known", "yes_no", "choice", "score", "moved", "most", "mass")
    }
    for case, pair in zip(cases, pairs, strict=True):
        kind = _kind(case)
        off = np.subtract(pair.given, case.truth)
        if case.open:
            groups["known"].append(float(np.abs(off).mean()))
        elif kind == "score":
            groups["score"].append(abs(float(np.arange(len(off)) @ off)))
        else:
            right = int(np.argmax(pair.given)) == int(np.argmax(case.truth))
            groups[kind].append(float(right))
        if kind != "score":
            moved = np.abs(np.subtract(pair.given, pair.moved))
            groups["moved"].append(float(moved.mean()))
            groups["most"].append(float(moved.max()))
        groups["mass"].append(pair.label_mass)
    means = (math.fsum(x) / len(x) if x else math.nan for x in groups.values())
    return DecisionScore(len(cases), *means)


def _kind(case: Case) -> str:
    if isinstance(case.question, ScoreQuestion):
        return "score"
    names = {option.name for option in case.question.options}
    return "yes_no" if names == {"yes", "no"} else "choice"


def read_cases(
    model: Model, cases: Sequence[Case], seed: int = 0, answered: Callable[[], None] = lambda: None
) -> list[ReadPair]:
    """Each case by the product's own read, in the case's order and in another; seed: of the orders
    and of the slots' noise. answered: called for each. Neighbours about one state share it."""
    rng = np.random.default_rng(seed)
    pairs = []
    for number, (state, group) in enumerate(itertools.groupby(cases, lambda case: case.state)):
        some = list(group)
        orders = [_another(len(case.truth), rng) for case in some]
        questions = {f"given {i}": case.question for i, case in enumerate(some)}
        for i, (case, order) in enumerate(zip(some, orders, strict=True)):
            questions[f"moved {i}"] = in_order(case, order).question
        settings = DecisionSettings(seed=seed * 1_000_003 + number)
        answers = model.read_questions(state, questions, settings)
        for i, (case, order) in enumerate(zip(some, orders, strict=True)):
            given, moved = answers[f"given {i}"], answers[f"moved {i}"].probabilities
            if not isinstance(case.question, ScoreQuestion):
                moved = tuple(moved[order.index(option)] for option in range(len(order)))
            pairs.append(ReadPair(given.probabilities, moved, given.label_mass or 0.0))
            answered()
    return pairs


def _another(count: int, rng: np.random.Generator) -> list[int]:
    """An order other than 0, 1, 2 …, where there is one."""
    order = list(range(count))
    while count > 1 and order == list(range(count)):
        order = [int(i) for i in rng.permutation(count)]
    return order


def evaluate_decisions(
    model: Model, cases: Sequence[Case], seed: int = 0, answered: Callable[[], None] = lambda: None
) -> DecisionScore:
    """The figures of these cases, read with this model."""
    return figures(cases, read_cases(model, cases, seed, answered))


def lines(score: DecisionScore) -> list[str]:
    """The figures as lines for people."""
    return [
        f"decisions: {score.tasks} held-out questions, one read each",
        f"  known probabilities: mean error       {score.known_error:.3f}",
        f"  yes or no, right                      {score.yes_no:.1%}",
        f"  choice, right                         {score.choice:.1%}",
        f"  score, mean error in levels           {score.score_error:.3f}",
        f"  moved by another order: mean, most    {score.moved:.3f}, {score.most_moved:.3f}",
        f"  mean probability of all labels        {score.label_mass:.3f}",
    ]
