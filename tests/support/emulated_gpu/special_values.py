"""Tests of the emulator itself: lane operations, conversions and special values, in small kernels,
against torch. What fails here is the emulator's fault and not that of a kernel of the project."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from tests.support.emulated_gpu.machine import OutsideError
from torch import Tensor

INFINITE = math.inf
VALUES = torch.tensor(
    [
        *(-INFINITE, INFINITE, math.nan, 0.0, -0.0, 1e-42, -1e-42, -200.0, 200.0),
        *(1e30, -1e30, -3e38, 3e38, 1.0, -1.0, 0.5),
        *(5e-5, -3e-6, 6e-8, 2e-8, 65519.0, -65520.0),  # where float16 gets narrow
    ]
)
TOLERANCE = 4e-6
KNOWN = {
    "sqrt": {-INFINITE},  # infinity, not NaN
    "rsqrt": {-INFINITE},  # 0, not NaN
    "divided": {VALUES[11].item(), VALUES[12].item()},  # 0: denormal results are flushed
}
"""Values of which the emulator is known to make something else; no kernel meets them."""


@triton.jit
def elementwise(x, out, WHICH: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    v = tl.load(x + at)
    if WHICH == "exp":
        v = tl.exp(v)
    elif WHICH == "exp2":
        v = tl.exp2(v)
    elif WHICH == "log":
        v = tl.log(v)
    elif WHICH == "log2":
        v = tl.log2(v)
    elif WHICH == "sqrt":
        v = tl.sqrt(v)
    elif WHICH == "rsqrt":
        v = tl.rsqrt(v)
    elif WHICH == "divided":
        v = 1.5 / v
    elif WHICH == "larger":
        v = tl.maximum(v, -1.0)
    elif WHICH == "floor":
        v = tl.floor(v)
    elif WHICH == "bfloat16":
        v = v.to(tl.bfloat16).to(tl.float32)
    elif WHICH == "float16":
        v = v.to(tl.float16).to(tl.float32)
    tl.store(out + at, v)


@triton.jit
def across(x, out, WHICH: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    v = tl.load(x + at)
    if WHICH == "sum":
        tl.store(out, tl.sum(v, 0))
    elif WHICH == "max":
        tl.store(out, tl.max(v, 0))
    elif WHICH == "argmax":
        tl.store(out, tl.argmax(v, 0).to(v.dtype))
    elif WHICH == "cumsum":
        tl.store(out + at, tl.cumsum(v, 0))
    elif WHICH == "sort":
        tl.store(out + at, tl.sort(v))


@triton.jit
def product(x, y, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    rows, columns, depth = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    left = tl.load(x + rows[:, None] * DEPTH + depth)
    right = tl.load(y + depth[:, None] * COLUMNS + columns)
    tl.store(out + rows[:, None] * COLUMNS + columns, tl.dot(left, right))


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "divided": lambda v: 1.5 / v,
    "larger": lambda v: torch.where(v.isnan(), -1.0, v.clamp(min=-1)),
    "floor": torch.floor,
    "bfloat16": lambda v: v.bfloat16().float(),
    "float16": lambda v: v.half().float(),
}
ACROSS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda v: v.sum()[None],
    "max": lambda v: v.max()[None],
    "argmax": lambda v: v.argmax()[None].to(v.dtype),
    "cumsum": lambda v: v.cumsum(0).to(v.dtype),
    "sort": lambda v: v.sort().values,
}


def _launch(kernel: Any, *arguments: Any, warps: int) -> None:
    kernel[(1,)](*arguments, num_warps=warps)


def wrong() -> Iterator[str]:
    """One line for each thing that the emulator gets wrong."""
    random = torch.Generator().manual_seed(0)
    x = torch.cat([VALUES, torch.randn(128 - len(VALUES), generator=random) * 5])
    for name, reference in ELEMENTWISE.items():
        out = torch.zeros(128)
        _launch(elementwise, x, out, name, 128, warps=4)
        right = reference(x)
        same = (out == right) | (out.isnan() & right.isnan())
        near = (out - right).abs() <= TOLERANCE * right.abs()
        for at in (~(same | near)).nonzero().flatten().tolist():
            if x[at].item() not in KNOWN.get(name, ()):
                yield f"{name} of {x[at].item()}: {out[at].item()}, not {right[at].item()}"
    try:
        _launch(elementwise, x, torch.zeros(127), "exp", 128, warps=4)
        yield "no error for a number that is stored past a tensor"
    except OutsideError:
        pass
    for dtype in (torch.float32, torch.int32):
        for count in (32, 256, 1024):
            x = torch.randperm(4096, generator=random)[:count].sub(2048).to(dtype)
            for name, reference in ACROSS.items():
                out, right = torch.zeros(count, dtype=dtype), reference(x)
                _launch(across, x, out, name, count, warps=1 if count == 32 else 4)
                if not torch.equal(out[: len(right)], right):
                    yield f"{name} of {count} numbers of {dtype}"
    for dtype in (torch.bfloat16, torch.float16):
        left, right = (
            torch.randint(-8, 9, shape, generator=random).to(dtype)
            for shape in ((32, 64), (64, 16))
        )
        out = torch.zeros(32, 16)
        _launch(product, left, right, out, 32, 16, 64, warps=4)
        if not torch.equal(out, left.float() @ right.float()):
            yield f"a product of {dtype}"
