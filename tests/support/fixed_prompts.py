"""Prompts of the embedded model's evaluation."""

from __future__ import annotations

import numpy as np

from sfumato.train.embedded_data import Evaluation, evaluation_sets


def fixed_prompts(count: int = 200) -> list[Evaluation]:
    """A fixed mixture for measuring speed and quality: of each set in turn, in a fixed order."""
    rng = np.random.default_rng(count)
    sets = [[tasks[i] for i in rng.permutation(len(tasks))] for tasks in evaluation_sets().values()]
    return [sets[i % 4][i // 4 % len(sets[i % 4])] for i in range(count)]
