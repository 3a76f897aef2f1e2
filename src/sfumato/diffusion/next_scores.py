"""One causal step: the encode phase of some tokens, and the head's scores of what follows them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.model.attention import EncodeRows
from sfumato.model.cache import Slot
from sfumato.model.network import Network


@torch.no_grad()
def next_scores(network: Network, slot: Slot, ids: Sequence[int]) -> Tensor:
    """Appends ids, one at least, to a slot's prefix; returns float32 [vocabulary]: the softcapped
    scores of the token that follows them. Empties the slot where it fails."""
    attend = EncodeRows([slot], [len(ids)])
    tokens = torch.tensor(ids, device=network.device)
    positions = attend.positions(network.device)
    try:
        hidden = network.transformer.encode(tokens, positions, attend, network.dtype)
    except BaseException:
        slot.reset()
        raise
    slot.advance(len(ids))
    return network.head.logits(hidden[-1:])[0]
