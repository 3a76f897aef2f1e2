"""How good the embedded model is: exact answers and steps on fixed sets, and what they rest on.

Besides the model as it runs, hard grids are tried with a single step and without self-conditioning:
if those did as well, the refinement would be for show.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sfumato.api import Model, load
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.config import SamplerConfig
from sfumato.diffusion.limits import Limits, resolve
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sequence import truncate_canvas
from sfumato.diffusion.step import denoise_step
from sfumato.model.cache import Slot
from sfumato.train.embedded_data import Evaluation, evaluation_sets

Figures = dict[str, dict[str, Any]]

ROWS = 32  # conversations denoised together
CANVASES = 2  # no answer of the sets is longer


@dataclass(frozen=True)
class Score:
    """What a set of tasks came to."""

    tasks: int
    exact: float  # share of replies equal to the expected one, character for character
    steps: float  # denoising steps per canvas, mean
    most_steps: int
    converged: float  # share of canvases that ended before the step cap


@dataclass
class _Row:
    """One conversation on its way."""

    task: Evaluation
    slot: Slot
    canvas: Canvas
    reply: list[int]


def evaluate(
    model: Model,
    tasks: Sequence[Evaluation],
    config: SamplerConfig | None = None,
    seed: int = 0,
    answered: Callable[[], None] = lambda: None,
) -> Score:
    """Answers all tasks, `ROWS` at a time, each with its own noise; a row that ends makes room.

    answered: called after each."""
    filled = (config or SamplerConfig()).over(model.sampler_defaults)
    filled = replace(filled, canvas_length=model.config.canvas_length)
    filled = resolve(model.network, filled, _limits(model))
    waiting = list(enumerate(tasks))[::-1]
    rows: list[_Row] = []
    exact, steps = 0, []
    converged = 0
    while waiting or rows:
        while waiting and len(rows) < ROWS:
            rows.append(_begin(model, *waiting.pop(), filled, seed))
        denoise_step(model.network, [row.canvas for row in rows], [row.slot for row in rows])
        for row in [row for row in rows if row.canvas.done]:
            steps.append(row.canvas.step)
            converged += row.canvas.convergence == "converged"
            if _settle(model, row):
                rows.remove(row)
                answered()
                exact += model.tokenizer.decode(row.reply) == row.task.expected
    return Score(
        len(tasks), exact / len(tasks), sum(steps) / len(steps), max(steps), converged / len(steps)
    )


def _limits(model: Model) -> Limits:
    return Limits(CANVASES * model.config.canvas_length, model.end_ids)


def _begin(model: Model, index: int, task: Evaluation, config: SamplerConfig, seed: int) -> _Row:
    ids = torch.tensor(model.prompt_ids(messages=task.messages))
    slot = model.network.new_slot(len(ids) + (CANVASES - 1) * model.config.canvas_length)
    model.network.encode([ids], [slot])
    # Another seed for every task: one unlucky canvas must not decide them all.
    noise = Noise(seed * 1_000_003 + index, 0)
    network = model.network
    return _Row(task, slot, Canvas(config, noise, network.config.vocab_size, network.device), [])


def _settle(model: Model, row: _Row) -> bool:
    """Takes a finished canvas into the reply; True where the reply ends with it."""
    ids = row.canvas.argmax.tolist()
    added, reason = truncate_canvas(ids, row.reply, row.canvas.config, _limits(model))
    row.reply += added
    if reason is not None:
        return True
    noise, network = row.canvas.noise, model.network
    network.encode([row.canvas.argmax], [row.slot])
    row.canvas = Canvas(
        row.canvas.config,
        replace(noise, canvas=noise.canvas + 1),
        network.config.vocab_size,
        network.device,
        reply=row.reply,
    )
    return False


def run(
    path: str | Path | None = None,
    count: int = 200,
    seed: int = 0,
    config: SamplerConfig | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Figures:
    """The scores of every set, and of the hard grids under two handicaps, by name.

    path: a checkpoint of this vocabulary; None is the embedded model; count: of tasks in each set,
    at most; seed: draws the held-out
    tasks, and the noise that they are answered with; config: how, in all of them; progress: called
    with the tasks answered, and all of them.
    """
    model, config = load(path), config or SamplerConfig()
    sets = {name: tasks[:count] for name, tasks in evaluation_sets(seed, count).items()}
    hard = sets["sudoku_hard"]
    one_step, blind = replace(config, max_steps=1), replace(config, self_conditioning=False)
    runs = [(name, tasks, config) for name, tasks in sets.items()]
    runs += [("sudoku_hard, one step", hard, one_step)]
    runs += [("sudoku_hard, no self-conditioning", hard, blind)]
    total, done = sum(len(tasks) for _, tasks, _ in runs), itertools.count(1)
    return {
        name: asdict(evaluate(model, tasks, how, seed, lambda: progress(next(done), total)))
        for name, tasks, how in runs
    }


def table(figures: Figures) -> str:
    """The figures as lines for people."""
    lines = [f"{'':34}{'tasks':>6}{'exact':>8}{'steps':>7}{'most':>6}{'converged':>11}"]
    for name, score in figures.items():
        lines.append(
            f"{name:34}{score['tasks']:6}{score['exact']:8.1%}{score['steps']:7.2f}"
            f"{score['most_steps']:6}{score['converged']:11.1%}"
        )
    return "\n".join(lines)
