"""Attention of a step in which some rows denoise and others commit, in shapes that no data changes.

A row commits where it has a number of tokens to commit, and denoises where that number is 0: a
tensor on the device, as slots and lengths are.  Used where steps are captured; elsewhere commits
are encoded one row after another (`EncodeRows`), which is faster on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.cache import KVPool
from sfumato.ops.narrow_cache import is_narrow, stored_as, widened


@dataclass(frozen=True)
class StepPart:
    """Rows of one width whose prefixes stand in one pool, each in a slot of its own."""

    pool: KVPool
    slots: Tensor  # int64 [rows]
    width: int  # positions of a row
    lengths: Tensor  # int64 [rows]: how many of them, the first ones, take part; 1 at least
    commits: Tensor  # int64 [rows]: as many as `lengths` where the row commits, else 0

    def encodes(self) -> Tensor:
        """bool [rows · width, 1]: which tokens are in the encode phase."""
        return (self.commits > 0)[:, None].expand(-1, self.width).reshape(-1, 1)


class StepRows:
    """Attends, and stores what rows commit. The lengths of the prefixes stay as they are: who
    commits advances them afterwards.

    Each forward needs a new object, since the object reads the prefix lengths when it is made.
    """

    def __init__(self, part: StepPart) -> None:
        self.part = part
        self._first = part.pool.lengths.index_select(0, part.slots)

    def positions(self) -> Tensor:
        """int64 [tokens]: each token's position in its row."""
        places = torch.arange(self.part.width, device=self._first.device)
        return (self._first[:, None] + places).flatten()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        part, pool = self.part, self.part.pool
        window = pool.sliding_window if pool.layers[layer].sliding else None
        q, k, v = (x.unflatten(0, (-1, part.width)) for x in (q, k, v))
        stored = pool.keys[layer], pool.values[layer]
        rows = part.slots, self._first, part.lengths, part.commits
        out = ops.phase_attention(q, *self._seen(k, v, stored[0].dtype), *stored, *rows, window)
        # A full layer has no place for positions past its capacity; who commits has asked for room.
        for held, new in zip(stored, (k, v), strict=True):
            ops.write_cache(held, new, part.slots, self._first, part.commits)
        return out.flatten(0, 1)

    def _seen(self, k: Tensor, v: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor]:
        """New keys and values as they are seen: in a narrow cache, who commits sees them as later
        tokens will, as `EncodeRows` has it."""
        if not is_narrow(stored):
            return k, v
        commits = (self.part.commits > 0)[:, None, None, None]
        rounded = (widened([stored_as(x, stored)], x.dtype)[0] for x in (k, v))
        seen_k, seen_v = (torch.where(commits, r, x) for r, x in zip(rounded, (k, v), strict=True))
        return seen_k, seen_v
