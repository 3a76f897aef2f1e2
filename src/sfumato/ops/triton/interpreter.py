"""Makes Triton's interpreter fast enough for tests, and its products steady.

The interpreter replaces the operations of `triton.language` by its own before each launch and each
call of a device function, and that takes longer than the kernel does.  `patch_once` has it do so
once in a process.  Its matrix products are NumPy's, which on some processors sum in an order that
depends on the number of rows; summed in float64 and rounded once, they do not show the order.
Nothing changes where kernels are compiled.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np


class _Kept:
    """What the interpreter takes for the record of a replacement: there is nothing to restore."""

    def restore(self) -> None:
        pass


@cache
def patch_once() -> None:
    """Replaces the operations of the language for good; only where all kernels of the process are
    interpreted."""
    import triton.language as tl
    from triton.runtime import interpreter

    patches: Any = interpreter
    _steady_products(patches)
    original = getattr(patches, "_patch_lang", None)
    if original is None:  # another version of Triton: slower, and as right
        return
    # Kernels use the first module, and Triton's own device functions the second.
    original(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    patches._patch_lang = lambda function: _Kept()


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
