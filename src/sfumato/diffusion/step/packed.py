"""What the host learns of a step: one tensor for all rows, and one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.diffusion.step.update import Update

DONE, CONVERGED, NOT_FINITE, FROZEN = 1, 2, 4, 8
"""Flags of a row. FROZEN: it was done before the step, which changed nothing in it."""
HEADER = 2  # words of a row before those of its positions: steps done, flags


def pack(new: Update) -> Tensor:
    """int32 [R, words] of a step; `unpack` reads them. Token ids fit 32 bits; floats are carried as
    their bits. Of a row that was done before, only the flag FROZEN counts."""
    flags = (
        new.done * DONE
        + new.converged * CONVERGED
        + (~new.entropy.isfinite()).any(dim=1) * NOT_FINITE
        + new.frozen * FROZEN
    )
    return torch.cat(
        (
            torch.stack((new.step, flags), dim=1).int(),
            new.history[:, -1].int(),
            new.entropy.view(torch.int32),
            new.accepted.int(),
            new.top_ids.flatten(1).int(),
            new.top_probs.contiguous().view(torch.int32).flatten(1),
        ),
        dim=1,
    )


def row_words(width: int, top: int) -> int:
    """The words of a row; top: most probable tokens of a position."""
    return HEADER + width * (3 + 2 * top)


@dataclass(frozen=True)
class Unpacked:
    """A packed step on the host, R rows of width W."""

    steps: Sequence[int]
    flags: Sequence[int]
    argmax: Tensor  # int64 [R, W]
    entropy: Tensor  # float32 [R, W]
    accepted: Tensor  # bool [R, W]
    top_ids: Tensor  # int64 [R, W, top]
    top_probs: Tensor  # float32 [R, W, top]


def unpack(words: Tensor, rows: int, width: int) -> Unpacked:
    """words: int32, those of one part, on the host."""
    words = words.view(rows, -1)
    steps, flags = words[:, :HEADER].t().tolist()
    top = ((words.shape[1] - HEADER) // width - 3) // 2
    argmax, entropy, accepted, ids, probs = words[:, HEADER:].split(
        (width, width, width, top * width, top * width), dim=1
    )
    return Unpacked(
        steps,
        flags,
        argmax.long(),
        entropy.contiguous().view(torch.float32),
        accepted.bool(),
        ids.long().unflatten(1, (width, top)),
        probs.contiguous().view(torch.float32).unflatten(1, (width, top)),
    )
