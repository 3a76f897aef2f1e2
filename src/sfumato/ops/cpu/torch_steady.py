"""Plain torch on a CPU in which a row's result does not depend, to the last bit, on other rows.

Torch rounds by shape and place.  So products, attention and GELU are computed here in shapes that
do not depend on how many other rows there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.attention_reference import KEYS, Causal, Own, Rows, attention, joined
from sfumato.ops.online_softmax import Bans, SoftmaxState, scored, take
from sfumato.ops.reference import ROWS, Gating
from sfumato.ops.registry import TORCH, choose, form_of, twin
from sfumato.weights.formats import Weight

LARGE_TILE, EXPERT_TILE = 256, 16
"""Rows of every product with a large weight, and with a large one of an expert; ROWS with a small
one.

Torch's libraries choose kernels, and how a sum is cut, by the number of rows: in bfloat16, and in
float32 with large weights, two numbers of rows seldom round alike, multiples of 16 or not. With
one fixed number they always do, wherever a row stands (measured with MKL and oneDNN, AVX2 to AMX).
A small tile has little padding; a large one reads the weight less often. An expert has a small
number of tokens."""

LARGE = 1 << 20
"""Elements from which a weight is large: time goes into reading it, rather than into calls."""

QUERIES = 64
"""Queries of one call of torch's causal attention; its keys come in multiples of KEYS."""

GATHERED = 512
"""Rows of the embedding that `own_scores` gathers at a time: a core's second cache holds them, and
the C library keeps their memory for the next ones."""


def _dense(weight: Weight, dtype: torch.dtype, spare: Tensor | None = None) -> Tensor:
    """The weight in floats; spare: memory that may be taken for them."""
    given = weight, dtype, spare
    floats: Tensor = choose("dense", weight.device, form_of(weight), *given)(*given)
    return floats


@twin("linear", "cpu", backend=TORCH)
def linear(x: Tensor, weight: Weight, tile: int | None = None) -> Tensor:
    """See `ops.linear`."""
    rows = reference.multiplied(x.reshape(-1, x.shape[-1]).contiguous(), weight)
    size = tile or (LARGE_TILE if math.prod(weight.shape) >= LARGE else ROWS)
    out, start = rows.new_empty(len(rows), weight.shape[0]), 0
    for part in reference.parts(weight):
        end = start + part.shape[0]
        _multiply(rows, part, size, out[:, start:end])
        start = end
    return out.view(*x.shape[:-1], weight.shape[0])


def _multiply(rows: Tensor, weight: Weight, size: int, out: Tensor) -> None:
    """Writes rows @ weight.T to `out`, `size` rows at a time."""
    factor = _dense(weight, rows.dtype).T
    full = len(rows) // size * size
    for at in range(0, full, size):
        torch.mm(rows[at : at + size], factor, out=out[at : at + size])
    if rest := len(rows) - full:
        padded = F.pad(rows[full:], (0, 0, 0, size - rest))
        out[full:] = torch.mm(padded, factor)[:rest]


@twin("gated", "cpu", backend=TORCH)
def gated(gate: Tensor, up: Tensor, gating: Gating = "gelu") -> Tensor:
    """See `ops.gated`; the function in float32, rounded to the dtype before the product.

    Torch's own takes another tanh or exponential for the last few elements of a call or a thread's
    share.
    """
    wide = gate.float()
    if gating == "silu":
        return (wide * 0.5).tanh_().add_(1.0).mul_(wide).mul_(0.5).to(gate.dtype) * up
    curve = wide.square().mul_(0.044715).add_(1.0).mul_(wide).mul_(math.sqrt(2 / math.pi)).tanh_()
    return curve.add_(1.0).mul_(wide).mul_(0.5).to(gate.dtype) * up


