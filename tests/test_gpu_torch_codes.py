"""The baseline of FP8 products: the calls that torch's kernels get, and what is made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks import gpu_torch_codes
from torch import Tensor

from sfumato.ops import reference
from sfumato.weights.formats import round_rows


def scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, _: Any, b_scale: Tensor, *__: Any,
              output_dtype: torch.dtype) -> Tensor:  # fmt: skip
    """What torch documents, of one product."""
    return ((a.float() * a_scale) @ (b.float() * b_scale)).to(output_dtype)


def scaled_grouped_mm(a: Tensor, b: Tensor, a_scale: Tensor, _: Any, b_scale: Tensor, *__: Any,
                      offs: Tensor, output_dtype: torch.dtype) -> Tensor:  # fmt: skip
    """And of groups of rows, which end at `offs`."""
    starts, parts = [0, *offs.tolist()[:-1]], []
    for number, (start, end) in enumerate(zip(starts, offs.tolist(), strict=True)):
        rows = slice(start, end)
        scales = a_scale[rows, None], b_scale[number, None]
        parts.append(scaled_mm(a[rows], b[number], scales[0], None, scales[1],
                               output_dtype=output_dtype))  # fmt: skip
    return torch.cat(parts)


def test_the_baseline_is_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_torch_codes.F, "scaled_mm", scaled_mm)
    monkeypatch.setattr(gpu_torch_codes.F, "scaled_grouped_mm", scaled_grouped_mm)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(9, 32, generator=random)
    gate_up, down = (
        round_rows(torch.randn(5, *shape, generator=random), "FP8")
        for shape in ((64, 32), (32, 32))
    )
    scores = torch.rand(9, 5, generator=random)
    shares, chosen = scores.topk(2, dim=1)
    chosen = torch.where(chosen == 3, 4, chosen)  # one expert is chosen by no token
    call = x, chosen, shares, gate_up, down
    function = gpu_torch_codes.peer("experts", call)
    assert function is not None
    torch.testing.assert_close(
        function(*call), reference.experts.reference(*call), rtol=2e-3, atol=2e-3
    )
    matrix = round_rows(torch.randn(16, 32, generator=random), "FP8")
    expected = reference.linear.reference(x, matrix, None)
    linear = gpu_torch_codes.peer("linear", (x, matrix, None))
    assert linear is not None
    torch.testing.assert_close(linear(x, matrix), expected, rtol=2e-3, atol=2e-3)


def test_other_weights_have_no_baseline() -> None:
    int8 = round_rows(torch.ones(16, 32), "INT8")
    assert gpu_torch_codes.peer("linear", (torch.ones(2, 32), int8, None)) is None
    assert gpu_torch_codes.peer("linear", (torch.ones(2, 32), torch.ones(16, 32), None)) is None
