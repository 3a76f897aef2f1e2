"""Which keys the tokens of a forward see, by segments: prefixes in slots, questions beside them,
and the tokens of the forward themselves.

There are two layouts, each with one operation.  Tokens whose number differs from row to row are
packed (`PackedRows`, `ops.attend`), and rows are attended one slot after another, free of padding
and of masks between rows: prompts, questions behind a slot, and their canvases.  Rows of one width
are padded and attended all at once, in shapes that no data changes (`PaddedRows`,
`ops.attend_padded`): canvases, canvases beside commits, and canvases behind questions that have
places in a pool.  In both, no row's result depends on the other rows.

Many reads see one slot without copies of it.  Each keeps the keys and values of its own tokens, in
parts or in a pool, for as long as its canvases are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Literal

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.adapters import Adapted, of_rows, of_tokens
from sfumato.model.cache import KVPool, PoolLease, QuestionPool, Slot
from sfumato.model.devices import to_device
from sfumato.model.vision.mask import ImageMask, Span, seen
from sfumato.ops.narrow_cache import stored_as


@dataclass(frozen=True)
class Beside:
    """Questions whose keys stand beside the slots of rows, in a pool."""

    pool: QuestionPool
    starts: Tensor  # int64 [rows]: where the question of each row begins in its pool
    counts: Tensor  # int64 [rows]: how many tokens it has
    used: Tensor  # int64 [1]: how many rows are read; those after them see their own tokens alone


@dataclass(frozen=True)
class RowPart:
    """Rows of one width whose prefixes stand in one pool, and what each sees: its prefix, the
    question beside that, if there are any, and its own tokens.

    Its tensors may keep their addresses from step to step; a forward reads the lengths of the
    prefixes from the pool.
    """

    pool: KVPool
    slots: Tensor  # int64 [rows]; rows may share a slot where none commits
    width: int  # positions of a row
    lengths: Tensor | None = None
    """int64 [rows]: how many of them, the first ones, take part; None: all."""
    index: Tensor | None = None
    """int64 [tokens], rising: which of the rows · width positions are among the packed tokens;
    None: all. Every position that is left out lies beyond its row's length."""
    commits: Tensor | None = None
    """int64 [rows]: as many as `lengths` where the row commits its tokens, which then are in the
    encode phase, see none after them (those of a network with blocks see one another: a canvas is
    a block), and go into the cache; 0 where it is denoised. None: no row commits. Never beside an
    index or questions."""
    beside: Beside | None = None
    adapters: frozenset[int] = frozenset()
    """The numbers of the adapters that the slots of rows may have, beside 0."""

    @property
    def tokens(self) -> int:
        """How many packed tokens the part has."""
        return len(self.slots) * self.width if self.index is None else len(self.index)

    def on(self, device: torch.device) -> RowPart:
        """The part for a layer on another device; commits and questions never leave the pool's."""
        assert self.commits is None and self.beside is None and self.lengths is not None
        index = None if self.index is None else self.index.to(device)
        return replace(
            self, slots=self.slots.to(device), lengths=self.lengths.to(device), index=index
        )


