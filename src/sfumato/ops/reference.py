"""Every operation of the network in plain torch: the executable specification.

Weights come either as float tensors or as `Stored`, which is dequantized.  Every function is
differentiable in its float arguments, works on any torch device, and treats rows independently up
to rounding.  None reads a number on the host, copies to the device or has a shape that depends on
data, and, but for `attend_shared`, the number of tensor operations does not depend on the number of
rows.

Of one operation of torch this is known only by half: `experts` calls `F.grouped_mm`, which torch
serves by a kernel on some devices and by a fallback on others, and a fallback may read the offsets
of the groups on the host.  A trace on a device without numbers cannot show that, since it sees the
operation and not what serves it; on no device has it been measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.ops.narrow_cache import gathered, widened
from sfumato.ops.registry import ANY, BLOCKS, SCALED, choose, reference, register_form
from sfumato.weights.blocks import BlockFormat, QuantizedTensor
from sfumato.weights.scaled import ScaledTensor, round_rows


class Stored(Protocol):
    """A weight in another form than floats: blocks, or panels that a faster twin multiplies."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice, /) -> Stored: ...

    def dequantize(self, dtype: torch.dtype, /) -> Tensor: ...


Weight = Tensor | Stored


class StoredRows(Stored, Protocol):
    """An embedding in another form than floats and blocks."""

    @property
    def format(self) -> BlockFormat: ...

    def index_select(self, ids: Tensor, /) -> Stored: ...

    def part_of_rows(self, ids: Tensor, first: int, end: int, /) -> Stored: ...


Embedding = Tensor | QuantizedTensor | StoredRows

register_form(QuantizedTensor, BLOCKS)
register_form(ScaledTensor, SCALED)

ROWS = 64
"""The `tile` for products with a small number of rows; see `ops.linear`."""

KEYS, QUERIES, GROUP = 512, 16, 16
"""The numbers of keys and queries of a canvas, and of the tokens of an expert, are padded to
multiples of these.  Torch's kernels choose by the shape how they split a sum: without padding, a
canvas of 100 beside one of 128 rounds otherwise than alone."""

SLICE = 1 << 26
"""Elements of the experts' weights that are dequantized at a time."""

COLUMNS = 128
"""Columns of the embedding that `own_scores` gathers at a time, or those of one block."""


@reference("dense")
def dense(weight: Weight, dtype: torch.dtype, spare: Tensor | None = None) -> Tensor:
    """The weight as a float tensor of `dtype`; a float tensor of that dtype is not copied."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize(dtype)


@reference("linear")
def linear(x: Tensor, weight: Weight, tile: int | None = None) -> Tensor:
    """`x @ weight.T`: x [..., in], weight [out, in] → [..., out] in x's dtype."""
    return F.linear(multiplied(x, weight), dense(weight, x.dtype))


def multiplied(x: Tensor, weight: Weight) -> Tensor:
    """What a weight is multiplied with: x [..., in], and for a weight of codes x rounded to
    such codes, in x's dtype."""
    return round_rows(x, weight.kind).dequantize(x.dtype) if isinstance(weight, ScaledTensor) else x


@reference("geglu")
def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """`gelu(gate) · up`, where gelu(x) = x · Φ(x) by the tanh approximation."""
    return F.gelu(gate, approximate="tanh") * up


@reference("embed")
def embed(ids: Tensor, weight: Embedding, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding: ids int64 [...], weight [vocab, hidden] → [..., hidden]."""
    if not isinstance(weight, Tensor):
        rows = weight.index_select(ids.reshape(-1)).dequantize(dtype)
        return rows.view(*ids.shape, weight.shape[-1])
    return F.embedding(ids, weight).to(dtype)


@reference("rms_norm")
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last axis, in float32; x's dtype again."""
    wide = x.float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        wide = wide * weight.float()
    return wide.to(x.dtype)


@reference("rotate")
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs (i, i + d/2): x [..., heads, d]; cos and sin [..., d/2]."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@reference("attention")
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention with scale 1 and grouped heads.

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


NOWHERE = 2**31 - 1
"""A position after all others, which no token sees; int32 for kernels."""


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


@reference("attend")
def attend(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], causal: Causal | None = None
) -> Tensor:
    """Softmax attention of one row's tokens, scale 1, grouped heads.

    q [tokens, heads, d]; keys and values in parts, one after another, each [kv_heads, n, d], whose
    dtypes may differ, or as a narrow cache stores them, [kv_heads, n, stored width]; causal None:
    every token sees every key → like q.
    """
    k, v = joined(keys, q.dtype), joined(values, q.dtype)
    mask = None if causal is None else causal.mask()
    return attention(q.transpose(0, 1), k, v, mask).transpose(0, 1)


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
        """Of each row by itself."""
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


@reference("attend_shared")
def attend_shared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    own: Sequence[OwnKeys],
    causal: SharedCausal,
) -> Tensor:
    """Attention of rows that follow one prefix; see `ops.attend_shared`. Each as it is alone."""
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


