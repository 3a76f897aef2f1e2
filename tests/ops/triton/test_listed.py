"""The scores of given tokens, interpreted, against their reference."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.kernels import close, counted_launches, interpreted

from sfumato import ops
from sfumato.ops import reference
from sfumato.ops.triton.planes import PlaneTensor
from sfumato.ops.triton.self_test import random_planes, whole_blocks

pytestmark = interpreted
CPU = torch.device("cpu")


@pytest.mark.parametrize("format", ["Q6_K", "Q8_0"])
def test_scores_of_rows_in_planes(format: str) -> None:
    """Another number of columns than one tile's, rows named twice, and the last row."""
    from sfumato.ops.triton.head import own_scores

    columns = whole_blocks(format, 160)
    hidden, weight = torch.randn(3, columns), random_planes(CPU, format, 50, columns)
    ids = torch.randint(50, (3, 19))
    ids[0, :2] = 49
    with counted_launches() as launches:
        scores = own_scores(hidden, weight, ids)
    close(scores, reference.own_scores.reference(hidden, weight.dequantize(), ids))
    assert launches == {"listed_scores_planes": 1}


def test_no_copy_of_an_embedding_in_planes_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without kernels for it too: only the rows that are asked for become floats."""
    sizes: list[int] = []
    dequantize = PlaneTensor.dequantize

    def counted(planes: PlaneTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        sizes.append(math.prod(planes.shape[:-1]))
        return dequantize(planes, dtype)

    weight = random_planes(CPU, "Q6_K", 300, 256)
    ids, wide = torch.tensor([[7, 299, 7]]), weight.dequantize()
    monkeypatch.setattr(PlaneTensor, "dequantize", counted)
    assert torch.equal(ops.embed(ids, weight, torch.float32), wide[ids])
    hidden = torch.randn(1, 256)
    close(ops.own_scores(hidden, weight, ids), hidden @ wide[ids[0]].T, 1e-5)
    assert sizes and max(sizes) <= 6  # a row alone is computed twice


def test_scores_are_those_of_the_reference() -> None:
    from sfumato.ops.triton.head import own_scores

    hidden, weight = torch.randn(2, 136), torch.randn(50, 136)
    ids = torch.randint(50, (2, 19))
    ids[0, :2] = 49
    close(own_scores(hidden, weight, ids), reference.own_scores.reference(hidden, weight, ids))
    assert own_scores(hidden, weight, ids[:, :0]).shape == (2, 0)
