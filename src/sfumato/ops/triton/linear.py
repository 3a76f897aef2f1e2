"""Dense linear maps: `x @ weight.T`.

The weight's rows are the M side of the matrix product and the tokens its N side, as in `experts`:
one form of product for both, and few tokens waste no rows of an instruction.  Of a weight of codes
the rows of x become codes first, in a launch of their own, where the device multiplies such.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.triton.kernel import Kernel, launch
from sfumato.ops.triton.operands import matrix, multiplies, use_for
from sfumato.ops.triton.planes import PlaneTensor
from sfumato.ops.triton.self_test import Trial, compare, twins_of, whole_blocks
from sfumato.ops.triton.tiles import tile_for
from sfumato.ops.triton.weights import (
    as_descriptor,
    as_weight,
    no_sums,
    of_forms,
    operand,
    scaled,
    weight_block,
    weight_product,
)
from sfumato.weights.formats import ScaledTensor


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    x: tl.tensor, x_scales: tl.tensor, weight: tl.tensor, scales: tl.tensor, out: tl.tensor,
    tokens: tl.tensor,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, FORMAT: tl.constexpr, OUT: tl.constexpr,
    TOKENS: tl.constexpr, IN: tl.constexpr, UPCAST: tl.constexpr, DESCRIPTORS: tl.constexpr,
) -> None:  # fmt: skip
    """out [tokens, OUTPUTS] = x [tokens, INPUTS] @ weight.T; a program makes [TOKENS, OUT] of it.

    x_scales: of the tokens, where x is codes; scales: of the weight's rows, where it is codes. The
    tiles of tokens follow each other, so that programs that run side by side share the block of the
    weight, of which they read each byte from memory once.
    """
    token = tl.program_id(0) * TOKENS
    row = tl.program_id(1) * OUT
    x = as_descriptor(x, tokens, INPUTS, TOKENS, IN, DESCRIPTORS)
    weight = as_weight(weight, OUTPUTS, INPUTS, OUT, IN, FORMAT, DESCRIPTORS)
    sums = no_sums(OUT, TOKENS, FORMAT)
    for column in range(0, INPUTS, IN):
        block = weight_block(
            weight, row, column, OUTPUTS, INPUTS, OUT, IN, FORMAT, out.dtype.element_ty
        )
        sums = weight_product(block, x.load([token, column]).T, sums, IN, FORMAT, UPCAST)
    rows = row + tl.arange(0, OUT)
    places = token + tl.arange(0, TOKENS)
    value = scaled(sums, scales, 0, rows, OUTPUTS, x_scales, places, places < tokens)
    target = out + places.to(tl.int64)[:, None] * OUTPUTS + rows[None, :]
    tl.store(target, value.T, mask=(places < tokens)[:, None] & (rows < OUTPUTS)[None, :])


_SHAPES = {
    f"{outputs} × {inputs}": {"OUTPUTS": outputs, "INPUTS": inputs}
    for outputs, inputs in (
        # Queries, keys and values, and what follows attention; sliding layers, then full.
        *((2048, 2816), (2816, 4096), (8192, 2816), (1024, 2816), (2816, 8192)),
        *((2112, 2816), (2816, 2112)),  # the dense part of a layer
    )
}

KERNELS = of_forms(
    Kernel(
        "linear",
        _linear,
        {
            "x": "tensordesc<bf16[{TOKENS}, {IN}]>",
            "weight": "tensordesc<bf16[{OUT}, {IN}]>",
            "out": "*bf16:16",
            "tokens": "i32",
        },
        {"OUTPUTS": 4096, "INPUTS": 2816, "FORMAT": 0, "x_scales": None, "scales": None},
        shapes=_SHAPES,
    ),
    *("INPUTS", "Q4_K", "x"),
)


def linear(
    x: Tensor, weight: Tensor | PlaneTensor | ScaledTensor, tile: int | None = None
) -> Tensor:
    """`x @ weight.T`: x [..., in] bfloat16, weight [out, in] bfloat16, planes or codes → [...,
    out], bfloat16.

    Sums in float32, or in integers, in blocks of inputs from the first to the last, and rounds
    once.  tile: is of torch's products on a CPU, and ignored.
    """
    outputs, inputs = weight.shape
    flat = x.reshape(-1, inputs).contiguous()
    tokens = len(flat)
    out = flat.new_empty(tokens, outputs)
    if out.numel() == 0:
        return out.view(*x.shape[:-1], outputs)
    held = operand(weight)
    kernel = KERNELS[held.form]
    chosen = tile_for(kernel.name, x.device, use_for(tokens))
    factor, x_scales = held.multiplied(flat)
    launch(
        kernel,
        (triton.cdiv(tokens, chosen["TOKENS"]), triton.cdiv(outputs, chosen["OUT"])),
        chosen,
        x.device,
        x=matrix(factor, chosen["TOKENS"], chosen["IN"]),
        x_scales=x_scales,
        **held.stored(chosen["OUT"], chosen["IN"]),
        scales=held.scales,
        out=out,
        tokens=tokens,
        OUTPUTS=outputs,
        INPUTS=inputs,
    )
    return out.view(*x.shape[:-1], outputs)


def _serves(
    x: Tensor, weight: Tensor | PlaneTensor | ScaledTensor, tile: int | None = None
) -> bool:
    return multiplies(x, weight)


def _check(format: str, trial: Trial) -> None:
    """The widths of the model, which a pipeline reads in many steps and which end within a tile,
    for few tokens and for many."""
    for outputs, inputs in trial.sizes.products:
        weight = trial.weight(format, outputs, whole_blocks(format, inputs))
        for tokens in trial.sizes.tokens:
            x = trial.random((tokens, weight.shape[1]))
            compare(linear, reference.linear.reference, x, [weight])


TWINS = twins_of("linear", linear, _serves, _check)
