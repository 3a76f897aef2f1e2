"""The embedded recipe's second stage: the trained network learns to decide.

Every step mixes reads of pinned canvases with the first stage's conversations, so that what was
learnt is not lost.  Knows no files and no command line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from sfumato.model.transformer import Transformer
from sfumato.train import decisions_data, embedded_data
from sfumato.train.decisions_data import Reads
from sfumato.train.embedded_data import Batch, Mixture
from sfumato.train.fast_ops import fast_ops
from sfumato.train.objective import ENCODER_WEIGHT, loss
from sfumato.train.part_processes import Gradients, PartProcesses
from sfumato.train.read_objective import read_losses
from sfumato.train.stage import Stage

STEPS = 5_550
STATES, QUESTIONS = 4, 4
"""States and questions about each, of each part of a step. A step has PARTS of them."""
CHATS = 12
"""Conversations of each part, in all phases that say no other number."""
PARTS = 2
WARM_UP = 100
WEIGHTS = {"slot": 1.0, "prompt": 0.3, "options": 1.0}
"""Of the losses of reads; the others, of where heads look, have LOOK_WEIGHT."""
LOOK_WEIGHT = 0.5
FIRST_ASKED = 0.1
"""Of the questions in conversations, those that people ask first."""

Report = Callable[[str], None]


class Phase(NamedTuple):
    """Steps up to `until`, with a stream of data of their own. The rate is that of a cosine from
    `peak` at step `start` down to 2 % of it at step `end`; `looks`: the losses of where heads look;
    labels: as `read_losses` takes it; chats: conversations of each part; sudoku: their share of
    Sudoku."""

    until: int
    peak: float
    start: int
    end: int
    looks: tuple[str, ...]
    labels: bool = True
    chats: int = CHATS
    sudoku: float = 0.35

    def learning_rate(self, step: int) -> float:
        """With a linear warm-up of the stage's first steps."""
        done = (step - self.start) / (self.end - self.start)
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.peak * min(1.0, (step + 1) / WARM_UP) * (0.02 + 0.98 * cosine)


LOOKS = ("words", "looks", "labels", "evidence", "turns")
ALL_LOOKS = (*LOOKS, "numbers")
PHASES = (  # a look was added where a figure stood still
    Phase(750, 2e-3, 0, 2400, ("words",), labels=False, chats=5),
    Phase(1000, 2e-3, 0, 2150, ("words", "looks"), labels=False, chats=5),
    Phase(1250, 2e-3, 0, 2100, ("words", "looks", "turns"), labels=False, chats=5),
    Phase(2150, 1.2e-3, 1250, 2150, LOOKS, chats=5),
    Phase(2500, 1.2e-3, 2150, 6650, LOOKS, chats=8, sudoku=0.3),
    Phase(3250, 1.2e-3, 2150, 6650, ALL_LOOKS, chats=8, sudoku=0.3),
    Phase(4750, 1.1e-3, 3250, 4750, ALL_LOOKS, sudoku=0.2),
    Phase(STEPS, 8e-4, 4750, STEPS, ALL_LOOKS, chats=24, sudoku=0.6),  # brings hard grids back
)


def phases(steps: int) -> tuple[Phase, ...]:
    """Those of the recipe; other numbers of steps have one."""
    return PHASES if steps == STEPS else (Phase(steps, 2e-3, 0, steps, ALL_LOOKS, chats=CHATS),)


class Part(NamedTuple):
    """What one process computes of a step."""

    reads: Reads
    chats: Batch
    noise: torch.Generator


def rows(seed: int, canvas: int, phase: Phase, first: int, part: int) -> Iterator[Part]:
    """The rows of one part of a phase's steps; the same for the same arguments. first: the phase's
    first step."""
    mixture = Mixture(phase.sudoku, FIRST_ASKED)
    rng = np.random.default_rng((seed, first, part))
    reads = decisions_data.batches(rng, STATES, QUESTIONS)
    chats = embedded_data.batches(rng, phase.chats, canvas, lambda step: mixture)
    noise = torch.Generator().manual_seed(int(rng.integers(2**62)))
    while True:
        yield Part(next(reads), next(chats), noise)


def gradients(stage: Stage, part: Part, phase: Phase) -> Gradients:
    """The part's gradients, and its losses by name; "canvas" is that of the conversations."""
    losses = read_losses(stage.network, part.reads, phase.labels)
    canvas, encoder = loss(stage.network, *part.chats, part.noise)
    total = canvas + ENCODER_WEIGHT * encoder
    for name in (*WEIGHTS, *phase.looks):
        total = total + WEIGHTS.get(name, LOOK_WEIGHT) * losses[name]
    return stage.gradients(total, losses | {"canvas": canvas})


def train(
    network: Transformer,
    steps: int = STEPS,
    seed: int = 0,
    report: Report = print,
    every: int = 100,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Trains the network of a first stage, in place; the same seed and torch give the same weights.
    Each part of a step has a process of its own, with one thread."""
    stage, start = Stage(network), time.perf_counter()
    smooth: dict[str, float] = {}
    canvas = network.config.canvas_length
    for phase in phases(steps):

        def work(part: int, phase: Phase = phase, first: int = stage.done) -> Iterator[Gradients]:
            each = rows(seed, canvas, phase, first, part)
            return (gradients(stage, some, phase) for some in each)

        with fast_ops(), PartProcesses(stage.learned, work, PARTS) as parts:
            while stage.done < phase.until:
                losses = stage.step(parts.step(), phase.learning_rate(stage.done))
                smooth = {k: 0.97 * smooth.get(k, x) + 0.03 * x for k, x in losses.items()}
                progress(stage.done, steps)
                if stage.done % every == 0:
                    spent = time.perf_counter() - start
                    report(
                        f"decisions, step {stage.done} of {steps}: slot {smooth['slot']:.4f}, "
                        f"options {smooth['options']:.4f}, canvas {smooth['canvas']:.4f}, "
                        f"{spent / stage.done * 1e3:.0f} ms a step, {spent / 60:.1f} min"
                    )
