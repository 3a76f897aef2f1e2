"""Dense linear maps with weights of 8-bit codes: `x @ weight.T`, as in `linear`.

Two launches: the rows of x become codes, then codes are multiplied; see `codes`.  Where e4m3 is
unpacked by integers there is one, and x stays as it is.
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
    no_sums,
    product_of_codes,
    round_rows,
    scales_of,
)
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.linear import LINEAR
from sfumato.ops.triton.operands import FEW, matrix, multiplied, use_for
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


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WAY: tl.constexpr,
    OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    IN: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> None:
    """out [tokens, OUTPUTS] = x [tokens, INPUTS] @ weight.T; a program makes [TOKENS, OUT] of it.

    x_scales: of the tokens, where x is codes; scales: of the weight's rows.
    """
    token = tl.program_id(0) * TOKENS
    row = tl.program_id(1) * OUT
    x = as_descriptor(x, tokens, INPUTS, TOKENS, IN, DESCRIPTORS)
    weight = as_descriptor(weight, OUTPUTS, INPUTS, OUT, IN, DESCRIPTORS)
    sums = no_sums(OUT, TOKENS, WAY)
    for column in range(0, INPUTS, IN):
        block = weight.load([row, column])
        given = x.load([token, column]).T
        sums = product_of_codes(block, given, sums, IN, WAY, out.dtype.element_ty, UPCAST)
    rows = row + tl.arange(0, OUT)
    places = token + tl.arange(0, TOKENS)
    value = sums.to(tl.float32) * scales_of(scales, 0, rows, OUTPUTS)[:, None]
    if WAY != FP8_BYTES:
        value = value * scales_of(x_scales, 0, places, tokens)[None, :]
    target = out + places.to(tl.int64)[:, None] * OUTPUTS + rows[None, :]
    tl.store(target, value.T, mask=(places < tokens)[:, None] & (rows < OUTPUTS)[None, :])


def _kernel(name: str, x: str, weight: str, way: tl.constexpr, format: Kind) -> Kernel:
    types = {
        "x": f"tensordesc<{x}[{{TOKENS}}, {{IN}}]>",
        "x_scales": "*fp32:16",
        "weight": f"tensordesc<{weight}[{{OUT}}, {{IN}}]>",
        "scales": "*fp32:16",
        "out": "*bf16:16",
        "tokens": "i32",
    }
    sizes = {"OUTPUTS": 4096, "INPUTS": 2816, "WAY": way.value}
    return register(Kernel(name, _linear, types, sizes, shapes=LINEAR.shapes, format=format))


KERNELS = {
    "FP8": _kernel("linear_fp8", "fp8e4nv", "fp8e4nv", FP8_CODES, "FP8"),
    "INT8": _kernel("linear_int8", "i8", "i8", INT8_CODES, "INT8"),
    "bytes": _kernel("linear_bytes", "bf16", "u8", FP8_BYTES, "FP8"),
}


def linear(x: Tensor, weight: ScaledTensor, tile: int | None = None) -> Tensor:
    """`x @ weight.T`: x [..., in] bfloat16, weight [out, in] → [..., out], bfloat16. Rounds the
    rows of x to codes where the device multiplies such. tile: as in `linear.linear`."""
    return multiply(x, weight, multiplies_codes(weight.kind, x.device))


def multiply(x: Tensor, weight: ScaledTensor, as_codes: bool) -> Tensor:
    """As `linear`; as_codes: whether codes are multiplied, or FP8 is unpacked."""
    outputs, inputs = weight.shape
    flat = x.reshape(-1, inputs).contiguous()
    tokens = len(flat)
    out = flat.new_empty(tokens, outputs)
    if out.numel() == 0:
        return out.view(*x.shape[:-1], outputs)
    kernel = KERNELS[weight.kind if as_codes else "bytes"]
    chosen = tile_for(kernel.name, x.device, use_for(tokens))
    given: dict[str, Any] = {"x": flat, "x_scales": weight.scales}
    codes = weight.codes
    if as_codes:
        held = round_rows(flat, weight.kind)
        given = {"x": held.codes, "x_scales": held.scales}
    else:
        codes = codes.view(torch.uint8)
    launch(
        kernel,
        (triton.cdiv(tokens, chosen["TOKENS"]), triton.cdiv(outputs, chosen["OUT"])),
        chosen,
        x.device,
        **{**given, "x": matrix(given["x"], chosen["TOKENS"], chosen["IN"])},
        weight=matrix(codes, chosen["OUT"], chosen["IN"]),
        scales=weight.scales,
        out=out,
        tokens=tokens,
        OUTPUTS=outputs,
        INPUTS=inputs,
        WAY=kernel.sizes["WAY"],
    )
    return out.view(*x.shape[:-1], outputs)


def _serves(x: Tensor, weight: ScaledTensor, tile: int | None = None) -> bool:
    return takes_codes(weight) and multiplied(x)


def _check(kind: Kind, device: torch.device) -> None:
    """Sizes that divide by no tile, and many tokens; against what the codes say in float64."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for tokens, outputs, inputs in sizes_for(device, [(5, 72, 144)], [(FEW + 90, 200, 688)]):
        x, floats = random_like(device, dtype, (tokens, inputs), (outputs, inputs))
        weight = rounded(floats, kind)
        wide = weight if multiplies_codes(kind, device) else weight.dequantize(torch.float64)
        expected = reference.linear.reference(x.double(), wide)
        assert_close(linear(x, weight), expected, error_bound(dtype))


TWINS = {
    name: KernelTwin(name, linear, _serves, partial(_check, kind))
    for kind, name in ((kind, scaled_name("linear", kind)) for kind in KINDS)
}
