"""How good the embedded model is: exact answers and steps on fixed sets, and what they rest on;
and how well it decides.

Besides the model as it runs, hard grids are tried with a single step and without self-conditioning:
if those did as well, the refinement would be for show.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sfumato.api import Model, load
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine import Request
from sfumato.train import canvas_figures
from sfumato.train.decision_figures import DecisionScore, evaluate_decisions
from sfumato.train.decision_figures import lines as decision_lines
from sfumato.train.decisions_data import held_out
from sfumato.train.embedded_data import Evaluation, evaluation_sets
from sfumato.train.replies import Score, replies, score_of

Figures = dict[str, dict[str, Any]]

DECISIONS = "decisions"
CANVASES = 2  # no answer of the sets is longer


def evaluate(
    model: Model,
    tasks: Sequence[Evaluation],
    config: SamplerConfig | None = None,
    seed: int = 0,
    answered: Callable[[], None] = lambda: None,
) -> Score:
    """Submits all tasks to an engine, each with its own noise. An empty answer counts as it is.
    answered: called after each."""
    requests = [_request(model, index, task, config, seed) for index, task in enumerate(tasks)]
    done = replies(model, requests, CANVASES, answered)
    right = [text == task.expected for (text, _), task in zip(done, tasks, strict=True)]
    return score_of([account for _, account in done], right)


def _request(
    model: Model, index: int, task: Evaluation, config: SamplerConfig | None, seed: int
) -> Request:
    sampler = replace(config or SamplerConfig(), canvas_length=model.config.canvas_length)
    return Request(
        messages=task.messages,
        max_tokens=CANVASES * model.config.canvas_length,
        # Another seed for every task: one unlucky canvas must not decide them all.
        seed=seed * 1_000_003 + index,
        sampler=sampler,
        retry_empty=False,
        endpoint="evaluate",
    )


def run(
    path: str | Path | None = None,
    count: int = 200,
    seed: int = 0,
    config: SamplerConfig | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    cache_type: str | None = None,
    quantize: str | None = None,
) -> Figures:
    """The scores of every set, and of the hard grids under two handicaps, by name; and under
    DECISIONS those of held-out decisions (`DecisionScore`).

    path: a checkpoint of this vocabulary; None is the embedded model; count: of tasks in each set,
    at most, and a third of the decisions; seed: draws the held-out tasks, and the noise that they
    are answered with; config: how, in all sets but the decisions; progress: called with the tasks
    answered, and all of them; cache_type and quantize: as `load` takes them.
    """
    model, config = load(path, cache_type=cache_type, quantize=quantize), config or SamplerConfig()
    sets = {name: tasks[:count] for name, tasks in evaluation_sets(seed, count).items()}
    hard = sets["sudoku_hard"]
    one_step, blind = replace(config, max_steps=1), replace(config, self_conditioning=False)
    runs = [(name, tasks, config) for name, tasks in sets.items()]
    runs += [("sudoku_hard, one step", hard, one_step)]
    runs += [("sudoku_hard, no self-conditioning", hard, blind)]
    others = canvas_figures.canvas_runs(model, hard, seed, count, config)
    cases = held_out(seed, 3 * count)
    total = sum(len(tasks) for _, tasks, _ in runs) + len(cases)
    total += sum(tasks for tasks, _ in others.values())
    done = itertools.count(1)
    answered: Callable[[], None] = lambda: progress(next(done), total)  # noqa: E731
    figures = {
        name: asdict(evaluate(model, tasks, how, seed, answered)) for name, tasks, how in runs
    }
    figures |= {name: asdict(score(answered)) for name, (_, score) in others.items()}
    return figures | {DECISIONS: asdict(evaluate_decisions(model, cases, seed, answered))}


def table(figures: Figures) -> str:
    """The figures as lines for people."""
    lines = [f"{'':34}{'tasks':>6}{'exact':>8}{'steps':>7}{'most':>6}{'converged':>11}"]
    for name, score in figures.items():
        if name == DECISIONS:
            lines += ["", *decision_lines(DecisionScore(**score))]
            continue
        lines.append(
            f"{name:34}{score['tasks']:6}{score['exact']:8.1%}{score['steps']:7.2f}"
            f"{score['most_steps']:6}{score['converged']:11.1%}"
        )
    return "\n".join(lines)