@reference("canvas_attention")
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
    """Attention of canvases, one a row; see `ops.canvas_attention`."""
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


@reference("experts")
def experts(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """A gated-GELU mixture of experts; see `ops.experts`.

    Tokens are sorted by expert, so that each expert's weights are read once.  Every group begins
    at a multiple of GROUP.  A token's k parts are summed in the order of `chosen`.
    """
    count, k = gate_up.shape[0], chosen.shape[-1]
    order = chosen.reshape(-1).argsort(stable=True)
    expert = chosen.reshape(-1).index_select(0, order)
    ends = torch.searchsorted(expert, torch.arange(count, device=x.device), right=True)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = (sizes + (GROUP - 1)) // GROUP * GROUP
    offsets = padded.cumsum(0)  # where the group of each expert ends
    shift = (offsets - padded) - (ends - sizes)
    place = torch.arange(len(order), device=x.device) + shift.index_select(0, expert)
    total = len(order) + (GROUP - 1) * min(count, len(order))
    grouped = x.new_zeros(total, x.shape[-1])
    grouped = grouped.index_copy(0, place, multiplied(x, gate_up).index_select(0, order // k))
    gate, up = _grouped_product(grouped, offsets, gate_up).chunk(2, dim=-1)
    parts = _grouped_product(multiplied(geglu(gate, up), down), offsets, down)
    back = torch.empty_like(place).scatter_(0, order, place)
    weighted = parts.index_select(0, back).view(*chosen.shape, -1)
    return (weighted * shares.unsqueeze(-1).to(x.dtype)).sum(1)


def _grouped_product(x: Tensor, offsets: Tensor, weight: Weight) -> Tensor:
    """Each group's rows by its expert's weight: x [rows, in]; offsets int64 [experts], where the
    groups end; weight [experts, out, in] → [rows, out]; rows past the last group are undefined."""
    count, *each = weight.shape
    step = count if isinstance(weight, Tensor) else max(1, SLICE // math.prod(each))
    if step >= count:
        return _product_of_groups(x, offsets, dense(weight, x.dtype))
    out = x.new_zeros(len(x), each[0])
    rows = torch.arange(len(x), device=x.device)
    for a in range(0, count, step):
        first = offsets[a - 1] if a else offsets.new_zeros(())
        ends = offsets[a : a + step]
        some = x.index_select(0, (rows + first).clamp(max=len(x) - 1))
        part = _product_of_groups(some, ends - first, dense(weight[a : a + step], x.dtype))
        inside = (rows >= first) & (rows < ends[-1])
        out = torch.where(inside[:, None], part.index_select(0, (rows - first).clamp(min=0)), out)
    return out


def _product_of_groups(x: Tensor, offsets: Tensor, weight: Tensor) -> Tensor:
    """As `_grouped_product`, of a float weight."""
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if aligned and x.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets.int())
    # Torch's grouped product refuses these: multiply all rows by each weight, and keep of each
    # product the rows of that expert.
    expert = torch.searchsorted(offsets, torch.arange(len(x), device=x.device), right=True)
    out = x.new_zeros(len(x), weight.shape[1])
    for index, each in enumerate(weight):
        out = torch.where((expert == index)[:, None], F.linear(x, each), out)
    return out


@reference("own_scores")
def own_scores(hidden: Tensor, weight: Embedding, ids: Tensor) -> Tensor:
    """Products of each position with the rows that its ids name; see `ops.own_scores`.

    Gathers COLUMNS columns of the rows at a time, so that memory is bounded by n · m · COLUMNS and
    the number of operations depends on the hidden size alone.
    """
    size = hidden.shape[-1]
    step = COLUMNS
    if not isinstance(weight, Tensor):
        step = max(COLUMNS, weight.format.block_size)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    scores = hidden.new_zeros(ids.shape, dtype=wide)
    for a in range(0, size, step):
        b = min(a + step, size)
        rows = _part_of_rows(weight, ids.reshape(-1), a, b, hidden.dtype)
        products = rows.view(*ids.shape, b - a).to(wide) @ hidden[:, a:b, None].to(wide)
        scores = scores + products[..., 0]
    return scores.to(hidden.dtype)


def _part_of_rows(weight: Embedding, ids: Tensor, a: int, b: int, dtype: torch.dtype) -> Tensor:
    """Columns a..b, of whole blocks, of the rows `ids` int64 [n] → [n, b - a]."""
    if isinstance(weight, Tensor):
        return weight[:, a:b].index_select(0, ids).to(dtype)
    if not isinstance(weight, QuantizedTensor):
        return weight.part_of_rows(ids, a, b).dequantize(dtype)
    size, nbytes = weight.format.block_size, weight.format.block_bytes
    data = weight.data[:, a // size * nbytes : b // size * nbytes].index_select(0, ids)
    return QuantizedTensor(data, weight.format, (len(ids), b - a)).dequantize(dtype)
