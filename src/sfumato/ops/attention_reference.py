"""Attention, and the cache that it reads, in plain torch: the executable specification.

Every function works on any torch device, and treats rows independently up to rounding.  None reads
a number on the host, copies to the device or has a shape that depends on data, and, but for
`attend`, the number of tensor operations does not depend on the number of rows.

Attention is one operation for each layout of rows.  `attend` takes packed rows, which may have any
number of tokens: prompts, questions and their canvases.  `attend_padded` takes rows of one width: a
row either denoises its canvas or commits tokens, which is a number on the device, so that one call
serves all rows; a read's canvas follows a question, whose keys stand beside the slots in tensors of
fixed address.  In both a token sees the keys of its row's segments that lie in an interval of
positions.  Knows no slots but their numbers, and no layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.ops.narrow_cache import gathered, widened
from sfumato.ops.registry import ANY, choose, operation

KEYS, QUERIES = 512, 16
"""The numbers of keys and queries of a canvas are padded to multiples of these.  Torch's kernels
choose by the shape how they split a sum: without padding, a canvas of 100 beside one of 128 rounds
otherwise than alone."""

NOWHERE = 2**31 - 1
"""A position after all others, which no token sees; int32 for kernels."""


@operation
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention of a batch with scale 1 and grouped heads.

    q [..., heads, n, d]; k and v [..., kv_heads, m, d]; mask [..., n, m], bool with True where a
    query may look, or what to add to the scores (None: everywhere) → [..., heads, n, d].
    """
    *batch, heads, n, d = q.shape
    kv_heads, m = k.shape[-3:-1]
    group = heads // kv_heads
    # Torch's fused kernels want exactly four axes; with others it takes a slower path.
    if mask is None:
        # The heads that share a key head become more queries of that head.
        folded = q.reshape(-1, kv_heads, group * n, d)
        k, v = k.reshape(-1, kv_heads, m, d), v.reshape(-1, kv_heads, m, d)
        return F.scaled_dot_product_attention(folded, k, v, scale=1.0).view(q.shape)
    # A batch entry for each key head: its group sees views of one key, one value and one mask.
    grouped = q.reshape(-1, group, n, d)
    k, v = (x.reshape(-1, 1, m, d).expand(-1, group, -1, -1) for x in (k, v))
    mask = mask.unsqueeze(-3).expand(*batch, kv_heads, n, m).reshape(-1, 1, n, m)
    return F.scaled_dot_product_attention(grouped, k, v, mask, scale=1.0).view(q.shape)


