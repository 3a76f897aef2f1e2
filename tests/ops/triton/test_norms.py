"""RMS norms and the sums with the residual, interpreted, against their references."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernels import close, interpreted

from sfumato.ops import reference

pytestmark = interpreted
EPS = 1e-6


@pytest.mark.parametrize("shape", [(3, 72), (2, 5, 16)])
def test_norms(shape: tuple[int, ...]) -> None:
    from sfumato.ops.triton.norms import rms_norm

    x, weight = torch.randn(shape), torch.randn(shape[-1])
    for scale in (weight, None):
        close(rms_norm(x, scale, EPS), reference.rms_norm.reference(x, scale, EPS))
    apart = x.transpose(0, -2)
    close(rms_norm(apart, weight, EPS), reference.rms_norm.reference(apart, weight, EPS))
    assert rms_norm(x[:0], weight, EPS).shape == x[:0].shape


def test_what_follows_attention() -> None:
    from sfumato.ops.triton.norms import after_attention

    x, attended = torch.randn(2, 40), torch.randn(2, 40) * 7
    weights = torch.randn(3, 40).unbind()
    out = x + reference.rms_norm.reference(attended, weights[0], EPS)
    expected = out, *(reference.rms_norm.reference(out, each, EPS) for each in weights[1:])
    for ours, theirs in zip(after_attention(x, attended, *weights, EPS), expected, strict=True):
        close(ours, theirs)
    none = after_attention(x[:0], attended[:0], *weights, EPS)
    assert all(each.shape == (0, 40) for each in none)


def test_the_end_of_a_layer() -> None:
    from sfumato.ops.triton.norms import after_layer

    x, dense, mixed = torch.randn(3, 2, 40).unbind()
    weights = torch.randn(3, 40).unbind()
    both = reference.rms_norm.reference(dense, weights[0], EPS) + reference.rms_norm.reference(
        mixed, weights[1], EPS
    )
    residual = x + reference.rms_norm.reference(both, weights[2], EPS)
    for scalar in (torch.tensor([0.5]), torch.tensor([[0.5], [3.0]])):
        close(after_layer(x, dense, mixed, *weights, scalar, EPS), residual * scalar)
