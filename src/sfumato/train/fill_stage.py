"""The third stage of the embedded recipe: the network learns to fill holes, to write small JSON
objects and to mend a wrong prediction.

Every step mixes these with the conversations and the reads of the stages before, so that what was
learnt is not lost.  Knows no files and no command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sfumato.model.transformer import Transformer
from sfumato.train import decisions_data, embedded_data, fill_data, json_data, prediction_data
from sfumato.train.canvas_objective import canvas_losses
from sfumato.train.canvas_rows import CanvasBatch, CanvasRow, collate
from sfumato.train.decision_stage import ALL_LOOKS, LOOK_WEIGHT, WEIGHTS
from sfumato.train.decisions_data import Reads
from sfumato.train.embedded_data import Mixture
from sfumato.train.fast_ops import fast_ops
from sfumato.train.objective import ENCODER_WEIGHT
from sfumato.train.part_processes import Gradients, PartProcesses
from sfumato.train.questions import pick
from sfumato.train.read_objective import read_losses
from sfumato.train.stage import Stage

STEPS = 13_578
PEAK, WARM_UP = 6e-4, 100
FALL_SHARE = 0.25
AVERAGE = 0.9995
"""Share of the mean of the weights that a step leaves as it is: a step's own weights answer now
this question better and now that one, and their mean nearly all."""
PARTS = 2
ROWS = 24
"""Canvases of each part of a step."""
STATES, QUESTIONS = 1, 4
"""States, and questions about each, of each part."""
READS_WEIGHT = 0.5
REPLY_WEIGHT = 0.5
"""Of the encoder's next tokens within texts."""
VALUES_SHARE = 0.15
"""Of the rows with an object, those with pinned names and holes for values."""
SLIPS_SHARE = 0.3
"""Of the rows with an object, those that begin with a letter too many, too few, or another one."""
FIRST_ASKED = 0.1
_POOL = 16

Report = Callable[[str], None]


class Shares(NamedTuple):
    """Of the canvases; answers to questions are the rest."""

    sudoku: float = 0.12
    fill: float = 0.34
    json: float = 0.24
    predicted: float = 0.04


class Part(NamedTuple):
    """What one process computes of a step."""

    reads: Reads
    canvases: CanvasBatch
    noise: torch.Generator


def draw(rng: np.random.Generator, canvas: int, shares: Shares) -> CanvasRow:
    """One canvas; depends on the generator's state alone."""
    at = rng.random()
    for name, share in zip(shares._fields, shares, strict=True):
        at -= share
        if at < 0:
            return _row(name, rng, canvas)
    return _row("questions", rng, canvas)


def _row(kind: str, rng: np.random.Generator, canvas: int) -> CanvasRow:
    if kind == "predicted":
        return prediction_data.row(rng, canvas)
    if kind == "json":
        task = json_data.draw(rng)
        if rng.random() < VALUES_SHARE:
            row = fill_data.row(json_data.values_as_holes(task, canvas, rng), canvas)
            if row is not None:
                return row
        slip = partial(prediction_data.changed, rng=rng) if rng.random() < SLIPS_SHARE else str
        return pick(json_data.rows(task, canvas, slip), rng)
    if kind == "fill":
        while True:
            row = fill_data.row(fill_data.draw(rng), canvas)
            if row is not None:
                return row
    mixture = Mixture(float(kind == "sudoku"), FIRST_ASKED)
    example = embedded_data.sample(rng, mixture)
    prefix, target = pick(embedded_data.canvas_rows(example, canvas), rng)
    return CanvasRow(kind, prefix, target, prompt=len(example.prompt_ids))


def batches(
    rng: np.random.Generator, count: int, canvas: int, shares: Shares
) -> Iterator[CanvasBatch]:
    """Training batches without end, of rows of similar length, as `embedded_data.batches`."""
    while True:
        rows = [draw(rng, canvas, shares) for _ in range(count * _POOL)]
        rows.sort(key=lambda row: len(row.prefix) + len(row.text))
        for i in rng.permutation(_POOL):
            yield collate(rows[i * count : (i + 1) * count])


def rows(seed: int, canvas: int, part: int) -> Iterator[Part]:
    """The rows of one part of the stage's steps; the same for the same arguments."""
    rng = np.random.default_rng((seed, 3, part))
    reads = decisions_data.batches(rng, STATES, QUESTIONS)
    canvases = batches(rng, ROWS, canvas, Shares())
    noise = torch.Generator().manual_seed(int(rng.integers(2**62)))
    while True:
        yield Part(next(reads), next(canvases), noise)


def gradients(stage: Stage, part: Part) -> Gradients:
    """The part's gradients, and its losses by name."""
    losses = canvas_losses(stage.network, part.canvases, part.noise)
    reads = read_losses(stage.network, part.reads)
    total = losses["canvas"] + REPLY_WEIGHT * losses["reply"] + ENCODER_WEIGHT * losses["prompt"]
    for name in ("copies_of_reply", "copies_of_canvas"):
        total = total + LOOK_WEIGHT * losses[name]
    for name in (*WEIGHTS, *ALL_LOOKS):
        total = total + READS_WEIGHT * WEIGHTS.get(name, LOOK_WEIGHT) * reads[name]
    return stage.gradients(total, losses | {"slot": reads["slot"], "options": reads["options"]})


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, level, and in the last steps a line down to 2 %: what is learnt last, the
    letters of long words, needs many steps at the full rate."""
    left = min(1.0, (steps - step) / (FALL_SHARE * steps))
    return PEAK * min(1.0, (step + 1) / WARM_UP) * (0.02 + 0.98 * left)


def train(
    network: Transformer,
    steps: int = STEPS,
    seed: int = 0,
    report: Report = print,
    every: int = 100,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Trains the network of the second stage, in place, and leaves the exponential mean of its
    weights over the steps; the same seed and torch give the same weights."""
    stage, start = Stage(network), time.perf_counter()
    mean = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(AVERAGE))
    smooth: dict[str, float] = {}
    canvas = network.config.canvas_length

    def work(part: int) -> Iterator[Gradients]:
        return (gradients(stage, some) for some in rows(seed, canvas, part))

    with fast_ops(), PartProcesses(stage.learned, work, PARTS) as parts:
        while stage.done < steps:
            losses = stage.step(parts.step(), learning_rate(stage.done, steps))
            mean.update_parameters(network)
            for name, value in losses.items():
                smooth[name] = 0.97 * smooth.get(name, value) + 0.03 * value
            progress(stage.done, steps)
            if stage.done % every == 0:
                spent = time.perf_counter() - start
                shown = ", ".join(f"{name} {value:.4f}" for name, value in smooth.items())
                report(
                    f"fill, step {stage.done} of {steps}: {shown}, "
                    f"{spent / stage.done * 1e3:.0f} ms a step, {spent / 60:.1f} min"
                )
    network.load_state_dict(mean.module.state_dict())
