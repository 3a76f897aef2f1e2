"""One vector of a prompt's hidden states: their mean, or the last token's, of length 1.

Gathered while the prompt is encoded. Knows hidden states of one row; no slots and no threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.model.head import VocabularyHead
from sfumato.options.kinds import POOLINGS


@dataclass(frozen=True)
class Pooling:
    """How the hidden states of a prompt, after the final norm, become one vector. Raises ValueError
    for another word."""

    kind: str = "mean"  # of POOLINGS

    def __post_init__(self) -> None:
        if self.kind not in POOLINGS:
            words = " or ".join(map(repr, POOLINGS))
            raise ValueError(f"pooling: must be {words}, got {self.kind!r}")


class HiddenPooler:
    """Pools the hidden states of one prompt, piece by piece."""

    def __init__(self, pooling: Pooling, tokens: int) -> None:
        """tokens: of the prompt."""
        self._kind, self._tokens = pooling.kind, tokens
        self._sum: Tensor | None = None  # float32 [hidden], on the network's device
        self._taken = 0

    @property
    def least_encoded(self) -> int:
        """Tokens at the prompt's end whose hidden states are wanted."""
        return self._tokens if self._kind == "mean" else 1

    @property
    def done(self) -> bool:
        return self._taken == self._tokens

    def reset(self) -> None:
        """The prompt is encoded from its beginning, or from what a slot holds of it."""
        self._sum, self._taken = None, 0

    def add(self, head: VocabularyHead, start: int, hidden: Tensor, together: int) -> None:
        """Takes the hidden states [n, hidden] of the prompt's positions from `start` on. head,
        together: as of a `PromptScorer`; not used."""
        self._taken = start + len(hidden)
        if self._kind == "mean":
            part = hidden.sum(dim=0, dtype=torch.float32)
            self._sum = part if self._sum is None else self._sum + part
        elif self.done:
            self._sum = hidden[-1].float()

    def vector(self) -> Tensor | None:
        """The vector float32 [hidden] of length 1, on the host; None while hidden states are
        missing. Raises FloatingPointError where it is of no numbers."""
        if not self.done or self._sum is None:
            return None
        vector = self._sum.cpu()
        if not vector.isfinite().all():
            raise FloatingPointError("the hidden states of the prompt are no finite numbers")
        # The mean's divisor is part of its length.
        return torch.nn.functional.normalize(vector, dim=0)
