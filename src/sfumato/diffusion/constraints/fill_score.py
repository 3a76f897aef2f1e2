"""How probable the tokens of a hole and of the text after them are, read from left to right."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sfumato.diffusion.causal import row_log_likelihoods
from sfumato.diffusion.constraints.fill_progress import ScoreTask
from sfumato.model.cache import Slot
from sfumato.model.network import Network


def likelihoods(network: Network, slot: Slot, tasks: Sequence[ScoreTask]) -> list[float]:
    """The log-likelihood of each task's tokens, in nats, after the prefix that the slot holds.
    Raises FloatingPointError where the model's scores are no numbers."""
    slots, rows, firsts = [], [], []
    for task in tasks:
        # A slot has no hidden state of its last token, from which the token after it is scored.
        before = task.prefix if task.first == 0 else []
        slots.append(network.new_slot(1) if before else slot)
        rows.append(torch.tensor([*before, *task.ids]))
        firsts.append(len(before) + task.first - 1)  # the row's first token is not scored
    scores = row_log_likelihoods(network, slots, rows)
    return [float(row[first:].sum()) for row, first in zip(scores, firsts, strict=True)]
