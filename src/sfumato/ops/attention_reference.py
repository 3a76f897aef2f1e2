"""Attention, and the cache that it reads, in plain torch: the executable specification.

Every function works on any torch device, and treats rows independently up to rounding.  None reads
a number on the host, copies to the device or has a shape that depends on data, and, but for
`attend_shared`, the number of tensor operations does not depend on the number of rows.

A row of a step either denoises its canvas or commits tokens.  Which of the two is a number on the
device, so that one call serves all rows.  A read's canvas follows a question, whose keys stand
beside the slots in tensors of fixed address.  Knows no slots but their numbers, and no layers.
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


@dataclass(frozen=True)
class Causal:
    """Which keys a token sees: those at its own position and before, at most `window` of them."""

    queries: Tensor  # int64 [tokens]: their positions
    keys: Tensor  # int64 [m]
    window: int | None = None

    def mask(self) -> Tensor:
        """bool [tokens, m]: True where a token sees a key."""
        seen = self.keys <= self.queries[:, None]
        if self.window is not None:
            seen &= self.keys > self.queries[:, None] - self.window
        return seen


@operation
def attend(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], causal: Causal | None = None
) -> Tensor:
    """Softmax attention of one row's tokens, scale 1, grouped heads.

    q [tokens, heads, d]; keys and values in parts, one after another, each [kv_heads, n, d], whose
    dtypes may differ, or as a narrow cache stores them, [kv_heads, n, stored width]; causal None:
    every token sees every key → like q.  A compiled twin that multiplies bfloat16 serves where a
    part is stored in it, or narrow with queries in it.
    """
    k, v = joined(keys, q.dtype), joined(values, q.dtype)
    mask = None if causal is None else causal.mask()
    return attention.reference(q.transpose(0, 1), k, v, mask).transpose(0, 1)


@dataclass(frozen=True)
class SharedCausal:
    """Which keys the tokens of rows see that follow one prefix: as `Causal` has it, those of the
    prefix and those of their own row."""

    queries: Sequence[Tensor]  # of each row int64 [tokens]: their positions
    shared: Tensor  # int64 [m]: of the prefix's keys
    own: Sequence[Tensor]  # of each row int64 [keys]
    window: int | None = None

    @cached_property
    def rows(self) -> list[Causal]:
        """The segments of each row by itself."""
        both = zip(self.queries, self.own, strict=True)
        return [Causal(q, torch.cat((self.shared, own)), self.window) for q, own in both]

    @cached_property
    def all_queries(self) -> Tensor:
        """int32: of all rows, one after another."""
        return torch.cat(list(self.queries)).int()

    @cached_property
    def all_keys(self) -> Tensor:
        """int32: the prefix's, then those of all rows."""
        return torch.cat((self.shared, *self.own)).int()


@dataclass(frozen=True)
class OwnKeys:
    """Keys and values that the tokens of one row see and no other row's do."""

    keys: Sequence[Tensor]  # parts as `attend` takes them, which come before the new ones
    values: Sequence[Tensor]
    new: int  # how many new ones


@operation
def attend_shared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    own: Sequence[OwnKeys],
    causal: SharedCausal,
) -> Tensor:
    """Softmax attention of rows that follow one prefix: to the bit what `attend` makes of each.

    q [all queries, heads, d]; k and v [all new tokens, kv_heads, d], rows one after another; keys
    and values: the prefix's, in parts as `attend` takes them → like q.  A row sees the
    prefix's keys, its own, and its new ones, in this order.
    """
    counts, outs = [row.new for row in own], []
    keys, values = widened(keys, q.dtype), widened(values, q.dtype)  # once for all rows
    rows = zip(q.split([len(each) for each in causal.queries]), k.split(counts), v.split(counts),
               own, causal.rows, strict=True)  # fmt: skip
    for rq, rk, rv, row, seen in rows:
        all_keys = *keys, *row.keys, rk.transpose(0, 1)
        all_values = *values, *row.values, rv.transpose(0, 1)
        serve = choose("attend", q.device, ANY, rq, all_keys, all_values, seen)
        outs.append(serve(rq, all_keys, all_values, seen))
    return torch.cat(outs)


def joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Keys or values in parts [kv_heads, n, stored width] as one tensor [kv_heads, all n, d]."""
    return torch.cat([part.to(dtype) for part in widened(parts, dtype)], dim=1)


@operation
def canvas_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    held: Tensor,
    width: Tensor,
) -> Tensor:
    """Softmax attention of canvases, one a row, scale 1, grouped heads.

    q [rows, n, heads, d]; k and v [rows, n, kv_heads, d]; keys and values [slots, kv_heads, size,
    d], stored; slots, held and width int64 [rows] → like q.  Each position sees the `held` first
    stored positions of its row's slot and the `width` first positions of its own canvas; the
    results at the positions after the width are finite and otherwise undefined.
    """
    rows, length, _, d = q.shape
    kv_heads, size = keys.shape[1:3]
    more_keys = -(size + length) % KEYS

    place = torch.arange(size + length + more_keys, device=q.device)
    in_canvas = (place >= size) & (place < size + width[:, None])
    seen = ((place < size) & (place < held[:, None])) | in_canvas  # [rows, keys]

    def all_of(stored: Tensor, new: Tensor) -> Tensor:
        padding = new.new_zeros(1, 1, 1, 1).expand(rows, kv_heads, more_keys, d)
        parts = gathered(stored, slots, q.dtype), new.transpose(1, 2), padding
        # What an earlier request left in the slot may be NaN or infinite, and 0 · NaN is NaN.
        return torch.cat(parts, dim=2).masked_fill_(~seen[:, None, :, None], 0.0)

    out = over_seen(q, all_of(keys, k), all_of(values, v), seen)
    return out.masked_fill((held + width == 0)[:, None, None, None], 0.0)  # of no key


def over_seen(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Attention of canvases q [rows, n, heads, d] over keys and values [rows, kv_heads, m, d] of
    which all positions of a row see those that are `seen` bool [rows, m] → like q."""
    _, length, heads, d = q.shape
    rows, kv_heads = keys.shape[:2]
    # The heads that share a key head become more queries of that head.
    more = (0, 0, 0, -length % QUERIES)
    folded = F.pad(q.transpose(1, 2), more).reshape(rows, kv_heads, -1, d)
    mask = seen[:, None, None]
    out = F.scaled_dot_product_attention(folded, keys, values, mask, scale=1.0)
    return out.view(rows, heads, -1, d)[:, :, :length].transpose(1, 2)


@operation
def phase_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    first: Tensor,
    width: Tensor,
    commits: Tensor,
    window: int | None,
) -> Tensor:
    """Softmax attention of rows that denoise and rows that commit, scale 1, grouped heads.

    q [rows, n, heads, d]; k and v [rows, n, kv_heads, d]; keys and values [slots, kv_heads, size,
    d], stored, position p at p mod size; slots, first (positions that the slot holds), width (those
    of the row that take part, 1 at least) and commits int64 [rows] → like q.  Where `commits` is 0,
    each position sees what `canvas_attention` has it see; elsewhere its own and earlier positions,
    at most `window` of them (None: all).  The results at the positions after the width are finite
    and otherwise undefined.
    """
    rows, length = q.shape[:2]
    kv_heads, size = keys.shape[1:3]
    old = _in_ring(first, size)
    own = torch.arange(length, device=q.device)
    in_row = own < width[:, None]  # [rows, length]
    query = torch.minimum(own, width[:, None] - 1)  # those after the width see what the last sees
    position = first[:, None] + query
    causal = (commits > 0)[:, None, None]
    sees_old = old[:, None] >= 0
    sees_own = own <= query[..., None]
    if window is not None:
        near = old[:, None] > position[..., None] - window
        sees_old = sees_old & (near | ~causal)
        sees_own = sees_own & (own > query[..., None] - window)
    sees_own = in_row[:, None] & (sees_own | ~causal)
    padding = -(size + length) % KEYS
    nothing = sees_own.new_zeros(1, 1, 1).expand(rows, length, padding)
    seen = torch.cat((sees_old.expand(-1, length, -1), sees_own, nothing), dim=2)

    def all_of(held: Tensor, new: Tensor) -> Tensor:
        old_part = gathered(held, slots, q.dtype)
        # What an earlier request left in the slot may be NaN or infinite, and 0 · NaN is NaN.
        old_part = old_part.masked_fill((old < 0)[:, None, :, None], 0.0)
        new_part = new.transpose(1, 2).masked_fill(~in_row[:, None, :, None], 0.0)
        zeros = new.new_zeros(1, 1, 1, 1).expand(rows, kv_heads, padding, q.shape[-1])
        return torch.cat((old_part, new_part, zeros), dim=2)

    out = attention.reference(q.transpose(1, 2), all_of(keys, k), all_of(values, v), seen)
    return out.transpose(1, 2)


