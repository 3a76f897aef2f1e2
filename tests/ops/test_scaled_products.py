"""Products with weights of 8-bit codes: the reference against what the codes say in float64."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernels import close

from sfumato import ops
from sfumato.ops import reference, registry, torch_device
from sfumato.weights.formats import Kind, round_rows

KINDS = ("FP8", "INT8")
ERROR = {"FP8": 0.04, "INT8": 0.015}
"""Relative to the product of the floats that were rounded. A code of e4m3 is uniformly off by 1/16
of its number at most, 1/28 in the mean square; one of 8 bits by a step of 1/127 of about three
times the mean square, divided by √12. Both sides are rounded: √2 times either."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_codes(kind: Kind) -> None:
    torch.manual_seed(0)
    x, floats = torch.randn(2, 9, 256), torch.randn(40, 256)
    weight = round_rows(floats, kind)
    out = reference.linear.reference(x.double(), weight)
    sums = round_rows(x, kind).codes.double() @ weight.codes.double().T
    scales = round_rows(x, kind).scales.double()[..., None] * weight.scales.double()
    close(out, sums * scales, 1e-14)
    close(out, x.double() @ floats.double().T, ERROR[kind])
    with registry.reference_only():
        close(ops.linear(x, weight), out, 6e-7)
    alone = ops.linear(x[1, 3:4], weight)
    assert torch.equal(ops.linear(x, weight)[1, 3:4], alone)
    close(alone, out[1, 3:4], 6e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_round_what_each_product_takes(kind: Kind) -> None:
    """On a CPU, of the reference, and of torch on a GPU whose grouped product would wait."""
    torch.manual_seed(0)
    tokens, count, hidden, inner = 13, 4, 64, 32
    x, scores = torch.randn(tokens, hidden), torch.randn(tokens, count)
    floats = torch.randn(count, 2 * inner, hidden) * 0.125, torch.randn(count, hidden, inner)
    gate_up, down = (round_rows(each, kind) for each in floats)
    shares, chosen = scores.softmax(-1).topk(2)
    wide = reference.experts.reference(x.double(), chosen, shares, gate_up, down)
    one = []
    for token, (picked, share) in enumerate(zip(chosen, shares, strict=True)):
        parts = []
        for expert in picked.tolist():
            both = reference.linear.reference(x[token : token + 1].double(), gate_up[expert])
            gate, up = both.chunk(2, dim=-1)
            parts.append(
                reference.linear.reference(reference.gated.reference(gate, up), down[expert])
            )
        one.append(share.double() @ torch.cat(parts))
    close(wide, torch.stack(one), 1e-7)
    # Numbers between two codes may go to either, where float32 rounds otherwise than float64.
    close(ops.experts(x, chosen, shares, gate_up, down), wide, 2e-3)
    close(torch_device.experts(x, chosen, shares, gate_up, down), wide, 2e-3)
    expected = reference.experts.reference(
        x.double(), chosen, shares, *(each.double() for each in floats)
    )
    close(wide, expected, 2 * ERROR[kind])
