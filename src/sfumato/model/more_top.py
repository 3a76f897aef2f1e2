"""More of a position's most probable tokens than the softmax kernels keep.

Changes no other result of a pass over the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.model.most_probable import MostProbable
from sfumato.ops.online_softmax import TOP, SoftmaxState


class MoreTop:
    """Gathers the tokens chunk by chunk, as `MostProbable` does."""

    def __init__(self, best: MostProbable) -> None:
        self.which, self.offer, self.gathered = best.which, best.offer, best.gathered
        self._max_count = best.max_count

    @classmethod
    def of(cls, count: Tensor | None, chunk: int, vocab_size: int) -> MoreTop | None:
        """count: int64 [positions], how many tokens; None where TOP suffice for all."""
        if count is None:
            return None
        count = count.clamp(max=vocab_size).masked_fill(count <= TOP, 0)
        return cls(MostProbable(count, chunk)) if vocab_size > TOP and count.any() else None

    def appended(
        self, state: SoftmaxState, scores: Tensor, ids: Tensor, top_ids: Tensor, top_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The kernels' tokens and their probabilities [positions, TOP], and after them the
        gathered `ids` with their `scores` over temperature; zeros at positions that ask for no more
        than TOP."""
        first_ids, first_probs = top_ids[self.which], top_probs[self.which]
        repeated = (ids[..., None] == first_ids[:, None]).any(dim=-1)
        rest = scores.masked_fill(repeated, float("-inf"))
        order = rest.argsort(dim=1, descending=True, stable=True)[:, : self._max_count - TOP]
        peak, total = state.max[self.which, None], state.sum_exp[self.which, None]
        probs = (rest.gather(1, order) - peak).exp() / total
        # Gathered by their products, which the softcap may round into another order.
        probs = torch.minimum(probs, first_probs[:, -1:])
        more_ids = top_ids.new_zeros(len(top_ids), order.shape[1])
        more_probs = top_probs.new_zeros(more_ids.shape)
        more_ids[self.which], more_probs[self.which] = ids.gather(1, order), probs
        return torch.cat((top_ids, more_ids), 1), torch.cat((top_probs, more_probs), 1)
