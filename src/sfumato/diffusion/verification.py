"""What the causal mode finds of a canvas that another phase has written: a second reader with the
same weights.

Each token of a settled canvas has a log probability by each of the two phases: by the last
denoising step, which saw the whole canvas, and by the causal mode, which saw what comes before the
token. Knows ids and no texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from sfumato.diffusion.canvas import Draft
from sfumato.model.scores import TokenScores

DOUBT = math.log(10)
"""Nats from which a token is in doubt: the causal mode gives it a probability of a tenth at most.
docs/verification.md has the measurement."""


@dataclass(frozen=True)
class CanvasVerification:
    """The scores of a canvas's tokens, those that it adds to the reply and an end token behind
    them: logarithms of probabilities in nats, one number for each token."""

    canvas: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # by the causal mode
    ranks: tuple[int, ...]  # there; 1: its most probable token
    preferred: tuple[int, ...]  # its most probable tokens
    # By the canvas's last step, whose temperature is in them; None: not among the most probable.
    canvas_log_probs: tuple[float | None, ...]
    canvas_entropy: tuple[float, ...]  # of that step, in nats

    @classmethod
    def of(
        cls, canvas: int, ids: Sequence[int], scores: TokenScores, last: Draft
    ) -> CanvasVerification:
        """scores: of the ids, with ranks; last: the draft of the canvas's last step."""
        count = len(ids)
        top = zip(last.top_ids[:count].tolist(), last.top_probs[:count].tolist(), strict=True)
        return cls(
            canvas,
            tuple(ids),
            tuple(scores.log_probs.tolist()),
            tuple(scores.ranks.tolist()),
            tuple(scores.top_ids[:, 0].tolist()),
            tuple(_log_of(token, *row) for token, row in zip(ids, top, strict=True)),
            tuple(last.entropy[:count].tolist()),
        )

    @property
    def agreement(self) -> float:
        """The share of tokens that are the causal mode's most probable ones."""
        return sum(rank == 1 for rank in self.ranks) / len(self.ranks)

    @property
    def log_likelihood(self) -> float:
        """The log-likelihood of all tokens together, by the causal mode, in nats."""
        return math.fsum(self.log_probs)

    @property
    def doubted(self) -> tuple[bool, ...]:
        """Which tokens are in doubt."""
        return tuple(-log >= DOUBT for log in self.log_probs)

    @property
    def doubted_runs(self) -> list[range]:
        """The places of adjacent tokens in doubt."""
        doubted = self.doubted
        groups = groupby(range(len(doubted)), doubted.__getitem__)
        runs = [list(run) for is_in, run in groups if is_in]
        return [range(run[0], run[-1] + 1) for run in runs]


def _log_of(token: int, ids: Sequence[int], probs: Sequence[float]) -> float | None:
    """The logarithm of a token's probability, where it is among these."""
    prob = dict(zip(ids, probs, strict=True)).get(token, 0.0)
    return math.log(prob) if prob > 0 else None
