"""The mixture of experts: four launches, and nothing read on the host.

1. The assignments are sorted by expert (`routing`).
2. Gate and up products of each expert's tokens, and the activation of both.
3. Down products, each weighted by its token's share and stored at its assignment's number.
4. The sum of each token's k parts, in the order in which they were chosen.

An expert has 16 of 2,048 assignments on average, and a product of 16 rows wastes three quarters of
an instruction that multiplies 64.  So the weight's rows are the M side of the product, and the
tokens its N side, for which wgmma takes any multiple of 8.  A tile has 64 tokens whatever their
number: nearly every expert's tokens fit in one at 256 tokens, so that weights are read once, and
what the matrix units do for nothing hides behind that reading.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.operands import FEW, matrix, multiplied, stored, takes_planes, use_for
from sfumato.ops.triton.planes import LAYOUTS, PlaneTensor, plane_names
from sfumato.ops.triton.routing import group_of, most_tiles, sort
from sfumato.ops.triton.self_test import (
    KernelTwin,
    assert_close,
    error_bound,
    random_like,
    random_planes,
    sizes_for,
    whole_blocks,
)
from sfumato.ops.triton.tiles import tile_for
from sfumato.ops.triton.weights import as_descriptor, as_weight, product, weight_block

Stored = Tensor | PlaneTensor


@triton.jit
def gelu(x: tl.tensor) -> tl.tensor:
    """gelu by the tanh approximation: ½ · (1 + tanh(y)) is sigmoid(2 · y), which loses no digits
    where tanh(y) is near -1."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _gate_up(
    x: tl.tensor,
    weight: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    activated: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    FORMAT: tl.constexpr,
    OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    IN: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> None:
    """activated [assignments by expert, INNER] = gelu(gate) · up of x [tokens, HIDDEN].

    weight [EXPERTS · 2 · INNER, HIDDEN], an expert's gate rows before its up rows. A program makes
    OUT columns of at most TOKENS assignments of one expert; grid (⌈INNER / OUT⌉, worst number of
    tiles). Programs of one expert follow each other, so that its tokens come from the L2 cache.
    """
    expert, start, end = group_of(starts, tl.program_id(1), EXPERTS, EXPERTS_PADDED, TOKENS)
    if expert >= EXPERTS:
        return
    rows = EXPERTS * 2 * INNER
    weight = as_weight(weight, rows, HIDDEN, OUT, IN, FORMAT, DESCRIPTORS)
    row = tl.program_id(0) * OUT
    first = expert * (2 * INNER) + row
    places = start + tl.arange(0, TOKENS)
    mine = places < end
    token = tl.load(order + places, mask=mine, other=0) // CHOSEN
    columns = tl.arange(0, IN)
    # Tokens come by gather: the copy engine of sm_90 reads no list of rows.
    source = x + token.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    gate = tl.zeros((OUT, TOKENS), tl.float32)
    up = tl.zeros((OUT, TOKENS), tl.float32)
    for column in range(0, HIDDEN, IN):
        inside = mine[:, None] & (column + columns < HIDDEN)[None, :]
        tokens = tl.load(source + column, mask=inside, other=0.0).T
        block = weight_block(
            weight, first, column, rows, HIDDEN, OUT, IN, FORMAT, x.dtype.element_ty
        )
        gate = product(block, tokens, gate, UPCAST)
        block = weight_block(
            weight, first + INNER, column, rows, HIDDEN, OUT, IN, FORMAT, x.dtype.element_ty
        )
        up = product(block, tokens, up, UPCAST)
    value = gelu(gate) * up
    places_out = row + tl.arange(0, OUT)
    target = activated + places.to(tl.int64)[:, None] * INNER + places_out[None, :]
    tl.store(target, value.T, mask=mine[:, None] & (places_out < INNER)[None, :])


