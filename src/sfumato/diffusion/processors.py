"""Logit processors: what may act on the softcapped scores before the temperature.

Draw, entropy, stop test and soft embedding all see the result.  A processor gets one row's scores
a chunk of the vocabulary at a time, so it must be a function of each token's own score and id,
and of the canvas that the scores are of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class CanvasView:
    """What logit processors see of one row before a step; all tensors on the scores' device."""

    step: Tensor  # int64 []: 1.., of the step to come
    tokens: Tensor  # int64 [length]: the canvas that the forward read
    history: Tensor  # int64 [rows, length]: as in `StepView`
    reply: Tensor  # int64 [n]: the reply's tokens before this canvas


class LogitProcessor(Protocol):
    """Changes one row's scores."""

    def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Tensor:
        """scores float32 [length, n] of the token ids first_id.. → the same shape; -inf bans."""
        ...


@dataclass(frozen=True)
class Banned:
    """Tokens that may not stand at a canvas's first so many positions."""

    positions: int
    ids: Collection[int]


def banned_by(processor: LogitProcessor, reply: int, length: int) -> Banned | None:
    """What a processor bans on a canvas of `length` positions after `reply` tokens; None where it
    does more than that, or does not say. One that only bans costs next to nothing, and says so by
    a method `banned(reply, length) -> Banned | None`."""
    method = getattr(processor, "banned", None)
    banned: Banned | None = None if method is None else method(reply, length)
    return banned


@dataclass(frozen=True)
class LogitBias:
    """Adds a number to the scores of some tokens, everywhere; -inf bans them."""

    bias: Mapping[int, float]

    def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Tensor:
        in_chunk = {i - first_id: b for i, b in self.bias.items()}
        in_chunk = {i: b for i, b in in_chunk.items() if 0 <= i < scores.shape[-1]}
        if not in_chunk:
            return scores
        ids = torch.tensor(list(in_chunk), device=scores.device)
        values = torch.tensor(list(in_chunk.values()), dtype=scores.dtype, device=scores.device)
        return scores.index_add(-1, ids, values.expand(*scores.shape[:-1], -1))

    def banned(self, reply: int, length: int) -> Banned | None:
        only_bans = all(bias == float("-inf") for bias in self.bias.values())
        return Banned(length, self.bias.keys()) if only_bans else None


@dataclass(frozen=True)
class MinTokens:
    """Bans end tokens at the first `count` positions of the reply."""

    count: int
    end_ids: tuple[int, ...]
    _ban: LogitBias = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ban", LogitBias(dict.fromkeys(self.end_ids, float("-inf"))))

    def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Tensor:
        early = self.banned(len(view.reply), scores.shape[-2]).positions
        if early == 0:
            return scores
        banned = self._ban.process(scores[..., :early, :], first_id, view)
        return torch.cat((banned, scores[..., early:, :]), dim=-2)

    def banned(self, reply: int, length: int) -> Banned:
        return Banned(max(0, min(self.count - reply, length)), self.end_ids)
