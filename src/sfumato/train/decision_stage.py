"""The embedded recipe's second stage: the trained network learns to decide.

Every step mixes reads of pinned canvases with the first stage's conversations, so that what was
learnt is not lost.  Knows no files and no command line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sfumato.model.transformer import Transformer
from sfumato.train import decisions_data, embedded_data
from sfumato.train.decisions_data import Reads
from sfumato.train.embedded_data import Batch, Mixture
from sfumato.train.fast_ops import fast_ops
from sfumato.train.objective import ENCODER_WEIGHT, loss
from sfumato.train.read_objective import read_losses

STEPS = 5_550
STATES, QUESTIONS = 4, 4
"""States and questions about each, of each part of a step. A step has PARTS of them."""
CHATS = 12
"""Conversations of each part, in all phases that say no other number."""
PARTS = 2
WARM_UP = 100
CLIP = 1.0
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


MATRICES = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
"""Ends of the names of those parameters that Muon trains; AdamW does the others."""


class Part(NamedTuple):
    """What one worker computes of a step."""

    reads: Reads
    chats: Batch
    noise: torch.Generator


def parts(seed: int, canvas: int, phase: Phase, first: int = 0) -> Iterator[list[Part]]:
    """The rows of a phase's steps; the same for the same seed. Each part has its own streams."""
    mixture = Mixture(phase.sudoku, FIRST_ASKED)
    streams = []
    for part in range(PARTS):
        rng = np.random.default_rng((seed, first, part))
        streams.append(
            (
                decisions_data.batches(rng, STATES, QUESTIONS),
                embedded_data.batches(rng, phase.chats, canvas, lambda step: mixture),
                torch.Generator().manual_seed(int(rng.integers(2**62))),
            )
        )
    while True:
        yield [Part(next(reads), next(chats), noise) for reads, chats, noise in streams]


def gradients(
    network: Transformer, learned: Sequence[Tensor], part: Part, phase: Phase
) -> tuple[tuple[Tensor, ...], dict[str, float]]:
    """The part's gradients, and its losses by name; "canvas" is that of the conversations."""
    losses = read_losses(network, part.reads, phase.labels)
    canvas, encoder = loss(network, *part.chats, part.noise)
    total = canvas + ENCODER_WEIGHT * encoder
    for name in (*WEIGHTS, *phase.looks):
        total = total + WEIGHTS.get(name, LOOK_WEIGHT) * losses[name]
    # Without a soft embedding, what reads it has no gradient.
    of_parameters = torch.autograd.grad(total, learned, allow_unused=True, materialize_grads=True)
    return of_parameters, {
        name: value.item() for name, value in (losses | {"canvas": canvas}).items()
    }


class Stage:
    """The network with its optimiser: what a step changes."""

    def __init__(self, network: Transformer) -> None:
        self.network, self.done = network, 0
        self.learned = [p for p in network.parameters() if p.requires_grad]
        matrices = [p for name, p in network.named_parameters() if name.endswith(MATRICES)]
        others = [p for p in self.learned if all(p is not matrix for matrix in matrices)]
        self.optimisers: tuple[torch.optim.Optimizer, ...] = (
            # Equal steps in all directions of a matrix: reads were learnt in fewer steps with it.
            torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
        )

    def step(self, rows: list[Part], phase: Phase, workers: ThreadPoolExecutor) -> dict[str, float]:
        """One step on the mean of the parts; returns the losses, mean."""
        work = [workers.submit(gradients, self.network, self.learned, part, phase) for part in rows]
        results = [each.result() for each in work]
        for parameter, *each in zip(self.learned, *(grads for grads, _ in results), strict=True):
            parameter.grad = sum(each[1:], each[0]) / len(each)
        torch.nn.utils.clip_grad_norm_(self.learned, CLIP)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = phase.learning_rate(self.done)
            optimiser.step()
        self.done += 1
        losses = [each for _, each in results]
        return {name: sum(each[name] for each in losses) / len(losses) for name in losses[0]}


def train(
    network: Transformer,
    steps: int = STEPS,
    seed: int = 0,
    report: Report = print,
    every: int = 100,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Trains the network of a first stage, in place; the same seed and torch give the same weights.
    Each part of a step has a thread of its own, so that more threads inside of operations do not
    help."""
    stage, start = Stage(network), time.perf_counter()
    smooth: dict[str, float] = {}
    with fast_ops(), ThreadPoolExecutor(PARTS) as workers:
        for phase in phases(steps):
            rows = parts(seed, network.config.canvas_length, phase, stage.done)
            while stage.done < phase.until:
                losses = stage.step(next(rows), phase, workers)
                smooth = {k: 0.97 * smooth.get(k, x) + 0.03 * x for k, x in losses.items()}
                progress(stage.done, steps)
                if stage.done % every == 0:
                    spent = time.perf_counter() - start
                    report(
                        f"decisions, step {stage.done} of {steps}: slot {smooth['slot']:.4f}, "
                        f"options {smooth['options']:.4f}, canvas {smooth['canvas']:.4f}, "
                        f"{spent / stage.done * 1e3:.0f} ms a step, {spent / 60:.1f} min"
                    )
