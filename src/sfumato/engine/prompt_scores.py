"""The log probabilities of a prompt's own tokens, gathered while the prompt is encoded.

Knows hidden states and ids of one row; no slots and no threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.diffusion.causal import check_finite
from sfumato.model.head import VocabularyHead
from sfumato.model.token_scores import TokenScores, token_scores
from sfumato.options.limits import MOST_TOP


@dataclass(frozen=True)
class PromptScoring:
    """What is wanted of each token of a prompt, beside its log probability. Raises ValueError for
    more tokens than there may be."""

    top: int = 0  # most probable tokens
    ranks: bool = False  # the token's own rank, which takes a second pass over the vocabulary

    def __post_init__(self) -> None:
        if type(self.top) is not int or not 0 <= self.top <= MOST_TOP:
            raise ValueError(f"top: must be a whole number from 0 to {MOST_TOP}, got {self.top!r}")


@dataclass(frozen=True)
class PromptScores:
    """The tokens of a prompt, and the scores of all but the first, which nothing comes before."""

    ids: Sequence[int]
    scores: TokenScores | None  # of ids[1:], on the host; None where these are none


class PromptScorer:
    """Gathers the scores of one prompt, piece by piece."""

    def __init__(self, scoring: PromptScoring, ids: Sequence[int]) -> None:
        self._scoring, self._ids = scoring, ids
        self._parts: list[TokenScores] = []
        self._scored = 0  # tokens from whose hidden states the next one has been scored

    @property
    def least_encoded(self) -> int:
        """Tokens at the prompt's end whose hidden states are wanted: all."""
        return len(self._ids)

    @property
    def done(self) -> bool:
        return self._scored >= len(self._ids) - 1

    def reset(self) -> None:
        """The prompt is encoded from its beginning again."""
        self._parts, self._scored = [], 0

    def add(self, head: VocabularyHead, start: int, hidden: Tensor, together: int) -> None:
        """Takes the hidden states [n, hidden] of the prefix's positions from `start` on, of which
        those that score no token of the prompt are left aside; together: positions of a pass over
        the vocabulary. Raises FloatingPointError where the scores are no numbers."""
        stop = min(start + len(hidden), len(self._ids) - 1)
        if stop <= start:
            return
        assert start == self._scored, "pieces come in order"
        following = torch.tensor(self._ids[start + 1 : stop + 1], device=hidden.device)
        top, ranks = self._scoring.top, self._scoring.ranks
        scores = token_scores(head, hidden[: stop - start], following, top, ranks, together)
        check_finite(scores.log_probs)
        self._parts.append(scores.to("cpu"))
        self._scored = stop

    def scores(self) -> PromptScores | None:
        """Those of the whole prompt; None while some are missing."""
        if not self.done:
            return None
        return PromptScores(self._ids, TokenScores.joined(self._parts) if self._parts else None)
