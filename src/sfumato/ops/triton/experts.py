"""The mixture of experts: its router, which is float32 throughout, and four launches; nothing is
read on the host.

1. The assignments are sorted by expert.
2. Gate and up products of each expert's tokens, and the activation of both.
3. Down products, each weighted by its token's share and stored at its assignment's number.
4. The sum of each token's k parts, in the order in which they were chosen.

With weights of 8-bit codes the tokens become codes once, before the experts gather them, and what
gate and up make of them before the down product, a row at a time, where the device multiplies such.

An assignment is one of the k experts of a token; its number is token · k + place.  Nothing here
has a shape that depends on the choice: a product over groups of tokens gets as many programs as
the worst choice needs, and those beyond the last group leave early.

An expert has 16 of 2,048 assignments on average, and a product of 16 rows wastes three quarters of
an instruction that multiplies 64.  So the weight's rows are the M side of the product, and the
tokens its N side, for which wgmma takes any multiple of 8.  A tile has 64 tokens whatever their
number: nearly every expert's tokens fit in one at 256 tokens, so that weights are read once, and
what the matrix units do for nothing hides behind that reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.reference import Gating
from sfumato.ops.triton.kernel import Kernel, interpreting, launch, register
from sfumato.ops.triton.operands import elementwise, matrix, multiplies, use_for
from sfumato.ops.triton.planes import PlaneTensor
from sfumato.ops.triton.self_test import KernelTwin, Trial, compare, twins_of, whole_blocks
from sfumato.ops.triton.tiles import tile_for
from sfumato.ops.triton.weights import (
    Operand,
    as_descriptor,
    as_weight,
    gathered,
    no_sums,
    of_forms,
    operand,
    scaled,
    weight_block,
    weight_product,
)
from sfumato.weights.formats import ScaledTensor

Stored = Tensor | PlaneTensor | ScaledTensor


@triton.jit(do_not_specialize=["count"])
def _sort(
    chosen: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    count: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One program an expert. order int32 [count]: the numbers of the assignments by expert, those
    of one expert rising; starts int32 [EXPERTS + 1]: where each expert's begin, and the end.

    Each program reads all choices twice, from the L2 cache: 128 programs of 2,048 choices read
    4 MB, and none waits for another, as the steps of one radix sort would. The order is that of a
    stable sort, without atomics, so that it is the same in every run.
    """
    expert = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    below = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, count, BLOCK):
        numbers = tl.load(chosen + at + places, mask=at + places < count, other=EXPERTS)
        below += (numbers < expert).to(tl.int32)
    position = tl.sum(below)
    tl.store(starts + expert, position)
    for at in range(0, count, BLOCK):
        numbers = tl.load(chosen + at + places, mask=at + places < count, other=EXPERTS)
        mine = (numbers == expert).to(tl.int32)
        rank = tl.cumsum(mine, 0) - 1
        tl.store(order + position + rank, at + places, mask=mine != 0)
        position += tl.sum(mine)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, position)


SORT = register(
    Kernel(
        "experts_sort",
        _sort,
        {"chosen": "*i64:16", "order": "*i32:16", "starts": "*i32:16", "count": "i32"},
        {"EXPERTS": 128},
    )
)


@triton.jit
def group_of(
    starts: tl.tensor,
    tile: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """The expert of a tile of at most TOKENS assignments, where the tile begins in the order, and
    where its expert's assignments end; the expert is at least EXPERTS beyond the last tile.

    EXPERTS_PADDED: EXPERTS up to a power of two. Each program finds this out by itself, which
    takes it under a microsecond of the twenty in which it reads its block of the weight, and saves
    a launch that writes a table of tiles.
    """
    numbers = tl.arange(0, EXPERTS_PADDED)
    inside = numbers < EXPERTS
    first = tl.load(starts + numbers, mask=inside, other=0)
    end = tl.load(starts + numbers + 1, mask=inside, other=0)
    tiles = (end - first + TOKENS - 1) // TOKENS
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32))
    mine = numbers == expert
    earlier = tl.sum(tl.where(mine, ends - tiles, 0))
    start = tl.sum(tl.where(mine, first, 0)) + (tile - earlier) * TOKENS
    return expert, start, tl.sum(tl.where(mine, end, 0))


