"""What one pass over the vocabulary gives of each position."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sfumato.ops.online_softmax import TOP, SoftmaxState


@dataclass(frozen=True)
class HeadStats:
    """Results of each position; leading axes are those of the hidden states."""

    argmax: Tensor  # int64 [...]; of equal scores the lowest id
    drawn: Tensor  # int64 [...]; by inverse CDF from the uniform
    entropy: Tensor  # float32 [...], in nats
    top_ids: Tensor  # int64 [..., TOP], most probable first; wider where more were asked for
    top_probs: Tensor  # float32, like top_ids
    soft: Tensor  # [..., hidden]: Σ p · embedding · sqrt(hidden), in the hidden states' dtype
    logits: Tensor | None = None  # float32 [..., vocab], processed; only where asked for
    named: Tensor | None = None  # float32 [..., n]: log probabilities of n tokens that were named
    # bool [...]: where the TOP most probable tokens hold what `Skip` asks for; None: not known
    top_suffices: Tensor | None = None

    @property
    def suffices(self) -> Tensor:
        """`top_suffices`, False where it is not known."""
        if self.top_suffices is None:
            return torch.zeros_like(self.argmax, dtype=torch.bool)
        return self.top_suffices

    def __getitem__(self, index: int | slice) -> HeadStats:
        """The statistics of one row, or of some, along the first axis."""
        values = (getattr(self, field.name) for field in fields(self))
        return HeadStats(*(None if v is None else v[index] for v in values))  # type: ignore[arg-type]


PLAIN = "argmax", "drawn", "entropy", "top_ids", "top_probs", "soft"
"""Names of the statistics that every position has."""


def statistics(
    state: SoftmaxState,
    drawn: Tensor,
    soft: Tensor,
    dtype: torch.dtype,
    kept: list[Tensor],
    vocab: int,
) -> HeadStats:
    """Those of a pass that has ended: drawn int64 [positions]; soft float32 [positions, hidden]:
    Σ mass · embedding, relative to the peak; dtype: that of the soft embedding; kept: the chunks of
    the logits."""
    logits = torch.cat(kept, 1) if kept else None
    entropy = (state.sum_exp.log() - state.sum_shifted / state.sum_exp).clamp(min=0)
    soft = (soft / state.sum_exp[:, None] * soft.shape[1] ** 0.5).to(dtype)
    named = min(TOP, vocab)
    probs = (state.top[:, :named] - state.max[:, None]).exp() / state.sum_exp[:, None]
    return HeadStats(state.argmax, drawn, entropy, state.top_ids[:, :named], probs, soft, logits)