def causal_bounds(positions: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """The first and the last position that tokens at int64 `positions` see: their own and those
    before it, `window` at most (None: all)."""
    if window is None:
        return torch.zeros_like(positions), positions
    return (positions - (window - 1)).clamp(min=0), positions


@dataclass(frozen=True)
class Causal:
    """Which keys tokens see: those in an interval of positions.

    Of several rows that follow one prefix a token sees keys of the prefix and of its own row.
    """

    first: Tensor  # int64 [tokens]: the first position that each token sees, row after row
    last: Tensor  # int64 [tokens]; a token sees nothing where `first` is higher
    keys: Tensor  # int64 [m]: the positions of the prefix's keys, then of each row's own
    counts: Sequence[tuple[int, int]] = ()
    """How many queries, and how many keys of its own, each row has; (): one row sees all keys."""

    @classmethod
    def of(
        cls,
        queries: Tensor,
        keys: Tensor,
        window: int | None = None,
        counts: Sequence[tuple[int, int]] = (),
    ) -> Causal:
        """Tokens at positions int64 `queries` see what `causal_bounds` says."""
        return cls(*causal_bounds(queries, window), keys, counts)

    @cached_property
    def rows(self) -> list[Causal]:
        """Each row by itself."""
        queries, own = zip(*self.counts, strict=True)
        prefix, *each = self.keys.split([len(self.keys) - sum(own), *own])
        rows = zip(self.first.split(queries), self.last.split(queries), each, strict=True)
        return [Causal(first, last, torch.cat((prefix, keys))) for first, last, keys in rows]

    @cached_property
    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """`first`, `last` and `keys`, int32."""
        return self.first.int(), self.last.int(), self.keys.int()

    def mask(self) -> Tensor:
        """bool [tokens, m]: True where a token sees a key."""
        return (self.keys >= self.first[:, None]) & (self.keys <= self.last[:, None])


@dataclass(frozen=True)
class Own:
    """Keys and values that the tokens of one row see and no other row's do, in parts."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]


@operation
def attend(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    causal: Causal | None = None,
    own: Sequence[Own] = (),
) -> Tensor:
    """Softmax attention of packed rows that follow one prefix, scale 1, grouped heads.

    q [tokens, heads, d], rows one after another; keys and values: the prefix's, in parts, one after
    another, each [kv_heads, n, d], whose dtypes may differ, or as a narrow cache stores them,
    [kv_heads, n, stored width]; own: of each row what comes after the prefix, (): there is one row
    and nothing; causal None: every token of a row sees every key → like q.  Each row has, to the
    bit, what it has by itself.  A compiled twin that multiplies bfloat16 serves where a part is
    stored in it, or narrow with queries in it.
    """
    if own:
        assert causal is not None
        # What all rows see is widened once for all of them.
        keys, values = widened(keys, q.dtype), widened(values, q.dtype)
        outs = []
        split = q.split([count for count, _ in causal.counts])
        for rq, row, seen in zip(split, own, causal.rows, strict=True):
            alone = rq, (*keys, *row.keys), (*values, *row.values), seen, ()
            outs.append(choose("attend", q.device, ANY, *alone)(*alone))
        return torch.cat(outs)
    k, v = joined(keys, q.dtype), joined(values, q.dtype)
    mask = None if causal is None else causal.mask()
    return attention.reference(q.transpose(0, 1), k, v, mask).transpose(0, 1)


def joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Keys or values in parts [kv_heads, n, stored width] as one tensor [kv_heads, all n, d]."""
    return torch.cat([part.to(dtype) for part in widened(parts, dtype)], dim=1)


@dataclass(frozen=True)
class Questions:
    """Keys of one layer that follow the prefixes of rows and stand beside their slots."""

    keys: Tensor  # [kv_heads, places, d], of all questions
    values: Tensor
    starts: Tensor  # int64 [rows]: the first place of each row's question
    counts: Tensor  # int64 [rows]: how many it has; 0 for none
    longest: int  # no count is higher


@dataclass(frozen=True)
class Rows:
    """What padded rows see in one layer: first what their slots hold, then the questions beside the
    slots, if there are any, then their own tokens."""

    keys: Tensor  # [slots, kv_heads, size, stored width], position p at p mod size
    values: Tensor
    slots: Tensor  # int64 [rows]
    first: Tensor  # int64 [rows]: how many positions the prefix in each slot has
    window: int | None = None
    """Positions that a token of a row that commits sees at most, its own included; None: all. All
    tokens of a canvas see what its first one sees of what comes before it. A slot stores fewer
    positions than a window has."""
    width: Tensor | None = None
    """int64 [rows]: how many tokens of each row, the first ones, take part; None: all."""
    commits: Tensor | None = None
    """int64 [rows]: above 0 where tokens see none after them. Elsewhere, and where it is None, a
    row is a canvas, whose tokens see one another."""
    questions: Questions | None = None

    @property
    def plain(self) -> bool:
        """Whether all rows are canvases without questions, which see all that their slots store."""
        return self.commits is None and self.questions is None

    def widths(self, length: int) -> Tensor:
        """int64 [rows]: how many of `length` tokens of each row take part."""
        return torch.full_like(self.first, length) if self.width is None else self.width


@operation
def attend_padded(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Softmax attention of padded rows, which denoise or commit, scale 1, grouped heads.

    q [rows, n, heads, d]; k and v, of the rows' own tokens, [rows, n, kv_heads, d] → like q.  The
    results at the tokens after a row's width are finite and otherwise undefined.
    """
    length, size, beside = q.shape[1], rows.keys.shape[2], rows.questions
    width = rows.widths(length)
    counts, sizes = [rows.first, width], [size, length]
    if beside is not None:
        counts, sizes = [rows.first, beside.counts, width], [size, beside.longest, length]
    padding = -sum(sizes) % KEYS
    sizes[-1] += padding
    places = [torch.arange(n, device=q.device) for n in sizes]
    exist = [at < count[:, None] for at, count in zip(places, counts, strict=True)]
    exists = torch.cat(exist, dim=1)  # [rows, keys]
    missing = ~exists[:, None, :, None]

    def all_of(stored: Tensor, of_questions: Tensor | None, new: Tensor) -> Tensor:
        parts = [gathered(stored, rows.slots, q.dtype)]
        if of_questions is not None and beside is not None:
            at = (beside.starts[:, None] + places[1]).clamp(max=of_questions.shape[1] - 1)
            own = of_questions.index_select(1, at.flatten()).unflatten(1, at.shape)
            parts.append(own.transpose(0, 1).to(q.dtype))
        zeros = new.new_zeros(1, 1, 1, 1).expand(*parts[0].shape[:2], padding, q.shape[-1])
        # What earlier requests left may be NaN or infinite, and 0 · NaN is NaN.
        joined_rows = torch.cat((*parts, new.transpose(1, 2), zeros), dim=2)
        return joined_rows.masked_fill_(missing, 0.0)

    keys = all_of(rows.keys, None if beside is None else beside.keys, k)
    values = all_of(rows.values, None if beside is None else beside.values, v)
    if rows.commits is not None:
        seen = exists[:, None] & _seen(rows, places, width, length)
        return attention.reference(q.transpose(1, 2), keys, values, seen).transpose(1, 2)
    if not rows.plain and rows.window is not None:
        exists = exists & _seen(rows, places, width, length)[:, 0]
    out = _seeing_alike(q, keys, values, exists)
    if rows.width is None:
        return out
    nothing = ~exists.any(dim=1)  # of a row
    return out.masked_fill(nothing[:, None, None, None], 0.0)


def _seen(rows: Rows, places: Sequence[Tensor], width: Tensor, length: int) -> Tensor:
    """bool [rows, n, keys], or [rows, 1, keys] for all tokens of canvases: which keys lie in the
    interval of positions that a token sees.

    places: int64 of each segment, 0 and up.  Positions count from the first token of each row.
    """
    *_, own = places
    before = -1 - torch.remainder(rows.first[:, None] - 1 - places[0], rows.keys.shape[2])
    positions = [before, own.expand(len(width), -1)]
    if rows.questions is not None:
        count = rows.questions.counts[:, None]
        positions = [before - count, places[1] - count, positions[1]]
    position = torch.cat(positions, dim=1)[:, None]
    window = NOWHERE if rows.window is None else rows.window
    if rows.commits is None:
        return position > -window
    # Tokens after the width see what the last one of it sees.
    token = torch.minimum(own[:length], width[:, None] - 1)[..., None]
    causal = (rows.commits > 0)[:, None, None]
    lowest, highest = token.where(causal, 0) - window, token.where(causal, NOWHERE)
    return (position > lowest) & (position <= highest)


def _seeing_alike(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Attention of canvases q [rows, n, heads, d] over keys and values [rows, kv_heads, m, d], of
    which all tokens of a row see those that are `seen` bool [rows, m] → like q."""
    _, length, heads, d = q.shape
    rows, kv_heads = keys.shape[:2]
    # The heads that share a key head become more queries of that head.
    more = (0, 0, 0, -length % QUERIES)
    folded = F.pad(q.transpose(1, 2), more).reshape(rows, kv_heads, -1, d)
    mask = seen[:, None, None]
    out = F.scaled_dot_product_attention(folded, keys, values, mask, scale=1.0)
    return out.view(rows, heads, -1, d)[:, :, :length].transpose(1, 2)


@operation
def write_cache(stored: Tensor, new: Tensor, slots: Tensor, first: Tensor, count: Tensor) -> None:
    """Stores the first `count` entries of each row after the `first` positions of its slot, in
    place, and changes nothing else.

    stored [slots, kv_heads, size, d], position p at p mod size; new [rows, n, kv_heads, d]; slots,
    first and count int64 [rows], a count of 0 for rows that store nothing.  No two rows have one
    slot.
    """
    # Every row writes as many entries. Those for which it has no token repeat one that is written
    # anyway, or what the slot holds there: entries of equal places then have equal values.
    rows, length = new.shape[:2]
    size = stored.shape[2]
    own = torch.arange(length, device=new.device)
    # Of more tokens than a ring holds, the last ones stay.
    lowest, highest = (count - size).clamp(min=0), (count - 1).clamp(min=0)
    token = torch.minimum(torch.maximum(own, lowest[:, None]), highest[:, None])  # [rows, length]
    place = torch.remainder(first[:, None] + token, size)
    index = token[..., None, None].expand_as(new)
    entries = new.gather(1, index).to(stored.dtype)
    at = slots[:, None].expand(rows, length), place
    held = stored.transpose(1, 2)  # [slots, size, kv_heads, d]
    held[at] = torch.where((count > 0)[:, None, None, None], entries, held[at])
