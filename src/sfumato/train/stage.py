"""A network with its optimisers: what a step of the later stages changes.

Knows no data and no objective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sfumato.model.transformer import Transformer
from sfumato.train.part_processes import Gradients

CLIP = 1.0
MATRICES = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
"""Ends of the names of those parameters that Muon trains; AdamW does the others."""


class Stage:
    """The network with its optimisers, and the number of steps done."""

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

    def gradients(self, total: Tensor, losses: dict[str, Tensor]) -> Gradients:
        """The gradients of a part's total loss."""
        # Without a soft embedding, what reads it has no gradient.
        of_parameters = torch.autograd.grad(
            total, self.learned, allow_unused=True, materialize_grads=True
        )
        return of_parameters, {name: value.item() for name, value in losses.items()}

    def step(self, results: Sequence[Gradients], rate: float) -> dict[str, float]:
        """One step at this learning rate, on the mean of the parts' gradients; returns the mean of
        each loss over the parts that have it."""
        for parameter, *each in zip(self.learned, *(grads for grads, _ in results), strict=True):
            parameter.grad = sum(each[1:], each[0]) / len(each)
        torch.nn.utils.clip_grad_norm_(self.learned, CLIP)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
        self.done += 1
        return dict(_means([losses for _, losses in results]))


def _means(losses: Sequence[dict[str, float]]) -> Iterator[tuple[str, float]]:
    for name in dict.fromkeys(name for each in losses for name in each):
        values = [each[name] for each in losses if name in each]
        yield name, sum(values) / len(values)
