"""The plain decision: one at a time, short enough to read at once.

It is the library's path, and the specification that the engine's decisions are tested against.
"""

from __future__ import annotations

import torch

from sfumato.diffusion.constraints.decision_plan import DecisionPlan
from sfumato.diffusion.constraints.decision_progress import DecisionProgress
from sfumato.diffusion.constraints.read import take_turns
from sfumato.model.network import PREFILL_CHUNK, Network


def decide(network: Network, plan: DecisionPlan) -> DecisionProgress:
    """Encodes the state and reads all questions; the progress has the answers."""
    slot = network.new_slot(max(1, len(plan.prefix)))
    if plan.reads:
        network.encode([torch.tensor(plan.prefix)], [slot])
    progress = DecisionProgress(plan)
    while not progress.done:
        take_turns(network, progress.turns(slot, PREFILL_CHUNK))
        progress.collect()
    return progress