def _in_ring(first: Tensor, size: int) -> Tensor:
    """int64 [rows, size]: the position that each place of a ring holds, of a slot that holds the
    `first` positions [rows]: place i the last p < first with p mod size = i; negative for none."""
    last = first[:, None] - 1
    return last - torch.remainder(last - torch.arange(size, device=first.device), size)


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


@dataclass(frozen=True)
class Prefixes:
    """What the slots of rows hold of one layer."""

    keys: Tensor  # [slots, kv_heads, size, d], position p at p mod size
    values: Tensor
    slots: Tensor  # int64 [rows]
    first: Tensor  # int64 [rows]: how many positions each slot holds
    window: int | None
    """A canvas sees the last `window - 1` positions of what comes before it; None: all."""


@dataclass(frozen=True)
class Questions:
    """Keys of one layer that follow the prefixes of rows and stand beside their slots."""

    keys: Tensor  # [kv_heads, places, d], of all questions
    values: Tensor
    starts: Tensor  # int64 [rows]: the first place of each row's question
    counts: Tensor  # int64 [rows]: how many it has; 0 for none
    longest: int  # no count is higher


@operation
def read_attention(
    q: Tensor, k: Tensor, v: Tensor, prefixes: Prefixes, questions: Questions
) -> Tensor:
    """Softmax attention of canvases that follow questions, one a row, scale 1, grouped heads.

    q [rows, n, heads, d]; k and v [rows, n, kv_heads, d] → like q.  Each position sees all of its
    own canvas, and of what comes before the canvas what the window shows: first the slot's
    positions and then the question's.
    """
    rows, length, _, d = q.shape
    kv_heads, size = prefixes.keys.shape[1:3]
    longest, window = questions.longest, prefixes.window
    first, counts = prefixes.first[:, None], questions.counts[:, None]
    old = _in_ring(prefixes.first, size)
    own = torch.arange(longest, device=q.device)
    sees_old, sees_own = old >= 0, own < counts
    if window is not None:
        # All positions of a canvas count as its first, which stands at first + counts.
        sees_old = sees_old & (old > first + counts - window)
        sees_own = sees_own & (own > counts - window)
    in_canvas = sees_own.new_ones(1, 1).expand(rows, length)
    padding = -(size + longest + length) % KEYS
    nothing = sees_own.new_zeros(1, 1).expand(rows, padding)
    seen = torch.cat((sees_old, sees_own, in_canvas, nothing), dim=1)  # [rows, keys]
    places = questions.starts[:, None] + own
    places = places.clamp(max=questions.keys.shape[1] - 1).flatten()

    def all_of(held: Tensor, beside: Tensor, new: Tensor) -> Tensor:
        own_part = beside.index_select(1, places).unflatten(1, (rows, longest)).transpose(0, 1)
        old_part = gathered(held, prefixes.slots, q.dtype)
        zeros = new.new_zeros(1, 1, 1, 1).expand(rows, kv_heads, padding, d)
        parts = old_part, own_part.to(q.dtype), new.transpose(1, 2), zeros
        # What earlier requests left may be NaN or infinite, and 0 · NaN is NaN.
        return torch.cat(parts, dim=2).masked_fill_(~seen[:, None, :, None], 0.0)

    keys = all_of(prefixes.keys, questions.keys, k)
    values = all_of(prefixes.values, questions.values, v)
    return over_seen(q, keys, values, seen)