@triton.jit
def _gelu(x: tl.tensor) -> tl.tensor:
    """gelu by the tanh approximation: ½ · (1 + tanh(y)) is sigmoid(2 · y), which loses no digits
    where tanh(y) is near -1."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _gate_up(
    x: tl.tensor, x_scales: tl.tensor, weight: tl.tensor, scales: tl.tensor, order: tl.tensor,
    starts: tl.tensor, activated: tl.tensor,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, CHOSEN: tl.constexpr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, SILU: tl.constexpr, FORMAT: tl.constexpr,
    OUT: tl.constexpr, TOKENS: tl.constexpr, IN: tl.constexpr, UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> None:  # fmt: skip
    """activated [assignments by expert, INNER] = f(gate) · up of x [tokens, HIDDEN], where f is
    silu or gelu.

    weight [EXPERTS · 2 · INNER, HIDDEN], an expert's gate rows before its up rows; scales: of its
    rows, and x_scales of the tokens, where these are codes. A program makes OUT columns of at most
    TOKENS assignments of one expert; grid (⌈INNER / OUT⌉, worst number of tiles). Programs of one
    expert follow each other, so that its tokens come from the L2 cache.
    """
    expert, start, end = group_of(starts, tl.program_id(1), EXPERTS, EXPERTS_PADDED, TOKENS)
    if expert >= EXPERTS:
        return
    many = EXPERTS * 2 * INNER
    weight = as_weight(weight, many, HIDDEN, OUT, IN, FORMAT, DESCRIPTORS)
    row = tl.program_id(0) * OUT
    first = expert * (2 * INNER) + row
    places = start + tl.arange(0, TOKENS)
    mine = places < end
    token = tl.load(order + places, mask=mine, other=0) // CHOSEN
    columns = tl.arange(0, IN)
    # Tokens come by gather: the copy engine of sm_90 reads no list of rows.
    source = x + token.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    gate = no_sums(OUT, TOKENS, FORMAT)
    up = no_sums(OUT, TOKENS, FORMAT)
    DTYPE: tl.constexpr = activated.dtype.element_ty
    for column in range(0, HIDDEN, IN):
        inside = mine[:, None] & (column + columns < HIDDEN)[None, :]
        tokens = gathered(source + column, inside, FORMAT).T
        block = weight_block(weight, first, column, many, HIDDEN, OUT, IN, FORMAT, DTYPE)
        gate = weight_product(block, tokens, gate, IN, FORMAT, UPCAST)
        block = weight_block(weight, first + INNER, column, many, HIDDEN, OUT, IN, FORMAT, DTYPE)
        up = weight_product(block, tokens, up, IN, FORMAT, UPCAST)
    rows = row + tl.arange(0, OUT)
    gates = scaled(gate, scales, expert * (2 * INNER), rows, INNER, x_scales, token, mine)
    ups = scaled(up, scales, expert * (2 * INNER) + INNER, rows, INNER, x_scales, token, mine)
    value = (gates * tl.sigmoid(gates) if SILU else _gelu(gates)) * ups
    target = activated + places.to(tl.int64)[:, None] * INNER + rows[None, :]
    tl.store(target, value.T, mask=mine[:, None] & (rows < INNER)[None, :])


@triton.jit(do_not_specialize=["assignments"])
def _down(
    activated: tl.tensor, x_scales: tl.tensor, weight: tl.tensor, scales: tl.tensor,
    order: tl.tensor, starts: tl.tensor, shares: tl.tensor, parts: tl.tensor,
    assignments: tl.tensor,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, HIDDEN: tl.constexpr,
    INNER: tl.constexpr, FORMAT: tl.constexpr, OUT: tl.constexpr, TOKENS: tl.constexpr,
    IN: tl.constexpr, UPCAST: tl.constexpr, DESCRIPTORS: tl.constexpr,
) -> None:  # fmt: skip
    """parts [assignments, HIDDEN] = the down product of `activated`, by the assignments' shares.

    weight [EXPERTS · HIDDEN, INNER]; shares float32 [assignments]; scales: of the weight's rows,
    and x_scales of those of `activated`, where these are codes. Rows of `activated` follow the
    order, so they come by descriptor; what a tile reads beyond its expert's is not stored.
    """
    expert, start, end = group_of(starts, tl.program_id(1), EXPERTS, EXPERTS_PADDED, TOKENS)
    if expert >= EXPERTS:
        return
    weight = as_weight(weight, EXPERTS * HIDDEN, INNER, OUT, IN, FORMAT, DESCRIPTORS)
    activated = as_descriptor(activated, assignments, INNER, TOKENS, IN, DESCRIPTORS)
    row = tl.program_id(0) * OUT
    sums = no_sums(OUT, TOKENS, FORMAT)
    for column in range(0, INNER, IN):
        block = weight_block(
            weight, expert * HIDDEN + row, column, EXPERTS * HIDDEN, INNER, OUT, IN, FORMAT,
            parts.dtype.element_ty,
        )  # fmt: skip
        tokens = activated.load([start, column]).T
        sums = weight_product(block, tokens, sums, IN, FORMAT, UPCAST)
    places = start + tl.arange(0, TOKENS)
    mine = places < end
    assignment = tl.load(order + places, mask=mine, other=0)
    share = tl.load(shares + assignment, mask=mine, other=0.0)
    rows = row + tl.arange(0, OUT)
    value = scaled(sums, scales, expert * HIDDEN, rows, HIDDEN, x_scales, places, mine)
    target = parts + assignment.to(tl.int64)[:, None] * HIDDEN + rows[None, :]
    value = (value * share[None, :]).T
    tl.store(target, value, mask=mine[:, None] & (rows < HIDDEN)[None, :])


@triton.jit
def _combine(
    parts: tl.tensor,
    out: tl.tensor,
    CHOSEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """out [tokens, HIDDEN]: the sum of each token's CHOSEN parts, in their order, in float32."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(CHOSEN):
        source = parts + (token * CHOSEN + place) * HIDDEN + columns
        total += tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + columns, total, mask=inside)


