"""What the tests of kernels share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
