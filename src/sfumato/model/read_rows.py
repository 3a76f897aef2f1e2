"""Attention of reads: tokens after a slot's prefix whose keys and values the slot does not get.

Many reads see one slot without copies of it.  Each keeps the keys and values of its own tokens, in
parts or in a pool, for as long as its canvases are read.  Rows of one slot are attended in one
operation, where a row's result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.cache import Slot
from sfumato.model.question_pool import QuestionPool, Span
from sfumato.model.to_device import to_device
from sfumato.ops.narrow_cache import stored_as


class Scratch:
    """Keys and values of the tokens that follow a slot's prefix, in one read."""

    def __init__(self, slot: Slot) -> None:
        """The slot's prefix must stay as it is while the scratch is used."""
        self.slot, self.length = slot, 0
        self.span: Span | None = None  # where they stand in a pool, if they do
        layers = len(slot.pool.layers)
        # Of each layer parts [kv_heads, n, d]; sliding layers keep what later tokens can see.
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.slot.length + self.length

    def place(self, pool: QuestionPool, tokens: int) -> None:
        """Lets the keys of so many tokens in all stand in a pool, where it has room and there are
        none yet."""
        if self.span is None and not self.length:
            self.span = pool.lease(tokens)

    def append(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Takes keys and values of the next tokens, of every layer [n, kv_heads, d]."""
        self.length += len(parts[0][0])
        for layer, (key, value) in enumerate(parts):
            stored = self.slot.pool.keys[layer].dtype
            keys, values = self.keys[layer], self.values[layer]
            keys.append(stored_as(key.transpose(0, 1), stored))
            values.append(stored_as(value.transpose(0, 1), stored))
            window = self.slot.window(layer)
            while window and sum(part.shape[1] for part in keys[1:]) >= window - 1:
                del keys[0], values[0]

    def grow(self, count: int) -> None:
        """Takes the next tokens, whose keys and values stand in the pool already."""
        assert self.span and self.length + count <= self.span.places
        self.length += count
        a, b = self.span.start, self.span.start + self.length
        pool = self.span.pool
        self.keys = [[keys[:, a:b]] for keys in pool.keys]
        self.values = [[values[:, a:b]] for values in pool.values]

    def own(self) -> None:
        """Copies what it holds as a part of a batch, all of whose memory would else be kept for as
        long as the scratch."""
        if self.span is not None:
            return
        for parts in (*self.keys, *self.values):
            parts[:] = [
                part.clone() if part.untyped_storage().nbytes() > part.nbytes else part
                for part in parts
            ]


class _Rows:
    """Rows that follow prefixes and scratches, and what each of them sees of these."""

    def __init__(
        self, scratches: Sequence[Scratch], counts: Sequence[int], queries: Sequence[int]
    ) -> None:
        """counts: tokens of each row, whose packed tokens stand one row after another; queries: of
        each row, where a layer has fewer queries than tokens."""
        self.scratches, self.counts = tuple(scratches), list(counts)
        self._queries = list(queries)
        slots = groupby(range(len(self.scratches)), lambda row: id(self.scratches[row].slot))
        self._groups = [list(rows) for _, rows in slots]  # neighbours that share a slot
        self._causal: dict[tuple[int, bool, bool, torch.device], ops.SharedCausal] = {}

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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [all queries, heads, d]; k and v [tokens, kv_heads, d] → like q."""
        everywhere = len(q) == len(k)
        queries = self.counts if everywhere else self._queries
        if len(self._groups) == 1:
            return self._attend(layer, self._groups[0], everywhere, q, k, v)
        sizes = [sum(self.counts[row] for row in group) for group in self._groups]
        parts = zip(
            self._groups,
            q.split([sum(queries[row] for row in group) for group in self._groups]),
            *(x.split(sizes) for x in (k, v)),
            strict=True,
        )
        return torch.cat([self._attend(layer, rows, everywhere, *each) for rows, *each in parts])

    def _attend(
        self, layer: int, rows: list[int], everywhere: bool, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Of rows that share a slot, in one operation; each row gets the bits that it has alone."""
        keys, values, positions = self.scratches[rows[0]].slot.history(layer)
        own = [
            ops.OwnKeys(scratch.keys[layer], scratch.values[layer], self.counts[row])
            for row in rows
            for scratch in (self.scratches[row],)
        ]
        causal = self._seen(layer, rows, everywhere, positions)
        return ops.attend_shared(q, k, v, keys, values, own, causal)

    def _seen(
        self, layer: int, rows: list[int], everywhere: bool, shared: Tensor
    ) -> ops.SharedCausal:
        """Which keys they see; alike on all layers of a kind and a device."""
        window = self.scratches[rows[0]].slot.window(layer)
        name = rows[0], window is None, everywhere, shared.device
        if name not in self._causal:
            queries, own = [], []
            for row in rows:
                scratch = self.scratches[row]
                new = self._own_positions(scratch, self.counts[row], shared.device)
                kept = sum(part.shape[1] for part in scratch.keys[layer])
                before = torch.arange(scratch.end - kept, scratch.end, device=shared.device)
                queries.append(new if everywhere else new[: self._queries[row]])
                own.append(torch.cat((before, new)))
            self._causal[name] = ops.SharedCausal(queries, shared, own, window)
        return self._causal[name]


class QuestionRows(_Rows):
    """Causal attention of tokens that follow what their scratches hold. `commit` appends them."""

    def __init__(self, scratches: Sequence[Scratch], counts: Sequence[int]) -> None:
        super().__init__(scratches, counts, counts)
        self._parts: list[tuple[Tensor, Tensor]] = []  # of each layer, of all rows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().__call__(layer, q, k, v)
        self.keep(k, v)
        return out

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Keeps keys and values of a layer, [tokens, kv_heads, d], until `commit`."""
        self._parts.append((k, v))

    def commit(self) -> None:
        """Appends the tokens to the scratches, after all layers."""
        split = [(k.split(self.counts), v.split(self.counts)) for k, v in self._parts]
        placed = {scratch.span.pool for scratch in self.scratches if scratch.span}
        for pool in placed:
            self._write(pool)
        for row, (scratch, count) in enumerate(zip(self.scratches, self.counts, strict=True)):
            if scratch.span is None:
                scratch.append([(keys[row], values[row]) for keys, values in split])
            else:
                scratch.grow(count)

    def _write(self, pool: QuestionPool) -> None:
        """Stores the tokens that have places in a pool, all rows in one operation a layer."""
        tokens: list[int] = []  # which of the packed ones
        places: list[int] = []
        starts = accumulate(self.counts, initial=0)
        for scratch, first, count in zip(self.scratches, starts, self.counts, strict=False):
            if scratch.span is not None and scratch.span.pool is pool:
                place = scratch.span.start + scratch.length
                tokens += range(first, first + count)
                places += range(place, place + count)
        at, which = to_device(torch.tensor([places, tokens]), pool.device)
        everything = len(tokens) == sum(self.counts)
        pool.write(
            at,
            [
                (k, v) if everything else (k.index_select(0, which), v.index_select(0, which))
                for k, v in self._parts
            ],
        )

    def _own_positions(self, scratch: Scratch, count: int, device: torch.device) -> Tensor:
        return torch.arange(scratch.end, scratch.end + count, device=device)


class ReadCanvasRows(_Rows):
    """Attention of canvases, which reads only: each position sees all its canvas and what comes
    before it, on sliding layers the last `window - 1` positions of that, as `CanvasRows` has it.

    For the mask all positions of a canvas are its first.
    """

    def _own_positions(self, scratch: Scratch, count: int, device: torch.device) -> Tensor:
        return torch.full((count,), scratch.end, device=device)
