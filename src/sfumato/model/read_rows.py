"""Attention of reads: tokens after a slot's prefix whose keys and values the slot does not get.

Many reads see one slot without copies of it.  Each keeps the keys and values of its own tokens, in
parts, for as long as its canvases are read.  Rows are attended one after another, in the shape that
each has alone, so that a row's result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.cache import Slot


class Scratch:
    """Keys and values of the tokens that follow a slot's prefix, in one read."""

    def __init__(self, slot: Slot) -> None:
        """The slot's prefix must stay as it is while the scratch is used."""
        self.slot, self.length = slot, 0
        layers = len(slot.pool.layers)
        # Of each layer parts [kv_heads, n, d]; sliding layers keep what later tokens can see.
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.slot.length + self.length

    def append(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Takes keys and values of the next tokens, of every layer [kv_heads, n, d]."""
        self.length += parts[0][0].shape[1]
        for layer, (key, value) in enumerate(parts):
            stored = self.slot.pool.keys[layer].dtype
            keys, values = self.keys[layer], self.values[layer]
            keys.append(key.to(stored))
            values.append(value.to(stored))
            window = self.slot.window(layer)
            while window and sum(part.shape[1] for part in keys[1:]) >= window - 1:
                del keys[0], values[0]


class _Rows:
    """Rows that follow prefixes and scratches, and what each of them sees of these."""

    def __init__(self, scratches: Sequence[Scratch], counts: Sequence[int]) -> None:
        """counts: tokens of each row, whose packed tokens stand one row after another."""
        self.scratches, self.counts = tuple(scratches), list(counts)
        self._positions: dict[tuple[int, bool], Tensor] = {}  # by row and kind of layer

    def positions(self, device: torch.device) -> Tensor:
        """int64 [tokens]: each token's position in its row."""
        return torch.cat(
            [
                torch.arange(scratch.end, scratch.end + count, device=device)
                for scratch, count in zip(self.scratches, self.counts, strict=True)
            ]
        )

    def _own_positions(self, scratch: Scratch, count: int, device: torch.device) -> Tensor:
        """Which positions a row's new tokens have for the mask."""
        raise NotImplementedError

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, queries: Sequence[int]
    ) -> list[Tensor]:
        """q [Σ queries, heads, d]; k and v [tokens, kv_heads, d] → each row's result."""
        outs: list[Tensor] = []
        slot, history = None, None
        rows = zip(q.split(list(queries)), k.split(self.counts), v.split(self.counts), strict=True)
        for row, (rq, rk, rv) in enumerate(rows):
            scratch = self.scratches[row]
            if scratch.slot is not slot or history is None:  # read once for all rows of a slot
                slot = scratch.slot
                history = slot.history(layer)
            old_k, old_v, old_positions = history
            window = slot.window(layer)
            own = self._own_positions(scratch, len(rk), q.device)
            seen = self._positions.get((row, window is None))
            if seen is None:
                kept = sum(part.shape[1] for part in scratch.keys[layer])
                before = torch.arange(scratch.end - kept, scratch.end, device=q.device)
                seen = torch.cat((old_positions, before, own))
                self._positions[row, window is None] = seen
            keys = (*old_k, *scratch.keys[layer], rk.transpose(0, 1))
            values = (*old_v, *scratch.values[layer], rv.transpose(0, 1))
            causal = ops.Causal(self._query_positions(own, len(rq)), seen, window)
            outs.append(ops.attend(rq, keys, values, causal))
        return outs

    def _query_positions(self, own: Tensor, count: int) -> Tensor:
        return own


class QuestionRows(_Rows):
    """Causal attention of tokens that follow what their scratches hold. `commit` appends them."""

    def __init__(self, scratches: Sequence[Scratch], counts: Sequence[int]) -> None:
        super().__init__(scratches, counts)
        self._parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.scratches]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = self._attend(layer, q, k, v, self.counts)
        self.keep(k, v)
        return torch.cat(outs)

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Keeps keys and values of a layer, [tokens, kv_heads, d], until `commit`."""
        own = zip(k.split(self.counts), v.split(self.counts), strict=True)
        for parts, (rk, rv) in zip(self._parts, own, strict=True):
            parts.append((rk.transpose(0, 1), rv.transpose(0, 1)))

    def commit(self) -> None:
        """Appends the tokens to the scratches, after all layers."""
        for scratch, parts in zip(self.scratches, self._parts, strict=True):
            scratch.append(parts)

    def _own_positions(self, scratch: Scratch, count: int, device: torch.device) -> Tensor:
        return torch.arange(scratch.end, scratch.end + count, device=device)


class ReadCanvasRows(_Rows):
    """Attention of canvases, which reads only: each position sees all its canvas and what comes
    before it, on sliding layers the last `window - 1` positions of that, as `CanvasRows` has it.

    For the mask all positions of a canvas are its first.  Where a layer has fewer queries than
    tokens, `queries` says how many each row has.
    """

    def __init__(
        self, scratches: Sequence[Scratch], counts: Sequence[int], queries: Sequence[int]
    ) -> None:
        super().__init__(scratches, counts)
        self._queries = list(queries)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries = self.counts if len(q) == len(k) else self._queries
        return torch.cat(self._attend(layer, q, k, v, queries))

    def _own_positions(self, scratch: Scratch, count: int, device: torch.device) -> Tensor:
        return torch.full((count,), scratch.end, device=device)

    def _query_positions(self, own: Tensor, count: int) -> Tensor:
        return own[:count]
