"""The compiled gated products, RMS norm and rotary embedding against their plain twins."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cpu.forced import compiled, each_isa, forced, normal, threads
from torch import Tensor

from sfumato import ops
from sfumato.ops import registry
from sfumato.ops.cpu import library

pytestmark = [
    compiled,
    each_isa,
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16]),
]
NAMES = ("gelu", "silu", "rms_norm", "plain rms_norm", "rotate")


def apply(name: str, x: Tensor, weight: Tensor) -> Tensor:
    """The operation on rows [n, size]; weight [size]."""
    size = x.shape[1]
    if name in ("gelu", "silu"):
        return ops.gated(*(x * 3).chunk(2, dim=1), name)
    if name == "rotate":
        # Each row turns by angles of its own, which its first numbers give.
        angles = x[:, : size // 6].float() * 9
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return ops.rotate(x.view(len(x), 3, size // 3), cos, sin)
    return ops.rms_norm(x, weight if name == "rms_norm" else None, 1e-6)


@pytest.mark.parametrize("size", [6, 66, 192, 2820])
@pytest.mark.parametrize("name", NAMES)
def test_row_operations(isa: str, dtype: torch.dtype, name: str, size: int) -> None:
    """As the reference but for rounding, and each row to the last bit as it is alone."""
    x, weight = normal(0, 300, size).to(dtype), normal(1, size).to(dtype)
    with registry.reference_only():
        expected = apply(name, x, weight)
    with forced(isa), threads(2):
        got = apply(name, x, weight)
        for start, stop in ((0, 1), (7, 8), (299, 300), (5, 40)):
            assert torch.equal(apply(name, x[start:stop], weight), got[start:stop])
    assert got.dtype == dtype and got.shape == expected.shape
    rounding = (
        {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.03}
    )
    torch.testing.assert_close(got, expected, **rounding)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_number_stays_in_its_row(isa: str, dtype: torch.dtype, name: str) -> None:
    x, weight = normal(0, 5, 192).to(dtype), torch.ones(192, dtype=dtype)
    x[2, 40] = torch.nan
    with forced(isa):
        out = apply(name, x, weight).flatten(1)
        assert apply(name, x[:0], weight).shape[0] == 0
    assert out.isnan().any(dim=1).tolist() == [False, False, True, False, False]


def test_the_library_serves(isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not where a gradient is asked for, or for a dtype that it does not know."""
    seen: list[str] = []
    run = library.Kernels.run

    def spied(self: library.Kernels, name: str, *arguments: int | float | None) -> None:
        seen.append(name)
        run(self, name, *arguments)

    monkeypatch.setattr(library.Kernels, "run", spied)
    x, weight = normal(0, 5, 192).to(dtype), torch.ones(192, dtype=dtype)
    with forced(isa):
        for name in NAMES:
            apply(name, x, weight)
        assert seen == ["sf_gated", "sf_gated", "sf_rms_norm", "sf_rms_norm", "sf_rotate"]
        for name in NAMES:
            apply(name, x.clone().requires_grad_(), weight)
            apply(name, x.half(), weight.half())
        assert len(seen) == 5