_SIZES: dict[str, int | None] = dict.fromkeys(("x_scales", "scales"))
_SIZES |= {"EXPERTS": 128, "EXPERTS_PADDED": 128, "HIDDEN": 2816, "INNER": 704, "FORMAT": 0}

GATE_UP = of_forms(
    Kernel(
        "experts_gate_up",
        _gate_up,
        {
            "x": "*bf16:16",
            "weight": "tensordesc<bf16[{OUT}, {IN}]>",
            "order": "*i32:16",
            "starts": "*i32:16",
            "activated": "*bf16:16",
        },
        {**_SIZES, "CHOSEN": 8, "SILU": False},
        shapes={"silu": {"SILU": True}},
    ),
    *("HIDDEN", "Q4_K", "x"),
)
DOWN = of_forms(
    Kernel(
        "experts_down",
        _down,
        {
            "activated": "tensordesc<bf16[{TOKENS}, {IN}]>",
            "weight": "tensordesc<bf16[{OUT}, {IN}]>",
            "order": "*i32:16",
            "starts": "*i32:16",
            "shares": "*fp32:16",
            "parts": "*bf16:16",
            "assignments": "i32",
        },
        _SIZES,
    ),
    # 704 columns divide into no blocks of 256: a file of Q4_K has these as Q5_0 or Q8_0.
    *("INNER", "Q5_0", "activated"),
)
COMBINE = register(
    Kernel(
        "experts_combine",
        _combine,
        {"parts": "*bf16:16", "out": "*bf16:16"},
        {"CHOSEN": 8, "HIDDEN": 2816},
    )
)


def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: Stored,
    down: Stored,
    gating: Gating = "gelu",
) -> Tensor:
    """A mixture of gated experts; see `ops.experts`.

    x [tokens, hidden] bfloat16; gate_up [experts, 2·m, hidden] and down [experts, hidden, m]
    bfloat16, planes or codes; chosen int64 and shares float32 [tokens, k], of experts that exist →
    bfloat16 [tokens, hidden].
    Products and sums are float32; the activated products and the k parts of a token are rounded
    to bfloat16, where the reference rounds gate, up, shares and their products too.
    """
    out = torch.empty_like(x)
    if chosen.numel() == 0:
        return out.zero_()
    count, hidden, inner = down.shape
    x, shares = x.contiguous(), shares.float().contiguous()
    order, starts = sort(chosen.contiguous(), count)
    both = {"order": order, "starts": starts, "EXPERTS": count, "HIDDEN": hidden, "INNER": inner}
    both["EXPERTS_PADDED"] = triton.next_power_of_2(count)
    assignments, use, k = len(order), use_for(len(x)), chosen.shape[1]
    first, second = operand(gate_up), operand(down)
    activated = x.new_empty(assignments, inner)
    given, scales = first.multiplied(x)
    more = {"x": given, "x_scales": scales, "activated": activated, "CHOSEN": k}
    more["SILU"] = gating == "silu"
    _multiply(GATE_UP, first, use, inner, both | more)
    # Codes end before the parts begin, and the activated products once they are codes.
    del more
    given, scales = second.multiplied(activated)
    del activated
    parts = x.new_empty(assignments, hidden)
    more = {"activated": given, "x_scales": scales, "shares": shares, "parts": parts}
    _multiply(DOWN, second, use, hidden, both | more | {"assignments": assignments})
    tile = tile_for("experts_combine", out.device)
    grid = len(out), triton.cdiv(hidden, tile["BLOCK"])
    launch(COMBINE, grid, tile, out.device, parts=parts, out=out, CHOSEN=k, HIDDEN=hidden)
    return out


