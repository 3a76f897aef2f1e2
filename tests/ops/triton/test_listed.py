"""The scores of given tokens, interpreted, against their reference."""

from __future__ import annotations

import torch
from tests.support.kernels import close, interpreted

from sfumato.ops import reference

pytestmark = interpreted


def test_scores_are_those_of_the_reference() -> None:
    from sfumato.ops.triton.listed import own_scores

    hidden, weight = torch.randn(2, 136), torch.randn(50, 136)
    ids = torch.randint(50, (2, 19))
    ids[0, :2] = 49
    close(own_scores(hidden, weight, ids), reference.own_scores(hidden, weight, ids))
    assert own_scores(hidden, weight, ids[:, :0]).shape == (2, 0)
