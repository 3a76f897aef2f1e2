"""The mixture of experts with weights of 8-bit codes: the launches of `experts`, and two more.

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
    FP8_BYTES,
    FP8_CODES,
    INT8_CODES,
    gathered,
    no_sums,
    product_of_codes,
    round_rows,
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
from sfumato.weights.formats import Kind, ScaledTensor
from sfumato.weights.formats import round_rows as rounded


@triton.jit
def _gate_up(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
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
    `experts`; x_scales: of the tokens, where x is codes; scales: of the weight's rows."""
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
    columns = tl.arange(0, IN)
    source = x + token.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    gate = no_sums(OUT, TOKENS, WAY)
    up = no_sums(OUT, TOKENS, WAY)
    DTYPE: tl.constexpr = activated.dtype.element_ty
    for column in range(0, HIDDEN, IN):
        inside = mine[:, None] & (column + columns < HIDDEN)[None, :]
        tokens = gathered(source + column, inside, WAY).T
        block = weight.load([first, column])
        gate = product_of_codes(block, tokens, gate, IN, WAY, DTYPE, UPCAST)
        block = weight.load([first + INNER, column])
        up = product_of_codes(block, tokens, up, IN, WAY, DTYPE, UPCAST)
    numbers = row + tl.arange(0, OUT)
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


@triton.jit(do_not_specialize=["assignments"])
def _down(
    activated: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
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
    in `experts`; x_scales: of the rows of `activated`, where these are codes."""
    expert, start, end = group_of(starts, tl.program_id(1), EXPERTS, EXPERTS_PADDED, TOKENS)
    if expert >= EXPERTS:
        return
    weight = as_descriptor(weight, EXPERTS * HIDDEN, INNER, OUT, IN, DESCRIPTORS)
    activated = as_descriptor(activated, assignments, INNER, TOKENS, IN, DESCRIPTORS)
    row = tl.program_id(0) * OUT
    sums = no_sums(OUT, TOKENS, WAY)
    for column in range(0, INNER, IN):
        block = weight.load([expert * HIDDEN + row, column])
        tokens = activated.load([start, column]).T
        sums = product_of_codes(block, tokens, sums, IN, WAY, parts.dtype.element_ty, UPCAST)
    places = start + tl.arange(0, TOKENS)
    mine = places < end
    assignment = tl.load(order + places, mask=mine, other=0)
    share = tl.load(shares + assignment, mask=mine, other=0.0)
    rows = row + tl.arange(0, OUT)
    value = sums.to(tl.float32) * scales_of(scales, expert * HIDDEN, rows, HIDDEN)[:, None]
    if WAY != FP8_BYTES:
        value = value * tl.load(x_scales + places, mask=mine, other=0.0)[None, :]
    target = parts + assignment.to(tl.int64)[:, None] * HIDDEN + rows[None, :]
    value = (value * share[None, :]).T
    tl.store(target, value, mask=mine[:, None] & (rows < HIDDEN)[None, :])


def _kernels(suffix: str, x: str, weight: str, way: tl.constexpr, kind: Kind) -> tuple[Kernel, ...]:
    of_codes = {"x_scales": "*fp32:16", "weight": f"tensordesc<{weight}[{{OUT}}, {{IN}}]>"}
    of_codes["scales"] = "*fp32:16"
    sizes = {"EXPERTS": 128, "EXPERTS_PADDED": 128, "HIDDEN": 2816, "INNER": 704, "WAY": way.value}
    gate_up = {**GATE_UP.types, **of_codes, "x": f"*{x}:16"}
    down = {**DOWN.types, **of_codes, "activated": f"tensordesc<{x}[{{TOKENS}}, {{IN}}]>"}
    return (
        register(Kernel(f"experts_gate_up_{suffix}", _gate_up, gate_up, {**sizes, "CHOSEN": 8},
                        format=kind)),
        register(Kernel(f"experts_down_{suffix}", _down, down, sizes, format=kind)),
    )  # fmt: skip


_BETWEEN = 0.02
"""What the relative error may be more, where gate's and up's products become codes: rounded to
bfloat16 they are off by 2⁻⁹ at most, of a step between codes that is 2⁻³ of the number, so that one
in 64 goes to the other code, and ⅛ · √(1/64) is 0.016."""

KERNELS = {
    "FP8": _kernels("fp8", "fp8e4nv", "fp8e4nv", FP8_CODES, "FP8"),
    "INT8": _kernels("int8", "i8", "i8", INT8_CODES, "INT8"),
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
    given, x_scales = _rounded(x, gate_up, as_codes)
    activated = x.new_empty(assignments, inner)
    _launch(first, use, inner, gate_up, both, x=given, x_scales=x_scales,
            activated=activated, CHOSEN=chosen.shape[1])  # fmt: skip
    del given, x_scales
    given, x_scales = _rounded(activated, down, as_codes)
    del activated
    parts = x.new_empty(assignments, hidden)
    _launch(second, use, hidden, down, both, activated=given, x_scales=x_scales,
            shares=shares, parts=parts, assignments=assignments)  # fmt: skip
    combine(parts, out, chosen.shape[1])
    return out


def _rounded(x: Tensor, weight: ScaledTensor, as_codes: bool) -> tuple[Tensor, Tensor]:
    """x as codes, and their scales; as it is, and any scales, where codes are unpacked."""
    if not as_codes:
        return x, weight.scales
    held = round_rows(x, weight.kind)
    return held.codes, held.scales


def _launch(
    kernel: Kernel,
    use: str,
    outputs: int,
    weight: ScaledTensor,
    both: dict[str, Any],
    **given: Any,
) -> None:
    """One of the two products of codes; both: what both kernels take."""
    device = weight.device
    tile = tile_for(kernel.name, device, use)
    way = kernel.sizes["WAY"]
    codes = weight.codes.view(torch.uint8) if way == FP8_BYTES.value else weight.codes
    if kernel.function is _down:  # tokens of the other are gathered, by addresses
        given["activated"] = matrix(given["activated"], tile["TOKENS"], tile["IN"])
    tiles = most_tiles(len(both["order"]), both["EXPERTS"], tile["TOKENS"])
    stored = {"weight": matrix(codes, tile["OUT"], tile["IN"]), "scales": weight.scales}
    grid = triton.cdiv(outputs, tile["OUT"]), tiles
    launch(kernel, grid, tile, device, **both, **given, **stored, WAY=way)


def _serves(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: ScaledTensor, down: ScaledTensor
) -> bool:
    return takes_codes(gate_up, down) and chosen.dtype == torch.int64 and multiplied(x)


def _check(kind: Kind, device: torch.device) -> None:
    """An uneven choice, few tokens, and many; against what the codes say in float64."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    count, hidden, inner = 5, 144, 48
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
        expected = reference.experts.reference(x.double(), chosen, shares, *wide)
        out = experts(x, chosen, shares, gate_up, down)
        assert_close(out, expected, error_bound(dtype) + (_BETWEEN if as_codes else 0))


TWINS = {
    name: KernelTwin(name, experts, _serves, partial(_check, kind))
    for kind, name in ((kind, scaled_name("experts", kind)) for kind in KINDS)
}
