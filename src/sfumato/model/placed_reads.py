"""Attention of canvases whose questions have places in a pool, in shapes that no data changes.

As `ReadCanvasRows`, of rows of one width: one operation serves a layer, whatever the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.cache import KVPool
from sfumato.model.question_pool import QuestionPool


@dataclass(frozen=True)
class ReadPart:
    """Rows of one width whose prefixes stand in one pool. Its tensors may keep their addresses from
    forward to forward; a forward reads the lengths of the prefixes from the pool."""

    pool: KVPool
    questions: QuestionPool
    slots: Tensor  # int64 [rows]; rows may share a slot
    starts: Tensor  # int64 [rows]: where the question of each row begins in its pool
    counts: Tensor  # int64 [rows]: how many tokens it has
    used: Tensor  # int64 [1]: how many rows are read; those after them see their canvas alone
    width: int  # positions of a canvas


class PlacedReadRows:
    """Each forward needs a new object, since the object reads the prefix lengths when it is
    made."""

    def __init__(self, part: ReadPart) -> None:
        self.part = part
        first = part.pool.lengths.index_select(0, part.slots)
        unused = torch.arange(len(first), device=first.device) >= part.used
        self._first = first.masked_fill(unused, 0)

    def positions(self) -> Tensor:
        """int64 [tokens]: each token's position in its row."""
        places = torch.arange(self.part.width, device=self._first.device)
        return ((self._first + self.part.counts)[:, None] + places).flatten()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        part, pool = self.part, self.part.pool
        q, k, v = (x.unflatten(0, (-1, part.width)) for x in (q, k, v))
        window = pool.sliding_window if pool.layers[layer].sliding else None
        beside = part.questions
        held = pool.keys[layer], pool.values[layer], part.slots, self._first
        own = beside.keys[layer], beside.values[layer], part.starts, part.counts
        prefixes, questions = ops.Prefixes(*held, window), ops.Questions(*own, beside.longest)
        return ops.read_attention(q, k, v, prefixes, questions).flatten(0, 1)
