"""The mixture of experts with weights of codes: the launches of `experts`, and two more.

The tokens become codes once, before the experts gather them; what gate and up make of them becomes
codes before the down product, a row at a time.  Where e4m3 is unpacked by integers (see `codes`)
both stay as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.triton.codes import (
    FP4_CODES,
    FP8_BYTES,
    FP8_CODES,
    INT8_CODES,
    gathered,
    group_scales,
    no_sums,
    of_groups,
    operands,
    product_of_codes,
    product_of_fp4,
    scales_of,
)
from sfumato.ops.triton.experts import DOWN, GATE_UP, combine, gelu
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.operands import FEW, matrix, multiplied, use_for
from sfumato.ops.triton.routing import group_of, most_tiles, sort
from sfumato.ops.triton.scaled import KINDS, multiplies_codes, scaled_name, takes_codes
from sfumato.ops.triton.self_test import (
    KernelTwin,
    assert_close,
    error_bound,
    random_like,
    sizes_for,
)
from sfumato.ops.triton.tiles import tile_for
from sfumato.ops.triton.weights import as_descriptor
from sfumato.weights.scaled import Kind, ScaledTensor, code_bytes
from sfumato.weights.scaled import round_rows as rounded


@triton.jit
def _gate_up(
    x: tl.tensor,
    x_groups: tl.tensor | None,
    x_scales: tl.tensor,
    weight: tl.tensor,
    groups: tl.tensor | None,
    scales: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    activated: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    WAY: tl.constexpr,
    OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    IN: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> None:
    """activated [assignments by expert, INNER] = gelu(gate) · up of x [tokens, HIDDEN], as in
    `experts`; x_scales: of the tokens, where x is codes; scales: of the weight's rows; x_groups and
    groups: of FP4, the scales of groups. HIDDEN and IN are bytes of codes; see `codes`."""
    expert, start, end = group_of(starts, tl.program_id(1), EXPERTS, EXPERTS_PADDED, TOKENS)
    if expert >= EXPERTS:
        return
    rows = EXPERTS * 2 * INNER
    weight = as_descriptor(weight, rows, HIDDEN, OUT, IN, DESCRIPTORS)
    row = tl.program_id(0) * OUT
    first = expert * (2 * INNER) + row
    places = start + tl.arange(0, TOKENS)
    mine = places < end
    token = tl.load(order + places, mask=mine, other=0) // CHOSEN
    numbers = row + tl.arange(0, OUT)
    source = x + token.to(tl.int64)[:, None] * HIDDEN + tl.arange(0, IN)[None, :]
    known = numbers < INNER
    if WAY == FP4_CODES:
        # One after the other: on sm_100 two products cannot share the scales of their tokens.
        gate = _fp4_sums(weight, groups, first, known, source, x_groups, token, mine, HIDDEN, OUT,
                         TOKENS, IN, UPCAST)  # fmt: skip
        up = _fp4_sums(weight, groups, first + INNER, known, source, x_groups, token, mine, HIDDEN,
                       OUT, TOKENS, IN, UPCAST)  # fmt: skip
    else:
        gate, up = _both_sums(weight, first, source, mine, HIDDEN, INNER, WAY, OUT, TOKENS, IN,
                              activated.dtype.element_ty, UPCAST)  # fmt: skip
    of_gate = scales_of(scales, expert * (2 * INNER), numbers, INNER)
    of_up = scales_of(scales, expert * (2 * INNER) + INNER, numbers, INNER)
    gates = gate.to(tl.float32) * of_gate[:, None]
    ups = up.to(tl.float32) * of_up[:, None]
    if WAY != FP8_BYTES:
        of_tokens = tl.load(x_scales + token, mask=mine, other=0.0)
        gates, ups = gates * of_tokens[None, :], ups * of_tokens[None, :]
    value = gelu(gates) * ups
    target = activated + places.to(tl.int64)[:, None] * INNER + numbers[None, :]
    tl.store(target, value.T, mask=mine[:, None] & (numbers < INNER)[None, :])


@triton.jit
def _both_sums(
    weight: tl.tensor, first: tl.tensor, source: tl.tensor, mine: tl.tensor, HIDDEN: tl.constexpr,
    INNER: tl.constexpr, WAY: tl.constexpr, OUT: tl.constexpr, TOKENS: tl.constexpr,
    IN: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Products [OUT, TOKENS] of the gate rows from `first` on, and of the up rows, with tokens.

    source: the addresses of the tokens' first inputs [TOKENS, IN]; mine: which tokens there are."""
    columns = tl.arange(0, IN)
    gate = no_sums(OUT, TOKENS, WAY)
    up = no_sums(OUT, TOKENS, WAY)
    for column in range(0, HIDDEN, IN):
        inside = mine[:, None] & (column + columns < HIDDEN)[None, :]
        tokens = gathered(source + column, inside, WAY).T
        block = weight.load([first, column])
        gate = product_of_codes(block, tokens, gate, IN, WAY, DTYPE, UPCAST)
        block = weight.load([first + INNER, column])
        up = product_of_codes(block, tokens, up, IN, WAY, DTYPE, UPCAST)
    return gate, up


