"""What the tests of kernels share.

The interpreter replaces the operations of `triton.language` by its own before each launch and each
call of a device function, and that takes longer than the kernel does.  Where the kernels of a
process are interpreted, this module has it do so once.  The interpreter's matrix products are
NumPy's, which on some processors sum in an order that depends on the number of rows; summed in
float64 and rounded once, they do not show the order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sfumato.ops import registry
from sfumato.ops.triton import kernel
from sfumato.ops.triton.kernel import installed, interpreting
from sfumato.ops.triton.tiles import Tile

interpreted = pytest.mark.skipif(
    not (installed() and interpreting()), reason="Triton is not installed, or a GPU is here"
)
"""Marks tests of interpreted kernels."""


def close(out: Tensor, expected: Tensor, bound: float = 1e-6) -> None:
    """Asserts that ‖out − expected‖ ≤ bound · ‖expected‖, of finite numbers of one shape."""
    assert out.shape == expected.shape and out.isfinite().all()
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) <= bound, f"relative error {float(error):.2e}"


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of NaN, in which an element that a kernel does not write shows."""
    return torch.full(shape, float("nan"), dtype=dtype)


@contextmanager
def seen_as(kind: str, other: str) -> Iterator[None]:
    """Lets the twins for one kind of device serve tensors of another, in every thread: a GPU's, on
    a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._seen_as, kind, other)
        yield


@contextmanager
def in_turn(programs: int) -> Iterator[list[tuple[int, ...]]]:
    """Lets so many programs of the experts' products take all tiles. Gives the grid of each."""
    from sfumato.ops.triton import linear

    grids: list[tuple[int, ...]] = []
    tile_for, launch = linear.tile_for, linear.launch

    def with_programs(*given: Any) -> Tile:
        tile = tile_for(*given)
        return replace(tile, constants={**tile.constants, "PROGRAMS": programs})

    def noted(launched: kernel.Kernel, grid: tuple[int, ...], *others: Any, **more: Any) -> None:
        grids.append(grid)
        launch(launched, grid, *others, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "tile_for", with_programs)
        patch.setattr(linear, "launch", noted)
        yield grids


@contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Counts the launches of every kernel, by name, in every thread."""
    counter: Counter[str] = Counter()
    run = kernel._run

    def counted(launched: kernel.Kernel, *others: Any) -> None:
        counter[launched.name] += 1
        run(launched, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_run", counted)
        yield counter


def _replace_once() -> None:
    """Replaces the operations of the language for good."""
    import triton.language as tl
    from triton.runtime import interpreter

    patches: Any = interpreter
    _steady_products(patches)
    original = getattr(patches, "_patch_lang", None)
    if original is None:  # another version of Triton: slower, and as right
        return
    # Kernels use the first module, and Triton's own device functions the second.
    original(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing = SimpleNamespace(restore=lambda: None)
    patches._patch_lang = lambda function: nothing


def _steady_products(interpreter: Any) -> None:
    """Has products of float32 tiles summed in float64."""
    builder = interpreter.InterpreterBuilder
    original = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if not a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
            return original(self, a, b, d, *precision)
        with np.errstate(invalid="ignore", over="ignore"):  # infinities, as a device takes them
            product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    builder.create_dot = create_dot


if installed() and interpreting():
    _replace_once()
