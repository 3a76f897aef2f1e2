"""Products with weights, and what a layer does between them, in plain torch: the executable
specification.

A `Weight` in another form than floats is dequantized.  Every function is
differentiable in its float arguments, works on any torch device, and treats rows independently up
to rounding.  None reads a number on the host, copies to the device or has a shape that depends on
data, and the number of tensor operations does not depend on the number of rows.  What a layer does
is made of smaller operations, whose twins serve there too; elsewhere a reference calls references.

Of one operation of torch this is known only by half: `expert_products` calls `F.grouped_mm`, which
torch serves by a kernel on some devices and by a fallback on others, and a fallback may read the
offsets of the groups on the host.  A trace on a device without numbers cannot show that, since it
sees the operation and not what serves it; on no device has it been measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.ops.registry import PANELS, form_of, operation
from sfumato.weights.formats import Stored, Weight

Gating = Literal["gelu", "silu"]
"""The function of a gate: GELU in its tanh approximation, or SiLU."""

ROWS = 64
"""The `tile` for products with a small number of rows; see `ops.linear`."""

GROUP = 16
"""The number of the tokens of an expert is padded to a multiple of this.  Torch's kernels choose by
the shape how they split a sum."""

SLICE = 1 << 26
"""Elements of a weight that are dequantized at a time."""

COLUMNS = 128
"""Columns of the embedding that `own_scores` gathers at a time, or those of one block."""


@operation
def dense(weight: Weight, dtype: torch.dtype, spare: Tensor | None = None) -> Tensor:
    """The weight as a float tensor of `dtype`; a float tensor of that dtype is not copied.

    spare: memory of its shape and dtype, which may be taken for the result: fresh memory costs
    more than the work where weights are dequantized over and over.
    """
    return weight.to(dtype)


@operation
def linear(x: Tensor, weight: Weight, tile: int | None = None) -> Tensor:
    """`x @ weight.T`.

    x [..., in], weight [out, in] → [..., out] in x's dtype.
    tile: rows of each of torch's products on a CPU, such as ROWS for a small number of rows; None:
    by the weight's size.
    """
    x = multiplied(x, weight)
    products = [F.linear(x, dense.reference(part, x.dtype)) for part in parts(weight)]
    return products[0] if len(products) == 1 else torch.cat(products, -1)


def parts(weight: Weight) -> Iterator[Weight]:
    """The rows of a matrix in order, in parts of SLICE elements if it has to be dequantized: the
    output matrix of a large vocabulary would take gigabytes at once."""
    if not isinstance(weight, Stored) or form_of(weight) == PANELS:  # whose rows do not lie apart
        yield weight
        return
    rows, columns = weight.shape
    step = max(1, SLICE // columns)
    yield from (weight[start : start + step] for start in range(0, rows, step))


def multiplied(x: Tensor, weight: Weight) -> Tensor:
    """What a weight is multiplied with: x [..., in], and for a weight of codes x rounded to
    such codes, in x's dtype."""
    return weight.factor(x) if isinstance(weight, Stored) else x


@operation
def gated(gate: Tensor, up: Tensor, gating: Gating = "gelu") -> Tensor:
    """`f(gate) · up` of the same shape, where f is what `Gating` says."""
    return (F.silu(gate) if gating == "silu" else F.gelu(gate, approximate="tanh")) * up


@operation
def linear_each(
    x: Tensor, first: Weight, second: Weight, third: Weight | None = None
) -> tuple[Tensor, ...]:
    """`x @ weight.T` of each of two or three weights [out, in], as `linear` gives it: x [..., in] →
    [..., out] of each in x's dtype."""
    weights = (first, second) if third is None else (first, second, third)
    return tuple(linear(x, weight) for weight in weights)


@operation
def linear_gated(x: Tensor, gate: Weight, up: Weight, gating: Gating = "gelu") -> Tensor:
    """`f(x @ gate.T) · (x @ up.T)`, where f is what `Gating` says: x [..., in], both weights [out,
    in] → [..., out] in x's dtype."""
    return gated(linear(x, gate), linear(x, up), gating)