@triton.jit
def _fp4_sums(
    weight: tl.tensor, groups: tl.tensor, first: tl.tensor, known: tl.tensor, source: tl.tensor,
    x_groups: tl.tensor, token: tl.tensor, mine: tl.tensor, HIDDEN: tl.constexpr,
    OUT: tl.constexpr, TOKENS: tl.constexpr, IN: tl.constexpr, UPCAST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """As `_both_sums`, of FP4, and of the rows from `first` on alone; known: which rows there
    are."""
    columns = tl.arange(0, IN)
    rows = (first + tl.arange(0, OUT)).to(tl.int64)
    sums = tl.zeros((OUT, TOKENS), tl.float32)
    for column in range(0, HIDDEN, IN):
        inside = mine[:, None] & (column + columns < HIDDEN)[None, :]
        tokens = tl.load(source + column, mask=inside, other=0)
        block = weight.load([first, column])
        ours = group_scales(groups, rows, known, column, HIDDEN, IN)
        theirs = group_scales(x_groups, token.to(tl.int64), mine, column, HIDDEN, IN)
        sums = product_of_fp4(block, ours, tokens, theirs, sums, OUT, TOKENS, IN, UPCAST)
    return sums


@triton.jit(do_not_specialize=["assignments"])
def _down(
    activated: tl.tensor,
    x_groups: tl.tensor | None,
    x_scales: tl.tensor,
    weight: tl.tensor,
    groups: tl.tensor | None,
    scales: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    shares: tl.tensor,
    parts: tl.tensor,
    assignments: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    WAY: tl.constexpr,
    OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    IN: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> None:
    """parts [assignments, HIDDEN] = the down product of `activated`, by the assignments' shares, as
    in `experts`; x_scales: of the rows of `activated`, where these are codes; x_groups and groups:
    of FP4, the scales of groups. INNER and IN are bytes of codes; see `codes`."""
    expert, start, end = group_of(starts, tl.program_id(1), EXPERTS, EXPERTS_PADDED, TOKENS)
    if expert >= EXPERTS:
        return
    weight = as_descriptor(weight, EXPERTS * HIDDEN, INNER, OUT, IN, DESCRIPTORS)
    activated = as_descriptor(activated, assignments, INNER, TOKENS, IN, DESCRIPTORS)
    row = tl.program_id(0) * OUT
    sums = no_sums(OUT, TOKENS, WAY)
    rows = row + tl.arange(0, OUT)
    places = start + tl.arange(0, TOKENS)
    mine = places < end
    for column in range(0, INNER, IN):
        block = weight.load([expert * HIDDEN + row, column])
        tokens = activated.load([start, column])
        if WAY == FP4_CODES:
            of_rows = (expert * HIDDEN + rows).to(tl.int64)
            ours = group_scales(groups, of_rows, rows < HIDDEN, column, INNER, IN)
            theirs = group_scales(x_groups, places.to(tl.int64), mine, column, INNER, IN)
            sums = product_of_fp4(block, ours, tokens, theirs, sums, OUT, TOKENS, IN, UPCAST)
        else:
            DTYPE: tl.constexpr = parts.dtype.element_ty
            sums = product_of_codes(block, tokens.T, sums, IN, WAY, DTYPE, UPCAST)
    assignment = tl.load(order + places, mask=mine, other=0)
    share = tl.load(shares + assignment, mask=mine, other=0.0)
    value = sums.to(tl.float32) * scales_of(scales, expert * HIDDEN, rows, HIDDEN)[:, None]
    if WAY != FP8_BYTES:
        value = value * tl.load(x_scales + places, mask=mine, other=0.0)[None, :]
    target = parts + assignment.to(tl.int64)[:, None] * HIDDEN + rows[None, :]
    value = (value * share[None, :]).T
    tl.store(target, value, mask=mine[:, None] & (rows < HIDDEN)[None, :])


def _kernels(suffix: str, x: str, weight: str, way: tl.constexpr, kind: Kind) -> tuple[Kernel, ...]:
    of_codes = {"x_scales": "*fp32:16", "weight": f"tensordesc<{weight}[{{OUT}}, {{IN}}]>"}
    given, without = of_groups(way)
    of_codes |= {"scales": "*fp32:16", **given}
    sizes = {"EXPERTS": 128, "EXPERTS_PADDED": 128, "HIDDEN": 2816, "INNER": 704, "WAY": way.value}
    gate_up = {**GATE_UP.types, **of_codes, "x": f"*{x}:16"}
    down = {**DOWN.types, **of_codes, "activated": f"tensordesc<{x}[{{TOKENS}}, {{IN}}]>"}
    first = {**sizes, "HIDDEN": code_bytes(kind, 2816), "CHOSEN": 8}
    second = {**sizes, "INNER": code_bytes(kind, 704)}
    return (
        register(Kernel(f"experts_gate_up_{suffix}", _gate_up, gate_up, first, format=kind,
                        without=without)),
        register(Kernel(f"experts_down_{suffix}", _down, down, second, format=kind,
                        without=without)),
    )  # fmt: skip


_BETWEEN = 0.02
"""What the relative error may be more, where gate's and up's products become codes: rounded to
bfloat16 they are off by 2⁻⁹ at most, of a step between codes that is 2⁻³ of the number, so that one
in 64 goes to the other code, and ⅛ · √(1/64) is 0.016."""

KERNELS = {
    "FP8": _kernels("fp8", "fp8e4nv", "fp8e4nv", FP8_CODES, "FP8"),
    "INT8": _kernels("int8", "i8", "i8", INT8_CODES, "INT8"),
    "FP4": _kernels("fp4", "u8", "u8", FP4_CODES, "FP4"),
    "bytes": _kernels("bytes", "bf16", "u8", FP8_BYTES, "FP8"),
}


def experts(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: ScaledTensor, down: ScaledTensor
) -> Tensor:
    """A gated-GELU mixture of experts; see `experts.experts`. Rounds the tokens and the activated
    products to codes, a row at a time, where the device multiplies such."""
    as_codes = multiplies_codes(gate_up.kind, x.device)
    return multiply(x, chosen, shares, gate_up, down, as_codes)


def multiply(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: ScaledTensor,
    down: ScaledTensor,
    as_codes: bool,
) -> Tensor:
    """As `experts`; as_codes: whether codes are multiplied, or FP8 is unpacked."""
    out = torch.empty_like(x)
    if chosen.numel() == 0:
        return out.zero_()
    count, hidden, inner = down.shape
    x, chosen, shares = x.contiguous(), chosen.contiguous(), shares.float().contiguous()
    order, starts = sort(chosen, count)
    assignments, use = len(order), use_for(len(x))
    first, second = KERNELS[gate_up.kind if as_codes else "bytes"]
    both = {"order": order, "starts": starts, "EXPERTS": count, "HIDDEN": hidden, "INNER": inner}
    both["EXPERTS_PADDED"] = triton.next_power_of_2(count)
    # No more lives at a time than in `experts`: codes end before the parts begin, and the activated
    # products once they are codes.
    given = operands(x, gate_up, as_codes)
    activated = x.new_empty(assignments, inner)
    both["HIDDEN"] = given["weight"].shape[-1]
    _launch(first, use, inner, both, given, activated=activated, CHOSEN=chosen.shape[1])
    del given
    given = operands(activated, down, as_codes)
    del activated
    parts = x.new_empty(assignments, hidden)
    both |= {"HIDDEN": hidden, "INNER": given["weight"].shape[-1]}
    given["activated"] = given.pop("x")
    _launch(second, use, hidden, both, given, shares=shares, parts=parts, assignments=assignments)
    combine(parts, out, chosen.shape[1])
    return out


def _launch(
    kernel: Kernel,
    use: str,
    outputs: int,
    both: dict[str, Any],
    given: dict[str, Any],
    **others: Any,
) -> None:
    """One of the two products of codes. both: what both kernels take; given: what is multiplied."""
    device = given["weight"].device
    tile = tile_for(kernel.name, device, use)
    tokens, inputs = tile["TOKENS"], tile["IN"]
    stored = {"weight": matrix(given["weight"], tile["OUT"], inputs)}
    if "activated" in given:  # tokens of the other are gathered, by addresses
        stored["activated"] = matrix(given["activated"], tokens, inputs)
    grid = (
        triton.cdiv(outputs, tile["OUT"]),
        most_tiles(len(both["order"]), both["EXPERTS"], tokens),
    )
    held = {**both, **given, **stored, **others}
    launch(kernel, grid, tile, device, **held, WAY=kernel.sizes["WAY"])


def _serves(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: ScaledTensor, down: ScaledTensor
) -> bool:
    return takes_codes(gate_up, down) and chosen.dtype == torch.int64 and multiplied(x)


def _check(kind: Kind, device: torch.device) -> None:
    """An uneven choice, few tokens, and many; against what the codes say in float64."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    count, hidden, inner = 5, 160, 64
    for tokens in sizes_for(device, [40], [FEW + 90]):
        x, *floats, scores = random_like(
            *(device, dtype, (tokens, hidden), (count, 2 * inner, hidden), (count, hidden, inner)),
            (tokens, count),
        )
        scores = scores.float()
        scores[:, 1] += 8
        scores[:, 3] -= 30
        shares, chosen = scores.softmax(-1).topk(2)
        gate_up, down = rounded(floats[0] * hidden**-0.5, kind), rounded(floats[1], kind)
        as_codes = multiplies_codes(kind, device)
        wide = (each if as_codes else each.dequantize(torch.float64) for each in (gate_up, down))
        expected = reference.experts(x.double(), chosen, shares, *wide)
        out = experts(x, chosen, shares, gate_up, down)
        assert_close(out, expected, error_bound(dtype) + (_BETWEEN if as_codes else 0))


TWINS = {
    name: KernelTwin(name, experts, _serves, partial(_check, kind))
    for kind, name in ((kind, scaled_name("experts", kind)) for kind in KINDS)
}
