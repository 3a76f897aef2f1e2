"""The router: which experts a token goes to, and with what shares.  Float32 throughout."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.operands import elementwise
from sfumato.ops.triton.self_test import KernelTwin, compare, random_like
from sfumato.ops.triton.tiles import tile_for


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
        sums = tl.dot(part, rows.to(tl.float32), sums, input_precision="ieee")
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
            **dict.fromkeys(("x", "weight", "scale"), "*bf16:16"),
            "scores": "*fp32:16",
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
        {"scores": "*fp32:16", "per_expert": "*bf16:16", "chosen": "*i64", "shares": "*fp32"},
        {"EXPERTS": 128, "PADDED": 128, "ACTIVE": 8},
    )
)


def route(
    x: Tensor, weight: Tensor, scale: Tensor, per_expert: Tensor, active: int, eps: float
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


def _serves(
    x: Tensor, weight: Tensor, scale: Tensor, per_expert: Tensor, active: int, eps: float
) -> bool:
    return weight.is_contiguous() and elementwise(x, weight, scale, per_expert)


def _check(device: torch.device) -> None:
    given = random_like(device, (18, 72), (20, 72), (72,), (20,))
    compare(route, reference.route.reference, (*given, 3, 1e-6), 1e-5)


TWINS = {"route": KernelTwin("route", route, _serves, _check)}
