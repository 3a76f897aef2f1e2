"""What the tests of kernels share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from sfumato.ops import registry
from sfumato.ops.triton import kernel
from sfumato.ops.triton.kernel import installed, interpreting

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
def counted_launches() -> Iterator[Counter[str]]:
    """Counts the launches of every kernel, by name, in every thread."""
    counter: Counter[str] = Counter()
    kernel._counters.append(counter)
    try:
        yield counter
    finally:
        kernel._counters[:] = [other for other in kernel._counters if other is not counter]