class PaddedRows:
    """Attention of the rows of some parts.

    The packed tokens are those of the parts, one part after another.  One operation serves a
    layer and part, whatever the number of rows.  On sliding layers every position of a canvas sees
    the same last `window - 1` prefix positions, which is exactly what a slot stores, so no mask is
    needed.  What rows commit is stored beyond their prefixes, whose lengths stay as they are: who
    commits advances them afterwards.  Each forward needs a new object, since the object reads the
    prefix lengths when it is made.
    """

    def __init__(self, parts: Sequence[RowPart]) -> None:
        self.parts = tuple(parts)
        self._sizes = [part.tokens for part in parts]
        # Each part, and how many positions the prefixes of its rows have; by device.
        here = [(part, _first(part)) for part in parts]
        self._seen = {part.slots.device: here for part in parts}

    def positions(self) -> Tensor:
        """int64 [tokens]: each token's position in its row."""
        return _joined([_positions(*each) for each in next(iter(self._seen.values()))])

    @property
    def adapted(self) -> tuple[Adapted, ...]:
        """Which adapters change which tokens, by the slots of the rows."""
        in_use = frozenset[int]().union(*(part.adapters for part in self.parts))
        if not in_use:
            return ()
        return of_tokens(_joined([_adapters(part) for part in self.parts]), in_use)

    @property
    def encodes(self) -> Tensor | None:
        """bool [tokens, 1]: which tokens are in the encode phase; None: none."""
        if all(part.commits is None for part in self.parts):
            return None
        (part,) = self.parts
        assert part.commits is not None
        return (part.commits > 0)[:, None].expand(-1, part.width).reshape(-1, 1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = zip(*(x.split(self._sizes) for x in (q, k, v)), strict=True)
        outs = []
        for (part, first), tensors in zip(self._on(q.device), split, strict=True):
            out = _attend(layer, part, first, *(_padded(part, x) for x in tensors)).flatten(0, 1)
            outs.append(out if part.index is None else out.index_select(0, part.index))
        return _joined(outs)

    def _on(self, device: torch.device) -> list[tuple[RowPart, Tensor]]:
        """The parts with their tensors on a layer's device."""
        if device not in self._seen:
            here = next(iter(self._seen.values()))
            self._seen[device] = [(part.on(device), first.to(device)) for part, first in here]
        return self._seen[device]


def _attend(layer: int, part: RowPart, first: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one layer: q, k, v [rows, width, heads, d] → like q; first int64 [rows]: how
    many positions each prefix has."""
    pool, beside, questions = part.pool, part.beside, None
    stored, window = (pool.keys[layer], pool.values[layer]), pool.window(layer)
    if beside is not None:
        own = beside.pool.keys[layer], beside.pool.values[layer], beside.starts, beside.counts
        questions = ops.Questions(*own, beside.pool.longest)
    causal = part.commits if pool.block is None else None
    rows = ops.Rows(*stored, part.slots, first, window, part.lengths, causal, questions)
    out = ops.attend_padded(q, k, v, rows)
    if part.commits is not None:
        # A full layer has no place for positions past its capacity; who commits has asked for room.
        for kept, new in zip(stored, (k, v), strict=True):
            ops.write_cache(kept, new, part.slots, first, part.commits)
    return out


def _first(part: RowPart) -> Tensor:
    """int64 [rows]: how many positions the prefix of each row has; 0 for rows that are not read."""
    lengths = part.pool.lengths.index_select(0, part.slots)
    if part.beside is None:
        return lengths
    unused = torch.arange(len(lengths), device=lengths.device) >= part.beside.used
    return lengths.masked_fill(unused, 0)


def _positions(part: RowPart, first: Tensor) -> Tensor:
    if part.beside is not None:
        first = first + part.beside.counts
    places = torch.arange(part.width, device=first.device)
    positions = (first[:, None] + places).flatten()
    return positions if part.index is None else positions.index_select(0, part.index)


def _adapters(part: RowPart) -> Tensor:
    """The number of each token's adapter, int64 [tokens]."""
    of_rows = part.pool.adapters.index_select(0, part.slots)
    each = of_rows[:, None].expand(-1, part.width).flatten()
    return each if part.index is None else each.index_select(0, part.index)


def _padded(part: RowPart, packed: Tensor) -> Tensor:
    """[tokens, heads, d] → [rows, width, heads, d], zeros where no token stands."""
    if part.index is not None:
        rows = packed.new_zeros(len(part.slots) * part.width, *packed.shape[1:])
        packed = rows.index_copy_(0, part.index, packed)
    return packed.unflatten(0, (-1, part.width))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Suffix:
    """Keys and values of the tokens that follow a slot's prefix, in one read."""

    def __init__(self, slot: Slot) -> None:
        """The slot's prefix must stay as it is while the suffix is used."""
        self.slot, self.length = slot, 0
        self.lease: PoolLease | None = None  # where they stand in a pool, if they do
        layers = len(slot.pool.layers)
        # Of each layer parts [kv_heads, n, d]; sliding layers keep what later tokens can see.
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.slot.length + self.length

    def kept(self, layer: int) -> int:
        """How many tokens it holds of a layer."""
        return sum(part.shape[1] for part in self.keys[layer])

    def place(self, pool: QuestionPool, tokens: int) -> None:
        """Lets the keys of so many tokens in all stand in a pool, where it has room and there are
        none yet."""
        if self.lease is None and not self.length:
            self.lease = pool.lease(tokens)

    def append(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Takes keys and values of the next tokens, of every layer [n, kv_heads, d]."""
        self.length += len(parts[0][0])
        for layer, (key, value) in enumerate(parts):
            stored = self.slot.pool.keys[layer].dtype
            keys, values = self.keys[layer], self.values[layer]
            keys.append(stored_as(key.transpose(0, 1), stored))
            values.append(stored_as(value.transpose(0, 1), stored))
            window = self.slot.pool.window(layer)
            while window and self.kept(layer) - keys[0].shape[1] >= window - 1:
                del keys[0], values[0]

    def grow(self, count: int) -> None:
        """Takes the next tokens, whose keys and values stand in the pool already."""
        assert self.lease and self.length + count <= self.lease.places
        self.length += count
        a, b = self.lease.start, self.lease.start + self.length
        pool = self.lease.pool
        self.keys = [[keys[:, a:b]] for keys in pool.keys]
        self.values = [[values[:, a:b]] for values in pool.values]

    def own(self) -> None:
        """Copies what it holds as a part of a batch, all of whose memory would else be kept for as
        long as the suffix."""
        if self.lease is not None:
            return
        for parts in (*self.keys, *self.values):
            parts[:] = [
                part.clone() if part.untyped_storage().nbytes() > part.nbytes else part
                for part in parts
            ]


Keeps = Literal["slots", "suffixes", "nothing"]
"""What becomes of the keys and values of new tokens: they are written behind the prefixes of slots,
appended to suffixes, or, of canvases, not kept."""


class PackedRows:
    """Attention of packed tokens of several rows, one row after another.

    A row sees its slot's prefix, what its suffix holds, and of its new tokens those up to each, or
    where the network has blocks, those up to the end of each one's block; a canvas sees all of its
    own.  For the mask all positions of a canvas are its first: on sliding
    layers it sees the last `window - 1` positions of what comes before it, as `PaddedRows` has it.
    """

    def __init__(
        self,
        suffixes: Sequence[Suffix],
        counts: Sequence[int],
        keeps: Keeps,
        queries: Sequence[int] = (),
        pictures: Sequence[Sequence[Span]] = (),
        image_mask: ImageMask = "model",
    ) -> None:
        """counts: tokens of each row; queries: of each row, where a layer has fewer queries than
        tokens; pictures: among the new tokens of each row that goes into a slot, by position."""
        self.suffixes, self.counts = tuple(suffixes), list(counts)
        self._keeps, self._queries = keeps, list(queries)
        self._pictures, self._image_mask = list(pictures), image_mask
        slots = groupby(range(len(self.suffixes)), lambda row: id(self.suffixes[row].slot))
        self._groups = [list(rows) for _, rows in slots]  # neighbours that share a slot
        self._causal: dict[tuple[int, bool, bool, torch.device], ops.Causal] = {}
        self._parts: list[tuple[Tensor, Tensor]] = []  # of each layer, of all rows

    def positions(self) -> Tensor:
        """int64 [tokens]: each token's position in its row."""
        at, rows = self.suffixes[0].slot.pool.device, zip(self.suffixes, self.counts, strict=True)
        return torch.cat([torch.arange(s.end, s.end + count, device=at) for s, count in rows])

    @property
    def adapted(self) -> tuple[Adapted, ...]:
        """Which adapters change which tokens, by the slots of the rows."""
        slots = [suffix.slot for suffix in self.suffixes]
        return of_rows([slot.adapter for slot in slots], self.counts, slots[0].pool.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [all queries, heads, d]; k and v [tokens, kv_heads, d] → like q."""
        everywhere = len(q) == len(k)
        sizes, queries = (
            [sum(counts[row] for row in group) for group in self._groups]
            for counts in (self.counts, self.counts if everywhere else self._queries)
        )
        parts = zip(self._groups, q.split(queries), k.split(sizes), v.split(sizes), strict=True)
        out = _joined([self._attend(layer, rows, everywhere, *each) for rows, *each in parts])
        if self._keeps == "suffixes":
            self.keep(k, v)
        return out

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Keeps keys and values of a layer, [tokens, kv_heads, d], for the suffixes."""
        self._parts.append((k, v))

    def commit(self) -> None:
        """Makes the new tokens part of the prefixes or the suffixes, after all layers."""
        rows = list(zip(self.suffixes, self.counts, strict=True))
        if self._keeps == "slots":
            for suffix, count in rows:
                suffix.slot.advance(count)
            return
        split = [(k.split(self.counts), v.split(self.counts)) for k, v in self._parts]
        for pool in {suffix.lease.pool for suffix in self.suffixes if suffix.lease}:
            self._write(pool)
        for row, (suffix, count) in enumerate(rows):
            if suffix.lease is None:
                suffix.append([(keys[row], values[row]) for keys, values in split])
            else:
                suffix.grow(count)

    def _attend(
        self, layer: int, rows: list[int], everywhere: bool, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Attention of rows that share a slot; each gets the bits that it has alone."""
        slot = self.suffixes[rows[0]].slot
        keys, values, positions = slot.history(layer)
        causal = self._seen(layer, rows, everywhere, positions)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        if self._keeps == "slots":  # where the cache is narrow, as later chunks will read them
            k, v = slot.narrowed(layer, k), slot.narrowed(layer, v)
        counts, suffixes = [self.counts[row] for row in rows], [self.suffixes[row] for row in rows]
        split = zip(suffixes, k.split(counts, 1), v.split(counts, 1), strict=True)
        own = [ops.Own((*s.keys[layer], rk), (*s.values[layer], rv)) for s, rk, rv in split]
        if len(own) == 1:
            keys, values, own = [*keys, *own[0].keys], [*values, *own[0].values], []
        out = ops.attend(q, keys, values, causal, own)
        if self._keeps == "slots":
            slot.write(layer, k, v)
        return out

    def _seen(self, layer: int, rows: list[int], everywhere: bool, shared: Tensor) -> ops.Causal:
        """Which keys they see; alike on all layers of a kind and a device."""
        window = self.suffixes[rows[0]].slot.pool.window(layer)
        name = rows[0], window is None, everywhere, shared.device
        if name not in self._causal:
            queries, own, counts = list[int](), list[int](), list[tuple[int, int]]()
            for row in rows:
                suffix, count = self.suffixes[row], self.counts[row]
                end, kept = suffix.end, suffix.kept(layer)
                new = [end] * count if self._keeps == "nothing" else range(end, end + count)
                wanted = new if everywhere else new[: self._queries[row]]
                queries += wanted
                own += (*range(end - kept, end), *new)
                counts.append((len(wanted), kept + count))
            numbers = to_device(torch.tensor([*queries, *own]), shared.device)
            of_queries, of_keys = numbers.split([len(queries), len(own)])
            several = counts if len(rows) > 1 else ()
            keys = torch.cat((shared, of_keys))
            pictures = self._pictures[rows[0]] if self._pictures else ()
            first, last = seen(of_queries, pictures, window, self._image_mask)
            slot = self.suffixes[rows[0]].slot
            if size := slot.pool.block:
                ends = (of_queries - slot.offset).div(size, rounding_mode="floor") + 1
                last = torch.maximum(last, ends * size + (slot.offset - 1))
            self._causal[name] = ops.Causal(first, last, keys, several)
        return self._causal[name]

    def _write(self, pool: QuestionPool) -> None:
        """Stores the tokens that have places in a pool, all rows in one operation a layer."""
        tokens: list[int] = []  # which of the packed ones
        places: list[int] = []
        starts = accumulate(self.counts, initial=0)
        for suffix, first, count in zip(self.suffixes, starts, self.counts, strict=False):
            if suffix.lease is not None and suffix.lease.pool is pool:
                place = suffix.lease.start + suffix.length
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
