"""Which positions a token of a prefix with pictures sees.

The rule in every case is one interval of positions for each token: `first` to `last`.  Text is
causal.  Soft tokens of one picture see one another in both directions:

- "model", as the model was trained (Google's `gemma`, `gm/nn/gemma4`): in sliding layers, and no
  further than the window in either direction; full layers are causal throughout.
- "transformers", as `generate` of `transformers` 5.23 has it for DiffusionGemma: in all layers,
  and past the window.

Canvases see the whole prefix, or its last positions, whatever stands there.  Knows no caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from sfumato.ops.attention_reference import causal_bounds

ImageMask = Literal["model", "transformers"]
IMAGE_MASKS: tuple[ImageMask, ...] = get_args(ImageMask)

Span = tuple[int, int]
"""The positions of one picture's soft tokens: the first, and the one after the last."""


@dataclass(frozen=True, eq=False)
class SoftTokens:
    """One picture in a row of tokens."""

    start: int  # of the ids whose place it takes, the first one's index
    values: Tensor  # [n, text size]

    @property
    def end(self) -> int:
        return self.start + len(self.values)

    def moved(self, by: int) -> SoftTokens:
        """The same picture, so many tokens later."""
        return replace(self, start=self.start + by)


def ahead_of_pictures(end: int, start: int, pictures: Sequence[SoftTokens]) -> int:
    """Where a chunk of tokens from `start` on ends that should end at `end`: before the picture
    that would be cut, or after it where the picture is all of the chunk."""
    cut = next((each for each in pictures if each.start < end < each.end), None)
    if cut is None:
        return end
    return cut.start if cut.start > start else cut.end


def seen(
    positions: Tensor, pictures: Sequence[Span], window: int | None, rule: ImageMask = "model"
) -> tuple[Tensor, Tensor]:
    """The first and the last position that tokens see, int64 like `positions` [n].

    pictures: those of the prefix, in order, of which no two overlap; window: how many positions a
    sliding layer's token sees, its own included (None: of a full layer, all).
    """
    first, last = causal_bounds(positions, window)
    if not pictures or (window is None and rule == "model"):
        return first, last
    starts, ends = torch.tensor(pictures, device=positions.device).T.contiguous()
    number = torch.searchsorted(starts, positions, right=True) - 1  # of the last one that has begun
    start, end = starts[number.clamp(min=0)], ends[number.clamp(min=0)]
    inside = (number >= 0) & (positions < end)
    if rule == "transformers":
        first = torch.where(inside, torch.minimum(first, start), first)
        return first, torch.where(inside, end - 1, last)
    assert window is not None
    return first, torch.where(inside, torch.minimum(end - 1, positions + (window - 1)), last)


def mask_of(first: Tensor, last: Tensor, keys: Tensor) -> Tensor:
    """bool [n, m]: which of the positions `keys` int64 [m] each of n tokens sees."""
    return (keys >= first[:, None]) & (keys <= last[:, None])