@triton.jit(do_not_specialize=["assignments"])
def _down(
    activated: tl.tensor,
    weight: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    shares: tl.tensor,
    parts: tl.tensor,
    assignments: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    FORMAT: tl.constexpr,
    OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    IN: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> None:
    """parts [assignments, HIDDEN] = the down product of `activated`, by the assignments' shares.

    weight [EXPERTS · HIDDEN, INNER]; shares float32 [assignments]. Rows of `activated` follow the
    order, so they come by descriptor; what a tile reads beyond its expert's is not stored.
    """
    expert, start, end = group_of(starts, tl.program_id(1), EXPERTS, EXPERTS_PADDED, TOKENS)
    if expert >= EXPERTS:
        return
    weight = as_weight(weight, EXPERTS * HIDDEN, INNER, OUT, IN, FORMAT, DESCRIPTORS)
    activated = as_descriptor(activated, assignments, INNER, TOKENS, IN, DESCRIPTORS)
    row = tl.program_id(0) * OUT
    accumulator = tl.zeros((OUT, TOKENS), tl.float32)
    for column in range(0, INNER, IN):
        block = weight_block(
            weight, expert * HIDDEN + row, column, EXPERTS * HIDDEN, INNER, OUT, IN, FORMAT,
            parts.dtype.element_ty,
        )  # fmt: skip
        tokens = activated.load([start, column]).T
        accumulator = product(block, tokens, accumulator, UPCAST)
    places = start + tl.arange(0, TOKENS)
    mine = places < end
    assignment = tl.load(order + places, mask=mine, other=0)
    share = tl.load(shares + assignment, mask=mine, other=0.0)
    rows = row + tl.arange(0, OUT)
    target = parts + assignment.to(tl.int64)[:, None] * HIDDEN + rows[None, :]
    value = (accumulator * share[None, :]).T
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


_SIZES = {"EXPERTS": 128, "EXPERTS_PADDED": 128, "HIDDEN": 2816, "INNER": 704, "FORMAT": 0}

GATE_UP = register(
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
        {**_SIZES, "CHOSEN": 8},
    )
)
DOWN = register(
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
    )
)
GATE_UP_PLANES = register(
    Kernel(
        "experts_gate_up_planes",
        _gate_up,
        {**GATE_UP.types, "weight": "*u8:16"},
        {**GATE_UP.sizes, "FORMAT": LAYOUTS["Q4_K"].number},
        columns="HIDDEN",
    )
)
DOWN_PLANES = register(
    Kernel(
        "experts_down_planes",
        _down,
        {**DOWN.types, "weight": "*u8:16"},
        # 704 columns divide into no blocks of 256: a file of Q4_K has these as Q5_0 or Q8_0.
        {**DOWN.sizes, "FORMAT": LAYOUTS["Q5_0"].number},
        columns="INNER",
    )
)
COMBINE = register(
    Kernel(
        "experts_combine",
        _combine,
        {"parts": "*bf16:16", "out": "*bf16:16"},
        {"CHOSEN": 8, "HIDDEN": 2816},
    )
)


def experts(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Stored, down: Stored) -> Tensor:
    """A gated-GELU mixture of experts; see `ops.experts`.

    x [tokens, hidden] bfloat16; gate_up [experts, 2·m, hidden] and down [experts, hidden, m]
    bfloat16 or planes; chosen int64 and shares float32 [tokens, k], of experts that exist →
    bfloat16 [tokens, hidden].
    Products and sums are float32; the activated products and the k parts of a token are rounded
    to bfloat16, where the reference rounds gate, up, shares and their products too.
    """
    out = torch.empty_like(x)
    if chosen.numel() == 0:
        return out.zero_()
    x, chosen, shares = x.contiguous(), chosen.contiguous(), shares.float().contiguous()
    order, starts = sort(chosen, gate_up.shape[0])
    activated = _activated(x, chosen, order, starts, gate_up)
    parts = _weighted(activated, order, starts, shares, down)
    combine(parts, out, chosen.shape[1])
    return out


def combine(parts: Tensor, out: Tensor, chosen: int) -> None:
    """out [tokens, hidden]: the sums of the `chosen` parts of each token, [tokens · chosen,
    hidden]."""
    tokens, hidden = out.shape
    tile = tile_for("experts_combine", out.device)
    launch(
        COMBINE,
        (tokens, triton.cdiv(hidden, tile["BLOCK"])),
        tile,
        out.device,
        parts=parts,
        out=out,
        CHOSEN=chosen,
        HIDDEN=hidden,
    )


