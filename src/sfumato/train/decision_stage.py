"""The embedded recipe's second stage: the trained network learns to decide.

Every step mixes reads of pinned canvases with the first stage's conversations, so that what was
learnt is not lost.  Knows no files and no command line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sfumato.model.transformer import Transformer
from sfumato.train import decisions_data, embedded_data
from sfumato.train.decisions_data import Reads
from sfumato.train.embedded_data import Batch, Mixture
from sfumato.train.fast_ops import fast_ops
from sfumato.train.objective import ENCODER_WEIGHT, loss
from sfumato.train.read_objective import read_loss

STEPS = 4_000
STATES, QUESTIONS, CHATS = 4, 4, 5
"""States, questions about each, and chat rows of each part of a step. A step has PARTS of them."""
PARTS = 2
LEARNING_RATE = 2e-3
WARM_UP = 100
CLIP = 1.0
LAST_PROMPT_WEIGHT = 0.3
"""Of the same question asked at the prompt's last position, against 1 for the slot."""
LOOK_WEIGHT = 0.5
"""Of where words, the slot, and yes and no look."""
CONVERSATIONS = Mixture(sudoku=0.35, first_asked=0.1)

Report = Callable[[str], None]


MATRICES = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
"""Ends of the names of those parameters that Muon trains; AdamW does the others."""


class Part(NamedTuple):
    """What one worker computes of a step."""

    reads: Reads
    chats: Batch
    noise: torch.Generator


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then one cosine down to 2 %."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * (0.02 + 0.98 * cosine)


def parts(seed: int, canvas: int, first: int = 0) -> Iterator[list[Part]]:
    """The steps' rows; the same for the same seed. Each part has its own streams."""
    streams = []
    for part in range(PARTS):
        rng = np.random.default_rng((seed, first, part))
        streams.append(
            (
                decisions_data.batches(rng, STATES, QUESTIONS),
                embedded_data.batches(rng, CHATS, canvas, lambda step: CONVERSATIONS),
                torch.Generator().manual_seed(int(rng.integers(2**62))),
            )
        )
    while True:
        yield [Part(next(reads), next(chats), noise) for reads, chats, noise in streams]


def gradients(
    network: Transformer, learned: Sequence[Tensor], part: Part
) -> tuple[tuple[Tensor, ...], list[float]]:
    """The part's gradients, and its losses at the slot, of options, words and chats."""
    slot, last, options, matches, look, label, clue, link = read_loss(network, *part.reads)
    canvas, encoder = loss(network, *part.chats, part.noise)
    aids = LAST_PROMPT_WEIGHT * last + options + LOOK_WEIGHT * (matches + look + label + clue + link)
    whole = slot + aids + canvas + ENCODER_WEIGHT * encoder
    # Without a soft embedding, what reads it has no gradient.
    found = torch.autograd.grad(whole, learned, allow_unused=True, materialize_grads=True)
    return found, [x.item() for x in (slot, options, matches, look, label, clue, link, canvas)]


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

    def step(self, rows: list[Part], steps: int, workers: ThreadPoolExecutor) -> np.ndarray:
        """One step on the mean of the parts; returns the four losses, mean."""
        work = [workers.submit(gradients, self.network, self.learned, part) for part in rows]
        results = [each.result() for each in work]
        for parameter, *found in zip(self.learned, *(grads for grads, _ in results), strict=True):
            parameter.grad = sum(found[1:], found[0]) / len(found)
        torch.nn.utils.clip_grad_norm_(self.learned, CLIP)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(self.done, steps)
            optimiser.step()
        self.done += 1
        return np.mean([losses for _, losses in results], axis=0)

    def state(self) -> dict[str, Any]:
        return {
            "network": self.network.state_dict(),
            "optimisers": [each.state_dict() for each in self.optimisers],
            "done": self.done,
        }

    def resume(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        for each, saved in zip(self.optimisers, state["optimisers"], strict=True):
            each.load_state_dict(saved)
        self.done = state["done"]


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
    stage, rows = Stage(network), parts(seed, network.config.canvas_length)
    start, smooth = time.perf_counter(), np.zeros(4)
    with fast_ops(), ThreadPoolExecutor(PARTS) as workers:
        while stage.done < steps:
            losses = stage.step(next(rows), steps, workers)
            smooth = losses if stage.done == 1 else 0.97 * smooth + 0.03 * losses
            progress(stage.done, steps)
            if stage.done % every == 0:
                spent = time.perf_counter() - start
                report(
                    f"decisions, step {stage.done} of {steps}: slot {smooth[0]:.4f}, options "
                    f"{smooth[1]:.4f}, words {smooth[2]:.4f}, canvas {smooth[3]:.4f}, "
                    f"{spent / stage.done * 1e3:.0f} ms a step, {spent / 60:.1f} min"
                )