def _multiply(
    kernels: Mapping[str, Kernel], held: Operand, use: str, outputs: int, given: dict[str, Any]
) -> None:
    """One of the two products. use: of a tile; outputs: columns of the result; given: what the
    kernel takes beside the weight."""
    kernel, device = kernels[held.form], held.numbers.device
    tile = tile_for(kernel.name, device, use)
    if kernels is DOWN:  # tokens of the other are gathered, by addresses
        given["activated"] = matrix(given["activated"], tile["TOKENS"], tile["IN"])
    tiles = most_tiles(len(given["order"]), given["EXPERTS"], tile["TOKENS"])
    stored = held.stored(tile["OUT"], tile["IN"])
    grid = triton.cdiv(outputs, tile["OUT"]), tiles
    launch(kernel, grid, tile, device, **given, **stored, scales=held.scales)


def sort(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """chosen int64 [tokens, k], contiguous → `order` and `starts` as `_sort` has them."""
    count = chosen.numel()
    order = torch.empty(count, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=chosen.device)
    launch(
        SORT,
        (experts,),
        tile_for("experts_sort", chosen.device),
        chosen.device,
        chosen=chosen,
        order=order,
        starts=starts,
        count=count,
        EXPERTS=experts,
    )
    return order, starts


def most_tiles(count: int, experts: int, tile: int) -> int:
    """How many tiles of at most `tile` assignments the worst choice makes of `count`: each expert
    that is chosen at all may have one that is not full."""
    used = min(count, experts)
    return (count + used * (tile - 1)) // tile


def _serves(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Stored, down: Stored, gating: Gating
) -> bool:
    return chosen.dtype == torch.int64 and multiplies(x, gate_up, down)


def _check(format: str, trial: Trial) -> None:
    """Few tokens, and many; an uneven choice of a few experts: one has most tokens, one none. An
    interpreter has few columns of the down weight, which divide into no blocks of 256."""
    count, hidden, inner = (
        5,
        *(whole_blocks(format, width) for width in (trial.sizes.hidden, trial.sizes.expert)),
    )
    of_down = format
    if interpreting() and inner > 32:
        of_down, inner = "Q8_0", 32
    gate_up = trial.weight(format, count, 2 * inner, hidden)
    down = trial.weight(of_down, count, hidden, inner)
    for tokens in trial.sizes.tokens:
        x, scores = trial.random((tokens, hidden), (tokens, count))
        scores = scores.float()
        scores[:, 1] += 8
        scores[:, 3] -= 30
        shares, chosen = scores.softmax(-1).topk(2)
        given = x, chosen, shares
        compare(experts, reference.experts.reference, given, [gate_up, down])


@triton.jit(do_not_specialize=["tokens"])
def _router_scores(
    x: tl.tensor, weight: tl.tensor, scale: tl.tensor, scores: tl.tensor, tokens: tl.tensor,
    eps: tl.tensor, root: tl.tensor,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr, OUT: tl.constexpr,
    DEPTH: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """The scores of OUT experts for TOKENS tokens: norm(x) · scale · root @ weight.T.

    Grid: (⌈tokens / TOKENS⌉, ⌈EXPERTS / OUT⌉).  Float32 products have no matrix instruction, so
    the experts are spread over programs, each of which computes the norms of its tokens.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    begin = token.to(tl.int64)[:, None] * SIZE
    depth = tl.arange(0, DEPTH)
    squares = tl.zeros((TOKENS, DEPTH), tl.float32)
    for start in range(0, SIZE, DEPTH):
        column = (start + depth)[None, :]
        kept = inside[:, None] & (column < SIZE)
        part = tl.load(x + begin + column, mask=kept, other=0.0).to(tl.float32)
        squares += part * part
    unit = tl.rsqrt(tl.sum(squares, axis=1) / SIZE + eps)[:, None]
    expert = tl.program_id(1) * OUT + tl.arange(0, OUT)
    sums = tl.zeros((TOKENS, OUT), tl.float32)
    for start in range(0, SIZE, DEPTH):
        column = start + depth
        real = column < SIZE
        kept = inside[:, None] & real[None, :]
        part = tl.load(x + begin + column[None, :], mask=kept, other=0.0).to(tl.float32)
        by = tl.load(scale + column, mask=real, other=0.0).to(tl.float32)
        rows = tl.load(
            weight + expert[None, :] * SIZE + column[:, None],
            mask=(expert < EXPERTS)[None, :] & real[:, None],
            other=0.0,
        )
        part = part * unit * by[None, :] * root
        # The sums of a block come first: one after another, all SIZE products lose four times as
        # much. With a limit of its own the compiler adds a block's sums to no others.
        sums += tl.dot(
            part, rows.to(tl.float32), input_precision="ieee", max_num_imprecise_acc=DEPTH
        )
    at = token.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    tl.store(scores + at, sums, mask=inside[:, None] & (expert < EXPERTS)[None, :])


@triton.jit(do_not_specialize=["chosen", "shares"])
def _router_choice(
    scores: tl.tensor, per_expert: tl.tensor, chosen: tl.tensor, shares: tl.tensor,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, ACTIVE: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """The ACTIVE experts of the highest scores of a token, the best first (of equal ones the
    lowest), and their shares: the softmax among them, times each expert's scale."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    slot = tl.arange(0, triton.next_power_of_2(ACTIVE))
    left = tl.load(scores + token * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf"))
    peak = tl.max(left)
    weights = tl.zeros((triton.next_power_of_2(ACTIVE),), tl.float32)
    best = slot * 0
    for index in tl.static_range(ACTIVE):
        place = tl.argmax(left, axis=0, tie_break_left=True)
        weights = tl.where(slot == index, tl.exp(tl.max(left) - peak), weights)
        best = tl.where(slot == index, place, best)
        left = tl.where(expert == place, float("-inf"), left)
    # Where the scores are no numbers, the places may be any: none may lie outside.
    best = tl.minimum(tl.maximum(best, 0), EXPERTS - 1)
    share = weights / tl.sum(weights) * tl.load(per_expert + best).to(tl.float32)
    tl.store(chosen + token * ACTIVE + slot, best.to(tl.int64), mask=slot < ACTIVE)
    tl.store(shares + token * ACTIVE + slot, share, mask=slot < ACTIVE)


ROUTER_SCORES = register(
    Kernel(
        "router_scores",
        _router_scores,
        {
            "x": "*bf16:16",
            **dict.fromkeys(("weight", "scale", "scores"), "*fp32:16"),  # a router is float32
            "tokens": "i32",
            "eps": "fp32",
            "root": "fp32",
        },
        {"SIZE": 2816, "EXPERTS": 128},
    )
)

ROUTER_CHOICE = register(
    Kernel(
        "router_choice",
        _router_choice,
        {"scores": "*fp32:16", "per_expert": "*fp32:16", "chosen": "*i64", "shares": "*fp32"},
        {"EXPERTS": 128, "PADDED": 128, "ACTIVE": 8},
    )
)


def route(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    per_expert: Tensor | None,
    active: int,
    eps: float,
    shares_of_one: bool = True,
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their shares; see `ops.route`."""
    tokens, size = x.shape
    experts = len(weight)
    chosen = torch.empty(tokens, active, dtype=torch.int64, device=x.device)
    shares = torch.empty(tokens, active, device=x.device)
    if tokens == 0:
        return chosen, shares
    scores = torch.empty(tokens, experts, device=x.device)
    tile = tile_for("router_scores", x.device)
    launch(
        ROUTER_SCORES,
        (triton.cdiv(tokens, tile["TOKENS"]), triton.cdiv(experts, tile["OUT"])),
        tile,
        x.device,
        x=x.contiguous(),
        weight=weight,
        scale=scale,
        scores=scores,
        tokens=tokens,
        eps=eps,
        root=size**-0.5,
        SIZE=size,
        EXPERTS=experts,
    )
    launch(
        ROUTER_CHOICE,
        (tokens,),
        tile_for("router_choice", x.device),
        x.device,
        scores=scores,
        per_expert=per_expert,
        chosen=chosen,
        shares=shares,
        EXPERTS=experts,
        PADDED=triton.next_power_of_2(experts),
        ACTIVE=active,
    )
    return chosen, shares


def _serves_route(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    per_expert: Tensor | None,
    active: int,
    eps: float,
    shares_of_one: bool,
) -> bool:
    if scale is None or per_expert is None or not shares_of_one:
        return False
    return weight.is_contiguous() and elementwise(x, weight, scale, per_expert)


def _check_route(trial: Trial) -> None:
    (count, active), hidden = trial.sizes.router, trial.sizes.hidden
    x, *router = trial.random((18, hidden), (count, hidden), (hidden,), (count,))
    given = x, *(each.float() for each in router), active, 1e-6
    compare(route, reference.route.reference, given)


TWINS = {
    **twins_of("experts", experts, _serves, _check),
    "route": KernelTwin("route", route, _serves_route, _check_route),
}