@operation
def embed(ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding. ids int64 [...], weight [vocab, hidden] → [..., hidden]."""
    if isinstance(weight, Tensor):
        return F.embedding(ids, weight).to(dtype)
    rows = weight.index_select(0, ids.reshape(-1)).to(dtype)
    return rows.view(*ids.shape, weight.shape[-1])


@operation
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last axis, in float32 at least; x's dtype
    again."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        wide = wide * weight.float()
    return wide.to(x.dtype)


@operation
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs (i, i + d/2). x [..., heads, d]; cos and sin [..., d/2]."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@operation
def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: Weight,
    down: Weight,
    gating: Gating = "gelu",
) -> Tensor:
    """A mixture of gated experts.

    x [tokens, hidden]; chosen int64 and shares float [tokens, k]; gate_up [experts, 2·m, hidden]
    with the gate first; down [experts, hidden, m] → [tokens, hidden].
    """

    def parts(rows: Tensor, offsets: Tensor) -> Tensor:
        gate, up = expert_products.reference(rows, offsets, gate_up).chunk(2, dim=-1)
        return expert_products.reference(gated.reference(gate, up, gating), offsets, down)

    return mixture(x, chosen, shares, gate_up.shape[0], parts)


def mixture(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    count: int,
    parts: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Computes `ops.experts`, of `count` experts; parts: what these make of rows [n, hidden], in
    groups that end at offsets int64 [count] → [n, hidden]."""
    # Tokens are sorted by expert, so that each expert's weights are read once. Every group begins
    # at a multiple of GROUP. A token's k parts are summed in the order of `chosen`.
    k = chosen.shape[-1]
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
    grouped = grouped.index_copy(0, place, x.index_select(0, order // k))
    return mixed(parts(grouped, offsets), order, place, shares)


def mixed(parts: Tensor, order: Tensor, place: Tensor, shares: Tensor) -> Tensor:
    """The sum of each token's parts, in the order of its choices, by its shares [tokens, k]: parts
    [any, hidden], of which the assignment order[i] has the one at place[i] → [tokens, hidden]."""
    back = torch.empty_like(order).scatter_(0, order, place)
    weighted = parts.index_select(0, back).view(*shares.shape, -1)
    return (weighted * shares.unsqueeze(-1).to(parts.dtype)).sum(1)


@operation
def expert_products(x: Tensor, offsets: Tensor, weight: Weight) -> Tensor:
    """Each group's rows by its expert's weight.

    x [rows, in]; offsets int64 [experts], where the groups end; weight [experts, out, in] →
    [rows, out]; rows past the last group are undefined.
    """
    count, *each = weight.shape
    x, step = multiplied(x, weight), count
    if isinstance(weight, Stored):
        step = max(1, SLICE // math.prod(each))
    if step >= count:
        return _product_of_groups(x, offsets, dense.reference(weight, x.dtype))
    out = x.new_zeros(len(x), each[0])
    rows = torch.arange(len(x), device=x.device)
    for a in range(0, count, step):
        first = offsets[a - 1] if a else offsets.new_zeros(())
        ends = offsets[a : a + step]
        some = x.index_select(0, (rows + first).clamp(max=len(x) - 1))
        floats = dense.reference(weight[a : a + step], x.dtype)
        part = _product_of_groups(some, ends - first, floats)
        inside = (rows >= first) & (rows < ends[-1])
        out = torch.where(inside[:, None], part.index_select(0, (rows - first).clamp(min=0)), out)
    return out


def _product_of_groups(x: Tensor, offsets: Tensor, weight: Tensor) -> Tensor:
    """Computes `expert_products` of a float weight."""
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


@operation
def own_scores(hidden: Tensor, weight: Weight, ids: Tensor) -> Tensor:
    """Products of each position with the rows of the weight that its ids name. hidden [n, hidden],
    weight [vocab, hidden], ids int64 [n, m] → [n, m] in the dtype of hidden."""
    # Gathers COLUMNS columns of the rows at a time, so that memory is bounded by n · m · COLUMNS
    # and the number of operations depends on the hidden size alone.
    size = hidden.shape[-1]
    step = max(COLUMNS, weight.format.block_size) if isinstance(weight, Stored) else COLUMNS
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    scores = hidden.new_zeros(ids.shape, dtype=wide)
    for a in range(0, size, step):
        b = min(a + step, size)
        rows = (
            weight.part_of_rows(ids.reshape(-1), a, b)
            if isinstance(weight, Stored)
            else weight[:, a:b].index_select(0, ids.reshape(-1))
        ).to(hidden.dtype)
        products = rows.view(*ids.shape, b - a).to(wide) @ hidden[:, a:b, None].to(wide)
        scores = scores + products[..., 0]
    return scores.to(hidden.dtype)


@operation
def prepare_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    norms_values: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """What attention reads of the projections of tokens: `rotate(norm(q))`, `rotate(norm(k))`, and
    v's norm without a weight, or v as it is.

    q [..., tokens, heads, d], k and v [..., tokens, kv_heads, d] (v None: k stands for it); the
    norms' weights [d]; cos and sin [..., tokens, d / 2] → q, k and v of the same shapes.
    """
    v = k if v is None else v
    v = rms_norm(v, None, eps) if norms_values else v
    k = rotate(rms_norm(k, k_weight, eps), cos, sin)
    return rotate(rms_norm(q, q_weight, eps), cos, sin), k, v


@operation
def after_attention(
    x: Tensor,
    attended: Tensor,
    weight: Tensor,
    dense_weight: Tensor,
    expert_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual after attention, `x + norm(attended)`, and two norms of it: what the dense MLP
    and the experts read. x and attended [..., hidden], the norms' weights [hidden] → like x."""
    x = x + rms_norm(attended, weight, eps)
    return x, rms_norm(x, dense_weight, eps), rms_norm(x, expert_weight, eps)


@operation
def after_layer(
    x: Tensor,
    dense: Tensor,
    mixed: Tensor,
    dense_weight: Tensor,
    mixed_weight: Tensor,
    weight: Tensor,
    scalar: Tensor,
    eps: float,
) -> Tensor:
    """The residual after a layer, `(x + norm(norm(dense) + norm(mixed))) · scalar`.

    x, dense and mixed [..., hidden]; the norms' weights [hidden]; scalar [1], or of each token
    [..., 1] → like x.
    """
    both = rms_norm(dense, dense_weight, eps) + rms_norm(mixed, mixed_weight, eps)
    return (x + rms_norm(both, weight, eps)) * scalar.to(x.dtype)


@operation
def beside(
    x: Tensor, first: Callable[[], Tensor], second: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """The results of two functions without arguments that read one input x [..., hidden], computed
    at the same time where a device gains by it. Neither reads what the other one writes, and both
    call operations, which serve as they do elsewhere: the bits are the same."""
    return first(), second()


@operation
def route(
    x: Tensor,
    weight: Weight,
    scale: Tensor | None,
    per_expert: Tensor | None,
    active: int,
    eps: float,
    shares_of_one: bool = True,
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their shares, in float32 at least: of the scores `norm(x) ·
    scale / sqrt(hidden) @ weight.T`, or `x @ weight.T` without a scale, the highest, and their
    softmax times `per_expert` (None: 1).

    x [tokens, hidden]; weight [experts, hidden]; scale [hidden]; per_expert [experts];
    shares_of_one: whether the softmax is among the experts chosen, else among all → chosen int64
    and shares float32 [tokens, active]; float64 where x is.
    """
    given = x.to(torch.promote_types(x.dtype, torch.float32))
    if scale is not None:
        given = rms_norm(given, None, eps) * scale.float() * x.shape[-1] ** -0.5
    shares, chosen = torch.softmax(linear(given, weight), dim=-1).topk(active, dim=-1)
    if shares_of_one:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return chosen, shares if per_expert is None else shares * per_expert.float()[chosen]
