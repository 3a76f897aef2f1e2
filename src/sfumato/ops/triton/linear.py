"""Dense linear maps: `x @ weight.T`.

The weight's rows are the M side of the matrix product and the tokens its N side, as in `experts`:
one form of product for both, and few tokens waste no rows of an instruction.
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


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    FORMAT: tl.constexpr,
    OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    IN: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> None:
    """out [tokens, OUTPUTS] = x [tokens, INPUTS] @ weight.T; a program makes [TOKENS, OUT] of it.

    The tiles of tokens follow each other, so that programs that run side by side share the block
    of the weight, of which they read each byte from memory once.
    """
    token = tl.program_id(0) * TOKENS
    row = tl.program_id(1) * OUT
    x = as_descriptor(x, tokens, INPUTS, TOKENS, IN, DESCRIPTORS)
    weight = as_weight(weight, OUTPUTS, INPUTS, OUT, IN, FORMAT, DESCRIPTORS)
    accumulator = tl.zeros((OUT, TOKENS), tl.float32)
    for column in range(0, INPUTS, IN):
        block = weight_block(
            weight, row, column, OUTPUTS, INPUTS, OUT, IN, FORMAT, out.dtype.element_ty
        )
        accumulator = product(block, x.load([token, column]).T, accumulator, UPCAST)
    token_numbers = (token + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    rows = row + tl.arange(0, OUT)[None, :]
    inside = (token_numbers < tokens) & (rows < OUTPUTS)
    tl.store(out + token_numbers * OUTPUTS + rows, accumulator.T, mask=inside)


_SHAPES = {
    f"{outputs} × {inputs}": {"OUTPUTS": outputs, "INPUTS": inputs}
    for outputs, inputs in (
        # Queries, keys and values, and what follows attention; sliding layers, then full.
        *((2048, 2816), (2816, 4096), (8192, 2816), (1024, 2816), (2816, 8192)),
        *((2112, 2816), (2816, 2112)),  # the dense part of a layer
    )
}

LINEAR = register(
    Kernel(
        "linear",
        _linear,
        {
            "x": "tensordesc<bf16[{TOKENS}, {IN}]>",
            "weight": "tensordesc<bf16[{OUT}, {IN}]>",
            "out": "*bf16:16",
            "tokens": "i32",
        },
        {"OUTPUTS": 4096, "INPUTS": 2816, "FORMAT": 0},
        shapes=_SHAPES,
    )
)
PLANES = register(
    Kernel(
        "linear_planes",
        _linear,
        {**LINEAR.types, "weight": "*u8:16"},
        {**LINEAR.sizes, "FORMAT": LAYOUTS["Q4_K"].number},
        shapes=_SHAPES,
        columns="INPUTS",
    )
)


def linear(x: Tensor, weight: Tensor | PlaneTensor, tile: int | None = None) -> Tensor:
    """`x @ weight.T`: x [..., in] bfloat16, weight [out, in] bfloat16 or planes → [..., out],
    bfloat16.

    Sums in float32, in blocks of inputs from the first to the last, and rounds once.  tile: is of
    torch's products on a CPU, and ignored.
    """
    outputs, inputs = weight.shape
    flat = x.reshape(-1, inputs).contiguous()
    tokens = len(flat)
    out = flat.new_empty(tokens, outputs)
    if out.numel() == 0:
        return out.view(*x.shape[:-1], outputs)
    kernel = PLANES if isinstance(weight, PlaneTensor) else LINEAR
    chosen = tile_for(kernel.name, x.device, use_for(tokens))
    launch(
        kernel,
        (triton.cdiv(tokens, chosen["TOKENS"]), triton.cdiv(outputs, chosen["OUT"])),
        chosen,
        x.device,
        x=matrix(flat, chosen["TOKENS"], chosen["IN"]),
        **stored(weight, chosen["OUT"], chosen["IN"]),
        out=out,
        tokens=tokens,
        OUTPUTS=outputs,
        INPUTS=inputs,
    )
    return out.view(*x.shape[:-1], outputs)


def _serves(x: Tensor, weight: Tensor, tile: int | None = None) -> bool:
    return weight.is_contiguous() and multiplied(x, weight)


def _check(device: torch.device) -> None:
    """Sizes that divide by no tile, those of one whole tile, and many tokens."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    small, more = [(5, 72, 88), (128, 64, 64)], [(FEW + 90, 200, 88)]
    for tokens, outputs, inputs in sizes_for(device, small, more):
        x, weight = random_like(device, dtype, (tokens, inputs), (outputs, inputs))
        expected = reference.linear.reference(x.double(), weight.double())
        assert_close(linear(x, weight), expected, error_bound(dtype))


def _serves_planes(x: Tensor, weight: PlaneTensor, tile: int | None = None) -> bool:
    return takes_planes(weight) and multiplied(x)


def _check_planes(format: str, device: torch.device) -> None:
    """As `_check`, with the floats that the planes hold, rounded to the dtype of the product."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for tokens, outputs, inputs in sizes_for(device, [(5, 40, 96)], [(FEW + 90, 200, 288)]):
        (x,) = random_like(device, dtype, (tokens, whole_blocks(format, inputs)))
        weight = random_planes(device, format, outputs, x.shape[1])
        expected = reference.linear.reference(x.double(), weight.dequantize(dtype).double())
        assert_close(linear(x, weight), expected, error_bound(dtype))


TWINS = {
    "linear": KernelTwin("linear", linear, _serves, _check),
    **{
        name: KernelTwin(name, linear, _serves_planes, partial(_check_planes, format))
        for format, name in plane_names("linear").items()
    },
}