@twin("embed", "cpu", backend=TORCH)
def embed(ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """See `ops.embed`."""
    if not isinstance(weight, Tensor):
        rows = _dense(weight.index_select(0, ids.reshape(-1)), dtype)
        return rows.view(*ids.shape, weight.shape[-1])
    return reference.embed.reference(ids, weight, dtype)


def _more_keys_than_queries(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    causal: Causal | None,
    own: object = (),
) -> bool:
    return not own and causal is not None and sum(part.shape[1] for part in keys) >= len(q)


@twin("attend", "cpu", serves=_more_keys_than_queries, backend=TORCH)
def attend_causally(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    causal: Causal | None = None,
    own: Sequence[Own] = (),
) -> Tensor:
    """Attention of one row of which a token's result does not depend on the other tokens of a call.

    The queries' own keys are the last ones.  Torch rounds by the number of queries, by a query's
    place among them, and by where its blocks of 512 keys begin and end.  So tokens go in aligned
    tiles: a token is always the same one of QUERIES, which see the same blocks of KEYS, if the
    first key's position is a multiple of KEYS.
    """
    q, k, v = q.transpose(0, 1), joined(keys, q.dtype), joined(values, q.dtype)
    assert causal is not None
    seen = causal.mask()
    n, m = seen.shape
    front = (m - n) % QUERIES
    rows, short = (front, -(front + n) % QUERIES), -m % KEYS
    q, seen = F.pad(q, (0, 0, *rows)), F.pad(seen, (0, short, *rows))
    k, v = F.pad(k, (0, 0, 0, short)), F.pad(v, (0, 0, 0, short))
    parts = []
    for queries, sees in zip(q.split(QUERIES, 1), seen.split(QUERIES), strict=True):
        blocks = sees.any(dim=0).view(-1, KEYS).any(dim=1).nonzero()[:, 0].tolist() or [0]
        at = slice(blocks[0] * KEYS, (blocks[-1] + 1) * KEYS)
        hidden = q.new_zeros(QUERIES, at.stop - at.start)
        hidden.masked_fill_(~sees[:, at], float("-inf"))
        parts.append(attention.reference(queries.contiguous(), k[:, at], v[:, at], hidden))
    return torch.cat(parts, dim=1)[:, front : front + n].transpose(0, 1)


@twin("attend_padded", "cpu", serves=lambda q, k, v, rows: rows.plain, backend=TORCH)
def attend_padded(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """See `ops.attend_padded`. One canvas after another, each in the shape that it has alone."""
    out = torch.zeros_like(q)
    numbers = rows.slots, rows.first.clamp(max=rows.keys.shape[2]), rows.widths(q.shape[1])
    each = zip(*(x.tolist() for x in numbers), strict=True)
    for row, (slot, held, width) in enumerate(each):
        if width:
            pairs = (rows.keys, k), (rows.values, v)
            keys, values = (
                (old[slot, :, :held], new[row, :width].transpose(0, 1)) for old, new in pairs
            )
            alone = q[row, :width], keys, values, None, ()
            out[row, :width] = choose("attend", q.device, "any", *alone)(*alone)
    return out


@twin("experts", "cpu", backend=TORCH)
def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: Weight,
    down: Weight,
    gating: Gating = "gelu",
) -> Tensor:
    """See `ops.experts`."""
    k = chosen.shape[-1]
    order = chosen.reshape(-1).argsort(stable=True)
    counts = torch.bincount(chosen.reshape(-1), minlength=gate_up.shape[0]).tolist()

    def products(groups: Sequence[Tensor], weight: Weight) -> Tensor:
        tile = EXPERT_TILE if math.prod(weight.shape[1:]) >= LARGE else ROWS
        pairs = [(group, expert) for expert, group in enumerate(groups) if len(group)]
        return torch.cat([linear(group, weight[expert], tile) for group, expert in pairs])

    gate, up = products(x.index_select(0, order // k).split(counts), gate_up).chunk(2, dim=-1)
    parts = products(gated(gate, up, gating).split(counts), down)
    return reference.mixed(parts, order, torch.arange(len(order)), shares)


@twin("expert_products", "cpu", backend=TORCH)
def expert_products(x: Tensor, offsets: Tensor, weight: Weight) -> Tensor:
    """See `ops.expert_products`; rows past the last group are zeros."""
    out = x.new_zeros(len(x), weight.shape[1])
    tile, start = EXPERT_TILE if math.prod(weight.shape[1:]) >= LARGE else ROWS, 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            out[start:end] = reference.linear(x[start:end], weight[expert], tile)
        start = end
    return out


@twin("own_scores", "cpu", backend=TORCH)
def own_scores(hidden: Tensor, weight: Weight, ids: Tensor) -> Tensor:
    """See `ops.own_scores`. Gathers at most GATHERED rows at a time."""
    if len(ids) == 1:  # torch multiplies one pair of matrices otherwise than several
        return own_scores(hidden.expand(2, -1), weight, ids.expand(2, -1))[:1]
    out = hidden.new_empty(ids.shape)
    step = max(2, GATHERED // max(1, ids.shape[1]))
    room = hidden.new_empty(min(step, len(ids)) * ids.shape[1], hidden.shape[1])
    for start in range(0, len(ids), step):
        at = slice(min(start, len(ids) - 2), start + step)  # never the last one alone, as above
        rows = _gathered(weight, ids[at].reshape(-1), room).view(*ids[at].shape, -1)
        out[at] = (rows @ hidden[at, :, None])[..., 0]
    return out


def _gathered(weight: Weight, ids: Tensor, room: Tensor) -> Tensor:
    """Rows of the embedding: ids int64 [n] → [n, hidden] in the dtype of `room` [n or more,
    hidden], and there if that can be."""
    spare = room[: len(ids)]
    if not isinstance(weight, Tensor):
        return _dense(weight.index_select(0, ids), spare.dtype, spare)
    if weight.dtype == spare.dtype:
        return torch.index_select(weight, 0, ids, out=spare)
    return weight.index_select(0, ids).to(spare.dtype)


@twin("update_softmax", "cpu", backend=TORCH)
def update_softmax(
    state: SoftmaxState,
    raw: Tensor,
    first_id: int,
    temperature: Tensor,
    softcap: float | None,
    dtype: torch.dtype,
    bans: Bans | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.update_softmax`. Leaves out the sort of scores that displace none of the top."""
    scores = scored(raw, first_id, temperature, softcap, bans)
    return take(state, scores, first_id, dtype, lazy=True)
