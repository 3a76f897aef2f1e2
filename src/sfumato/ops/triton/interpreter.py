"""Makes Triton's interpreter fast enough for tests.

The interpreter replaces the operations of `triton.language` by its own before each launch and each
call of a device function, and that takes longer than the kernel does.  `patch_once` has it do so
once in a process.  It changes nothing where kernels are compiled.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any


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
    original = getattr(patches, "_patch_lang", None)
    if original is None:  # another version of Triton: slower, and as right
        return
    # Kernels use the first module, and Triton's own device functions the second.
    original(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    patches._patch_lang = lambda function: _Kept()
