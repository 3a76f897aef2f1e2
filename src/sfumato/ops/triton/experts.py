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
tokens its N side, for which wgmma takes any multiple of 8.  A tile has 64 tokens, or 32 where
matrix units are slower than memory: nearly every expert's tokens fit in one at 256 tokens, so that
weights are read once, and what the matrix units do for nothing hides behind that reading.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.reference import Gating
from sfumato.ops.triton.kernel import Kernel, interpreting, launch, register
from sfumato.ops.triton.linear import Stored, multiply, product
from sfumato.ops.triton.operands import elementwise, multiplies
from sfumato.ops.triton.self_test import KernelTwin, Trial, compare, twins_of, whole_blocks
from sfumato.ops.triton.tiles import tile_for, use_for
from sfumato.ops.triton.weights import operand


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


_SIZES: dict[str, int | bool] = {"EXPERTS": 128, "EXPERTS_PADDED": 128}

GATE_UP = product(
    "experts_gate_up",
    ("order", "starts"),
    _SIZES | {"OUTPUTS": 704, "INPUTS": 2816, "CHOSEN": 8, "GATED": True},
    "Q4_K",
    types={"x": "*bf16:16"},
    shapes={"silu": {"SILU": True}},
)
DOWN = product(
    "experts_down",
    ("order", "starts", "shares"),
    _SIZES | {"OUTPUTS": 2816, "INPUTS": 704},
    "Q5_0",  # 704 columns divide into no blocks of 256: a file of Q4_K has these as Q5_0 or Q8_0
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
    both = {
        "order": order,
        "starts": starts,
        "EXPERTS": count,
        "EXPERTS_PADDED": triton.next_power_of_2(count),
    }
    assignments, use, k = len(order), use_for(len(x)), chosen.shape[1]
    first, second = operand(gate_up), operand(down)
    activated = x.new_empty(assignments, inner)
    more = {"CHOSEN": k, "GATED": True, "SILU": gating == "silu"}
    multiply(GATE_UP, [first], first.multiplied(x), [activated], use, **both, **more)
    # Codes end before the parts begin, and the activated products once they are codes.
    given = second.multiplied(activated)
    del activated
    parts = x.new_empty(assignments, hidden)
    multiply(DOWN, [second], given, [parts], use, **both, shares=shares)
    tile = tile_for("experts_combine", out.device)
    grid = len(out), triton.cdiv(hidden, tile["BLOCK"])
    launch(COMBINE, grid, tile, out.device, parts=parts, out=out, CHOSEN=k, HIDDEN=hidden)
    return out


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


def _serves(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Stored, down: Stored, gating: Gating
) -> bool:
    return chosen.dtype == torch.int64 and multiplies(x, gate_up, down)


def _check(format: str, trial: Trial) -> None:
    """Few tokens, and many; an uneven choice of a few experts: one has most tokens, one none. An
    interpreter has few columns of the down weight, which divide into no blocks of 256."""
    widths, count = (trial.sizes.hidden, trial.sizes.expert), 5
    hidden, inner = (whole_blocks(format, width) for width in widths)
    of_down, inner = ("Q8_0", 32) if interpreting() and inner > 32 else (format, inner)
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
    DEPTH: tl.constexpr, TF32: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """The scores of OUT experts for TOKENS tokens: norm(x) · scale · root @ weight.T.

    Grid: (⌈tokens / TOKENS⌉, ⌈EXPERTS / OUT⌉), so that the experts are spread over programs, each
    of which computes the norms of its tokens.

    TF32: a float32 number is the sum of two of TF32, whose eleven bits matrix units multiply, and
    of what is below 2⁻²² of it. A product is then those of the greater two and of either greater
    one with the other's less, and its error at most 3 · 2⁻²². Else the products are float32's,
    which have no matrix instruction.
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
            part,
            rows.to(tl.float32),
            input_precision="tf32x3" if TF32 else "ieee",
            max_num_imprecise_acc=DEPTH,
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
    return (
        scale is not None
        and per_expert is not None
        and shares_of_one
        and weight.is_contiguous()
        and elementwise(x, weight, scale, per_expert)
    )


def _check_route(trial: Trial) -> None:
    (count, active), hidden = trial.sizes.router, trial.sizes.hidden
    x, *router = trial.random((18, hidden), (count, hidden), (hidden,), (count,))
    given = x, *(each.float() for each in router), active, 1e-6
    compare(route, reference.route.reference, given)


TWINS = {
    **twins_of("experts", experts, _serves, _check),
    "route": KernelTwin("route", route, _serves_route, _check_route),
}
