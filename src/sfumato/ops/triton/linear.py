"""Products of tokens with weights: one kernel for the dense matrices and for both products of the
experts, and the dense operations: a matrix, several of one input, a gate and what it gates.

The weight's rows are the M side of a matrix instruction and the tokens its N side: few tokens waste
no rows of an instruction, of which wgmma has 64.  What else differs is constant when the kernel is
compiled: whether a program has the rows of a gate and of what it gates, and activates both; whether
its tokens are all, or those of an expert; and how many matrices of one format are multiplied by one
input, of which a program finds its own by the number of its tile.  Weights stay where they are, and
every sum is that of a product alone.

Of weights of codes the rows of x become codes first, once for all weights, in a launch of their
own, where the device multiplies such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.reference import Gating
from sfumato.ops.torch_device import ALIGNED, keeps_bits, padded_product
from sfumato.ops.triton.kernel import Kernel, launch
from sfumato.ops.triton.operands import matrix, multiplies
from sfumato.ops.triton.planes import PlaneTensor
from sfumato.ops.triton.self_test import Trial, compare, twins_of, whole_blocks
from sfumato.ops.triton.tiles import library, most_tiles, tile_for, use_for
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


@triton.jit
def _tiles(
    starts: tl.tensor, EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Where each expert's tokens begin and end, where its tiles of TOKENS end, and how many it has;
    int32 [PADDED], EXPERTS up to a power of two."""
    numbers = tl.arange(0, PADDED)
    inside = numbers < EXPERTS
    first = tl.load(starts + numbers, mask=inside, other=0)
    end = tl.load(starts + numbers + 1, mask=inside, other=0)
    tiles = (end - first + TOKENS - 1) // TOKENS
    return first, end, tl.cumsum(tiles, 0), tiles


