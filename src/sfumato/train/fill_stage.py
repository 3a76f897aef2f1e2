"""The embedded recipe's third stage: the network learns to fill holes, to write small JSON objects
and to mend a wrong prediction.

Every step mixes these with the conversations and the reads of the stages before, so that what was
learnt is not lost.  Knows no files and no command line.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from sfumato.model.transformer import Transformer
from sfumato.train import decisions_data, embedded_data, fill_data, json_data, prediction_data
from sfumato.train.canvas_objective import canvas_losses
from sfumato.train.canvas_rows import CanvasBatch, CanvasRow, collate
from sfumato.train.decision_stage import ALL_LOOKS, LOOK_WEIGHT, WEIGHTS
from sfumato.train.decisions_data import Reads
from sfumato.train.embedded_data import Mixture
from sfumato.train.fast_ops import fast_ops
from sfumato.train.objective import ENCODER_WEIGHT
from sfumato.train.questions import pick
from sfumato.train.read_objective import read_losses
from sfumato.train.stage import Gradients, Stage

STEPS = 1_860
PARTS = 2
ROWS = 24
"""Canvases of each part of a step."""
STATES, QUESTIONS = 1, 4
"""States, and questions about each, of a part that reads."""
WARM_UP = 100
READS_WEIGHT = 0.5
VALUES_SHARE = 0.15
"""Of the rows with an object, those with pinned names and holes for values."""
FIRST_ASKED = 0.1
_POOL = 16

Report = Callable[[str], None]


class Shares(NamedTuple):
    """Of the canvases; answers to questions are the rest."""

    sudoku: float = 0.18
    fill: float = 0.24
    json: float = 0.28
    predicted: float = 0.14


class Phase(NamedTuple):
    """Steps up to `until`, with a stream of data of their own. The rate is that of a cosine from
    `peak` at step `start` down to 2 % of it at step `end`, or stays at `peak` where there is no
    end; reads: how many of the parts have reads; reply: the weight of the encoder's next tokens
    within texts; copies: that of where one head looks for what a text repeats."""

    until: int
    peak: float
    start: int
    end: int | None
    shares: Shares = Shares()
    reads: int = PARTS
    reply: float = 0.5
    copies: float = 0.5

    def learning_rate(self, step: int) -> float:
        """With a linear warm-up of the stage's first steps."""
        done = 0.0 if self.end is None else (step - self.start) / (self.end - self.start)
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.peak * min(1.0, (step + 1) / WARM_UP) * (0.02 + 0.98 * cosine)


PHASES = (  # copying was not learnt without its aid, nor in 400 steps with few objects
    Phase(100, 8e-4, 0, 2400, reply=0.3, copies=0.0),
    Phase(450, 8e-4, 0, 1900, reply=0.3, copies=0.0),
    Phase(850, 8e-4, 0, 1850),
    Phase(1200, 1e-3, 850, None, Shares(0.08, 0.2, 0.5, 0.08), reads=1),
    Phase(1550, 1e-3, 1200, STEPS, Shares(0.12, 0.22, 0.42, 0.1), reads=1),
    Phase(STEPS, 1e-3, 1200, STEPS, Shares(0.2, 0.2, 0.32, 0.12)),
)


def phases(steps: int) -> tuple[Phase, ...]:
    """Those of the recipe; other numbers of steps have one."""
    return PHASES if steps == STEPS else (Phase(steps, 1e-3, 0, steps),)


class Part(NamedTuple):
    """What one worker computes of a step."""

    reads: Reads | None
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
        return pick(json_data.rows(task, canvas), rng)
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


def parts(seed: int, canvas: int, phase: Phase, first: int = 0) -> Iterator[list[Part]]:
    """The rows of a phase's steps; the same for the same seed. Each part has its own streams."""
    streams = []
    for part in range(PARTS):
        rng = np.random.default_rng((seed, 3, first, part))
        reads = decisions_data.batches(rng, STATES, QUESTIONS)
        canvases = batches(rng, ROWS, canvas, phase.shares)
        noise = torch.Generator().manual_seed(int(rng.integers(2**62)))
        streams.append((reads if part < phase.reads else itertools.repeat(None), canvases, noise))
    while True:
        yield [Part(next(reads), next(canvases), noise) for reads, canvases, noise in streams]


def gradients(stage: Stage, part: Part, phase: Phase) -> Gradients:
    """The part's gradients, and its losses by name."""
    losses = canvas_losses(stage.network, part.canvases, part.noise)
    total = losses["canvas"] + phase.reply * losses["reply"] + ENCODER_WEIGHT * losses["prompt"]
    if phase.copies:
        total = total + phase.copies * (losses["copy, reply"] + losses["copy, canvas"])
    if part.reads is not None:
        reads = read_losses(stage.network, part.reads)
        for name in (*WEIGHTS, *ALL_LOOKS):
            total = total + READS_WEIGHT * WEIGHTS.get(name, LOOK_WEIGHT) * reads[name]
        losses |= {"slot": reads["slot"], "options": reads["options"]}
    return stage.gradients(total, losses)


def train(
    network: Transformer,
    steps: int = STEPS,
    seed: int = 0,
    report: Report = print,
    every: int = 100,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Trains the network of the second stage, in place; the same seed and torch give the same
    weights."""
    stage, start = Stage(network), time.perf_counter()
    smooth: dict[str, float] = {}
    with fast_ops(), ThreadPoolExecutor(PARTS) as workers:
        for phase in phases(steps):
            rows = parts(seed, network.config.canvas_length, phase, stage.done)
            while stage.done < phase.until:
                work = [partial(gradients, stage, part, phase) for part in next(rows)]
                losses = stage.step(work, phase.learning_rate(stage.done), workers)
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