def _activated(x: Tensor, chosen: Tensor, order: Tensor, starts: Tensor, gate_up: Stored) -> Tensor:
    """gelu(gate) · up of the assignments by expert: [assignments, inner]."""
    count, inner, hidden = gate_up.shape[0], gate_up.shape[1] // 2, x.shape[1]
    kernel = GATE_UP_PLANES if isinstance(gate_up, PlaneTensor) else GATE_UP
    tile = tile_for(kernel.name, x.device, use_for(len(x)))
    activated = x.new_empty(len(order), inner)
    launch(
        kernel,
        (triton.cdiv(inner, tile["OUT"]), most_tiles(len(order), count, tile["TOKENS"])),
        tile,
        x.device,
        x=x,
        **stored(gate_up, tile["OUT"], tile["IN"]),
        order=order,
        starts=starts,
        activated=activated,
        EXPERTS=count,
        EXPERTS_PADDED=triton.next_power_of_2(count),
        CHOSEN=chosen.shape[1],
        HIDDEN=hidden,
        INNER=inner,
    )
    return activated


def _weighted(
    activated: Tensor, order: Tensor, starts: Tensor, shares: Tensor, down: Stored
) -> Tensor:
    """The down products of the assignments, by their shares: [assignments, hidden]."""
    count, hidden, inner = down.shape
    tokens = len(shares)
    kernel = DOWN_PLANES if isinstance(down, PlaneTensor) else DOWN
    tile = tile_for(kernel.name, down.device, use_for(tokens))
    parts = activated.new_empty(len(order), hidden)
    launch(
        kernel,
        (triton.cdiv(hidden, tile["OUT"]), most_tiles(len(order), count, tile["TOKENS"])),
        tile,
        down.device,
        activated=matrix(activated, tile["TOKENS"], tile["IN"]),
        **stored(down, tile["OUT"], tile["IN"]),
        order=order,
        starts=starts,
        shares=shares,
        parts=parts,
        assignments=len(order),
        EXPERTS=count,
        EXPERTS_PADDED=triton.next_power_of_2(count),
        HIDDEN=hidden,
        INNER=inner,
    )
    return parts


def _serves(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    stored = gate_up.is_contiguous() and down.is_contiguous()
    return stored and chosen.dtype == torch.int64 and multiplied(x, gate_up, down)


def _check(device: torch.device) -> None:
    """Few tokens, and many."""
    for tokens in sizes_for(device, [90], [FEW + 90]):
        _check_tokens(tokens, device)


def _check_tokens(tokens: int, device: torch.device) -> None:
    """An uneven choice: one expert has most tokens, one none, and sizes divide by no tile."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    count, hidden, inner = 5, 88, 24
    x, gate_up, down, scores = random_like(
        *(device, dtype, (tokens, hidden), (count, 2 * inner, hidden), (count, hidden, inner)),
        (tokens, count),
    )
    scores = scores.float()
    scores[:, 1] += 8
    scores[:, 3] -= 30
    shares, chosen = scores.softmax(-1).topk(2)
    wide = (each.double() for each in (gate_up * hidden**-0.5, down))
    expected = reference.experts.reference(x.double(), chosen, shares, *wide)
    out = experts(x, chosen, shares, gate_up * hidden**-0.5, down)
    assert_close(out, expected, error_bound(dtype))


def _serves_planes(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: PlaneTensor, down: PlaneTensor
) -> bool:
    planes = takes_planes(gate_up) and takes_planes(down)
    return planes and chosen.dtype == torch.int64 and multiplied(x)


def _check_planes(format: str, device: torch.device) -> None:
    """As `_check_tokens`, with the floats that the planes hold. An interpreter has few columns of
    the down weight, which divide into no blocks of 256."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    count, hidden, inner = 2, whole_blocks(format, 96), whole_blocks(format, 32)
    format_of_down = format
    if device.type == "cpu" and inner > 32:
        format_of_down, inner = "Q8_0", 32
    for tokens in sizes_for(device, [2], [90, FEW + 90]):
        x, scores = random_like(device, dtype, (tokens, hidden), (tokens, count))
        gate_up = random_planes(device, format, count, 2 * inner, hidden)
        down = random_planes(device, format_of_down, count, hidden, inner)
        shares, chosen = scores.float().softmax(-1).topk(1)
        wide = (each.dequantize(dtype).double() for each in (gate_up, down))
        expected = reference.experts.reference(x.double(), chosen, shares, *wide)
        out = experts(x, chosen, shares, gate_up, down)
        assert_close(out, expected, error_bound(dtype))


TWINS = {
    "experts": KernelTwin("experts", experts, _serves, _check),
    **{
        name: KernelTwin(name, experts, _serves_planes, partial(_check_planes, format))
        for format, name in plane_names("experts").items()
    },
}
