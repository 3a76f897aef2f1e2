"""What a set of answered decisions comes to: accuracy, and the distance from known probabilities.

Knows the cases and the probabilities that a model gave, and not how it was asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sfumato.diffusion.constraints.questions import ScoreQuestion
from sfumato.train.decision_states import Case

Probabilities = Sequence[float]


@dataclass(frozen=True)
class DecisionScore:
    """Figures of held-out decisions; NaN where a set has no question of the kind."""

    tasks: int
    known_error: float
    """Mean over questions that their state leaves open of mean |p - known| over their options."""
    accuracy: float  # of settled yes/no questions and choices: the right option is the likeliest
    score_error: float  # of settled scores: mean |Σ i·p - level|, in levels
    order_movement: float
    """Mean over yes/no questions and choices of the mean |p - p'| over the options, where p' are
    the probabilities with the options in another order."""
    order_movement_most: float  # the same with the largest |p - p'| of each question
    label_mass: float


def figures(
    cases: Sequence[Case],
    given: Sequence[Probabilities],
    moved: Sequence[Probabilities],
    masses: Sequence[float],
) -> DecisionScore:
    """given and moved: of each case, the options' probabilities, in the case's order in both;
    `moved` was read with the options in another order (the same one for scores)."""
    known, right, levels, movement, most = [], [], [], [], []
    for case, p, other in zip(cases, given, moved, strict=True):
        is_score = isinstance(case.question, ScoreQuestion)
        difference = np.abs(np.subtract(p, other))
        if not is_score:
            movement.append(difference.mean())
            most.append(difference.max())
        if case.open:
            known.append(np.abs(np.subtract(p, case.truth)).mean())
        elif is_score:
            places = np.arange(len(case.truth))
            levels.append(abs(float(places @ np.subtract(p, case.truth))))
        else:
            right.append(int(np.argmax(p)) == int(np.argmax(case.truth)))
    parts = (known, right, levels, movement, most, masses)
    return DecisionScore(len(cases), *(float(np.mean(x)) if x else float("nan") for x in parts))