@triton.jit
def _place(
    tile: tl.tensor, first: tl.tensor, end: tl.tensor, ends: tl.tensor, tiles: tl.tensor,
    TOKENS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where the tokens of a tile begin, TOKENS at most, and those of its expert end; and the
    expert. first, end, ends and tiles: of `_tiles`."""
    expert = tl.sum((ends <= tile).to(tl.int32))
    mine = tl.arange(0, ends.shape[0]) == expert
    earlier = tl.sum(tl.where(mine, ends - tiles, 0))
    start = tl.sum(tl.where(mine, first, 0)) + (tile - earlier) * TOKENS
    return start, tl.sum(tl.where(mine, end, 0)), expert


@triton.jit
def _activated(gate: tl.tensor, up: tl.tensor, SILU: tl.constexpr) -> tl.tensor:
    """f(gate) · up, where f is silu, or gelu by the tanh approximation: ½ · (1 + tanh(y)) is
    sigmoid(2 · y), which loses no digits where tanh(y) is near -1."""
    inner = gate if SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(inner) * up


@triton.jit
def _tile(
    tile: tl.tensor, start: tl.tensor, end: tl.tensor, expert: tl.tensor,
    x: tl.tensor, x_scales: tl.tensor, weight: tl.tensor, scales: tl.tensor, out: tl.tensor,
    second: tl.tensor, second_scales: tl.tensor, second_out: tl.tensor,
    third: tl.tensor, third_scales: tl.tensor, third_out: tl.tensor,
    order: tl.tensor, shares: tl.tensor, tokens: tl.tensor,
    OUTPUTS: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, INPUTS: tl.constexpr,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    FORMAT: tl.constexpr, OUT: tl.constexpr, TOKENS: tl.constexpr, IN: tl.constexpr,
    UPCAST: tl.constexpr, DESCRIPTORS: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of `_multiply`: of the weight's rows its number, and of tokens those from `start` on,
    TOKENS at most, which end before `end`."""
    GATHERS: tl.constexpr = order is not None and shares is None
    EACH: tl.constexpr = 2 * OUTPUTS if GATED and second is None else OUTPUTS
    row, outputs, many, first = tile * OUT, OUTPUTS, EXPERTS * EACH, expert * EACH
    if second_out is not None:
        # Of a loop for each matrix, every one would have shared memory of its own.
        FIRST: tl.constexpr = (OUTPUTS + OUT - 1) // OUT * OUT
        BOTH: tl.constexpr = FIRST + (SECOND + OUT - 1) // OUT * OUT
        at = row
        if at >= FIRST:
            weight, out, row, outputs, many = second, second_out, at - FIRST, SECOND, SECOND
            if scales is not None:
                scales = second_scales
        if third_out is not None and at >= BOTH:
            weight, out, row, outputs, many = third, third_out, at - BOTH, THIRD, THIRD
            if scales is not None:
                scales = third_scales
    weight = as_weight(weight, many, INPUTS, OUT, IN, FORMAT, DESCRIPTORS)
    if GATED:
        up, up_scales, up_first, up_many = weight, scales, first + OUTPUTS, many
        if second is not None:
            up = as_weight(second, OUTPUTS, INPUTS, OUT, IN, FORMAT, DESCRIPTORS)
            up_scales, up_first, up_many = second_scales, 0, OUTPUTS
    places = start + tl.arange(0, TOKENS)
    mine = places < end
    columns = tl.arange(0, IN)
    source = places
    if GATHERS:
        # Tokens come by gather: the copy engine of sm_90 reads no list of rows.
        source = tl.load(order + places, mask=mine, other=0) // CHOSEN
        address = x + source.to(tl.int64)[:, None] * INPUTS + columns[None, :]
    else:
        x = as_descriptor(x, tokens, INPUTS, TOKENS, IN, DESCRIPTORS)
    DTYPE: tl.constexpr = out.dtype.element_ty
    sums = no_sums(OUT, TOKENS, FORMAT)
    ups = no_sums(OUT, TOKENS, FORMAT)
    for column in range(0, INPUTS, IN):
        if GATHERS:
            inside = mine[:, None] & (column + columns < INPUTS)[None, :]
            given = gathered(address + column, inside, FORMAT).T
        else:
            given = x.load([start, column]).T
        block = weight_block(weight, first + row, column, many, INPUTS, OUT, IN, FORMAT, DTYPE)
        sums = weight_product(block, given, sums, IN, FORMAT, UPCAST)
        if GATED:
            at = up_first + row
            block = weight_block(up, at, column, up_many, INPUTS, OUT, IN, FORMAT, DTYPE)
            ups = weight_product(block, given, ups, IN, FORMAT, UPCAST)
    rows = row + tl.arange(0, OUT)
    value = scaled(sums, scales, first, rows, outputs, x_scales, source, mine)
    if GATED:
        ups = scaled(ups, up_scales, up_first, rows, outputs, x_scales, source, mine)
        value = _activated(value, ups, SILU)
    target = places
    if shares is not None:
        target = tl.load(order + places, mask=mine, other=0)
        value = value * tl.load(shares + target, mask=mine, other=0.0)[None, :]
    place = out + target.to(tl.int64)[:, None] * outputs + rows[None, :]
    tl.store(place, value.T, mask=mine[:, None] & (rows < outputs)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _multiply(
    x: tl.tensor, x_scales: tl.tensor, weight: tl.tensor, scales: tl.tensor, out: tl.tensor,
    second: tl.tensor, second_scales: tl.tensor, second_out: tl.tensor,
    third: tl.tensor, third_scales: tl.tensor, third_out: tl.tensor,
    order: tl.tensor, starts: tl.tensor, shares: tl.tensor, tokens: tl.tensor,
    OUTPUTS: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, INPUTS: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, CHOSEN: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, FORMAT: tl.constexpr, OUT: tl.constexpr,
    TOKENS: tl.constexpr, IN: tl.constexpr, PROGRAMS: tl.constexpr, UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> None:  # fmt: skip
    """out [tokens, OUTPUTS] = x [tokens, INPUTS] @ weight.T, second_out [tokens, SECOND] that of
    `second`, and third_out that of `third`; or, where GATED, out = f(x @ weight.T) · (x @
    second.T). What is None takes no part. A program makes [TOKENS, OUT].

    scales: of the weight's rows, where it is codes; x_scales: of the tokens, where x is.

    Of experts, `order` has the assignments by expert, and `starts` where each expert's begin;
    weight [EXPERTS · OUTPUTS, INPUTS], or, where GATED, of an expert the gate's rows before those
    that it gates.  Tokens of CHOSEN assignments are gathered; or, with shares float32
    [assignments], x has the rows of the assignments in their order, and each result, times its
    share, is stored at its assignment's number.

    Programs of dense matrices that run side by side share the block of the weight, of which they
    read each byte from memory once; those of experts share the tokens.  Where there are PROGRAMS,
    these take tiles in turn, and a tile's bits are its own; else (0) each has one, and those beyond
    the last end at once.  Each program finds its expert by itself, which takes it under a
    microsecond of the twenty in which it reads its block of the weight, and saves a launch that
    writes a table of tiles.
    """
    ROWS: tl.constexpr = (OUTPUTS + OUT - 1) // OUT
    tile, start, end, expert = tl.program_id(1), tl.program_id(0) * TOKENS, tokens, 0
    begin, stop = 0, 1
    if starts is not None:
        firsts, lasts, ends, tiles = _tiles(starts, EXPERTS, EXPERTS_PADDED, TOKENS)
        if PROGRAMS:
            begin, stop = tl.program_id(0), tl.sum(tiles) * ROWS
        elif tl.program_id(1) >= tl.sum(tiles):
            return
        else:
            tile = tl.program_id(0)
            start, end, expert = _place(tl.program_id(1), firsts, lasts, ends, tiles, TOKENS)
    for number in range(begin, stop, PROGRAMS or 1):
        if PROGRAMS:
            tile = number % ROWS
            start, end, expert = _place(number // ROWS, firsts, lasts, ends, tiles, TOKENS)
        _tile(
            tile, start, end, expert, x, x_scales, weight, scales, out, second, second_scales,
            second_out, third, third_scales, third_out, order, shares, tokens, OUTPUTS, SECOND,
            THIRD, INPUTS, EXPERTS, CHOSEN, GATED, SILU, FORMAT, OUT, TOKENS, IN, UPCAST,
            DESCRIPTORS,
        )  # fmt: skip


_BLOCK = "tensordesc<bf16[{OUT}, {IN}]>"
_TYPES = {
    "x": "tensordesc<bf16[{TOKENS}, {IN}]>",
    "weight": _BLOCK,
    "out": "*bf16:16",
    "second": _BLOCK,
    "second_out": "*bf16:16",
    "third": _BLOCK,
    "third_out": "*bf16:16",
    "order": "*i32:16",
    "starts": "*i32:16",
    "shares": "*fp32:16",
    "tokens": "i32",
}
_MATRICES = tuple(
    {"weight": weight, "scales": f"{before}scales", "out": f"{before}out", "OUTPUTS": outputs}
    for weight, before, outputs in (
        ("weight", "", "OUTPUTS"), ("second", "second_", "SECOND"), ("third", "third_", "THIRD")
    )
)  # fmt: skip
"""The names of the parameters of each matrix."""
_FIXED: dict[str, Any] = {
    "SECOND": 0, "THIRD": 0, "EXPERTS": 1, "EXPERTS_PADDED": 1, "CHOSEN": 1,
    "GATED": False, "SILU": False, "FORMAT": 0, "PROGRAMS": 0,
}  # fmt: skip
"""Constants of a product of one weight."""
_NONE = {
    *(each["scales"] for each in _MATRICES), *_TYPES.keys() - {"x", "weight", "out", "tokens"},
    "x_scales",
}  # fmt: skip
"""Parameters that may be None."""


def product(
    name: str, takes: Iterable[str], sizes: Mapping[str, int | bool], planes: str, **more: Any
) -> Mapping[str, Kernel]:
    """The kernels of a product by the form of its weights, registered; see `of_forms`.

    takes: parameters that are not None, beside x, weight, out and tokens; sizes: constants of the
    26B-A4B; more: of `Kernel`, but `types` are those that differ.
    """
    taken = {"x", "weight", "out", "tokens", *takes}
    types = {key: kind for key, kind in _TYPES.items() if key in taken}
    scales = ("x_scales", *(each["scales"] for each in _MATRICES if each["weight"] in taken))
    return of_forms(
        Kernel(
            name,
            _multiply,
            types | more.pop("types", {}),
            {**dict.fromkeys(_NONE - types.keys()), **_FIXED, **sizes},
            **more,
        ),
        *("INPUTS", planes, "x", scales),
    )


def multiply(
    kernels: Mapping[str, Kernel],
    held: Sequence[Operand],
    given: tuple[Tensor, Tensor | None],
    outs: Sequence[Tensor],
    use: str,
    **more: Any,
) -> None:
    """Launches a product. held: weights of one FORMAT; given: what they are multiplied with, and
    its scales, see `Operand.multiplied`; outs: [rows, columns] each; use: of a tile; more: other
    parameters of the kernel."""
    x, x_scales = given
    kernel = kernels[held[0].form]
    tile = tile_for(kernel.name, x.device, use)
    numbers = {"tokens": len(x), "INPUTS": x.shape[1], "FORMAT": held[0].number}
    parameters = dict.fromkeys(_NONE) | _FIXED | more | numbers | {"x_scales": x_scales}
    for names, each in zip(_MATRICES, held, strict=False):
        stored = each.stored(tile["OUT"], tile["IN"])
        parameters |= {names["weight"]: stored["weight"], names["scales"]: each.scales}
    tiles = 0
    for names, out in zip(_MATRICES, outs, strict=False):
        parameters |= {names["out"]: out, names["OUTPUTS"]: out.shape[1]}
        tiles += triton.cdiv(out.shape[1], tile["OUT"])
    is_gathered = "CHOSEN" in more
    parameters["x"] = x if is_gathered else matrix(x, tile["TOKENS"], tile["IN"])
    grid: tuple[int, ...] = triton.cdiv(len(x), tile["TOKENS"]), tiles
    if "order" in more:
        grid = tiles, most_tiles(len(more["order"]), more["EXPERTS"], tile["TOKENS"])
        if programs := tile.constants.get("PROGRAMS"):
            grid = (min(programs, math.prod(grid)),)
    launch(kernel, grid, tile, x.device, **parameters)


Stored = Tensor | PlaneTensor | ScaledTensor

_TWO: dict[str, Any] = {**dict.fromkeys(("third", "third_scales", "third_out")), "THIRD": 0}
_ONE = _TWO | {**dict.fromkeys(("second", "second_scales", "second_out")), "SECOND": 0}
_ALONE = {
    f"{outputs} × {inputs}": {"OUTPUTS": outputs, "INPUTS": inputs, **_ONE}
    for outputs, inputs in (
        # What follows attention in full layers, and the end of the dense part; queries and keys of
        # the last layer, a full one; and what has another format than the others of its input.
        *((2816, 8192), (2816, 2112)),
        *((8192, 2816), (1024, 2816), (4096, 2816), (2048, 2816)),
    )
}

KERNELS = product(
    "linear",
    ("second", "second_out", "third", "third_out"),
    {"OUTPUTS": 4096, "SECOND": 2048, "THIRD": 2048, "INPUTS": 2816},
    "Q4_K",
    variants={
        "alone": {"OUTPUTS": 2816, "INPUTS": 4096, **_ONE},
        "queries, keys": {"OUTPUTS": 8192, "SECOND": 1024, **_TWO},
    },
    shapes={**_ALONE, "4096 and 2048 × 2816": {"OUTPUTS": 4096, "SECOND": 2048, **_TWO}},
)
GATED = product(
    "linear_gated",
    ("second",),
    {"OUTPUTS": 2112, "INPUTS": 2816, "GATED": True},
    "Q4_K",
    shapes={"silu": {"SILU": True}},
)


def linear(x: Tensor, weight: Stored, tile: int | None = None) -> Tensor:
    """See `by_kernel`; by the vendor's library where the table of tiles says that it is faster."""
    if isinstance(weight, Tensor) and weight.data_ptr() % ALIGNED == 0:
        outputs, inputs = weight.shape
        is_listed = (outputs, inputs) in library(x.device)
        if is_listed and keeps_bits(x.device, x.dtype, outputs, inputs):
            return padded_product(x, weight)
    return by_kernel(x, weight, tile)


def by_kernel(x: Tensor, weight: Stored, tile: int | None = None) -> Tensor:
    """`x @ weight.T`: x [..., in] bfloat16, weight [out, in] bfloat16, planes or codes → [...,
    out], bfloat16.

    Sums in float32, or in integers, in blocks of inputs from the first to the last, and rounds
    once.  tile: is of torch's products on a CPU, and ignored.
    """
    return _products(KERNELS, x, (weight,), weight.shape[:1])[0]


def linear_each(
    x: Tensor, first: Stored, second: Stored, third: Stored | None = None
) -> tuple[Tensor, ...]:
    """See `ops.linear_each`: the bits are those of `linear` of each weight."""
    weights = [each for each in (first, second, third) if each is not None]
    return tuple(_products(KERNELS, x, weights, [each.shape[0] for each in weights]))


def linear_gated(x: Tensor, gate: Stored, up: Stored, gating: Gating = "gelu") -> Tensor:
    """See `ops.linear_gated`. Rounds once, where the reference rounds gate and up too."""
    both, sizes = (gate, up), {"GATED": True, "SILU": gating == "silu"}
    return _products(GATED, x, both, gate.shape[:1], **sizes)[0]


def _products(
    kernels: Mapping[str, Kernel],
    x: Tensor,
    weights: Sequence[Stored],
    outputs: Sequence[int],
    **sizes: bool,
) -> list[Tensor]:
    """Results of so many columns each, of one launch where the weights have one format."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    outs = [flat.new_empty(len(flat), columns) for columns in outputs]
    held = [operand(weight) for weight in weights]
    for number in {each.number for each in held} if all(out.numel() for out in outs) else ():
        own = [each for each in held if each.number == number]
        of_own = [out for out, each in zip(outs, held, strict=False) if each.number == number]
        multiply(kernels, own, own[0].multiplied(flat), of_own, use_for(len(flat)), **sizes)
    return [out.view(*x.shape[:-1], out.shape[1]) for out in outs]


def _serves(x: Tensor, *given: Any) -> bool:
    return multiplies(x, *(each for each in given if isinstance(each, Stored)))


def _serves_gated(x: Tensor, gate: Stored, up: Stored, gating: Gating) -> bool:
    same = operand(gate).number == operand(up).number and gate.shape == up.shape
    return same and multiplies(x, gate, up)


def _compare(
    function: Callable[..., Any], right: Callable[..., Any], weights: Sequence[Any], trial: Trial
) -> None:
    """With few tokens, and with many."""
    for tokens in trial.sizes.tokens:
        compare(function, right, trial.random((tokens, weights[0].shape[1])), weights)


def _check(format: str, trial: Trial) -> None:
    """The widths of the model, which a pipeline reads in many steps and which end within a tile."""
    for outputs, inputs in trial.sizes.products:
        weight = trial.weight(format, outputs, whole_blocks(format, inputs))
        _compare(linear, reference.linear.reference, [weight], trial)


def _check_each(format: str, trial: Trial) -> None:
    """Queries, keys and, where a layer has them, values."""
    for heads, kv_heads, d, has_values in trial.sizes.attention:
        shapes = [(count * d, whole_blocks(format, trial.sizes.hidden))
                  for count in (heads, kv_heads, kv_heads)[: 2 + has_values]]  # fmt: skip
        weights = [trial.weight(format, *shape, number=at) for at, shape in enumerate(shapes)]
        _compare(linear_each, reference.linear_each.reference, weights, trial)


def _check_gated(format: str, trial: Trial) -> None:
    inputs, outputs = trial.sizes.products[0]
    shape = outputs, whole_blocks(format, inputs)
    both = [trial.weight(format, *shape, number=number) for number in (0, 1)]
    _compare(linear_gated, reference.linear_gated.reference, both, trial)


TWINS = {
    **twins_of("linear", linear, _serves, _check),
    **twins_of("linear_each", linear_each, _serves, _check_each),
    **twins_of("linear_gated", linear_gated, _serves_gated, _check_gated),
}
