"""Products with stored weights in a training: the gradient of the dequantized weights, and nothing
of a weight's size kept."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.ops.cpu.forced import blocks, compiled, normal, relative, weights
from tests.support.live_bytes import LiveBytes
from torch import Tensor

from sfumato import ops
from sfumato.ops import frozen, reference
from sfumato.weights.formats import Weight, round_rows

FORMATS = ("Q4_K", "Q6_K", "Q8_0")
EXPERTS, HIDDEN, INNER, TOKENS = 4, 256, 256, 9


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are dequantized in several parts."""
    monkeypatch.setattr(reference, "SLICE", 40 * HIDDEN)


def expert_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """The last expert has no token."""
    scores = normal(5, TOKENS, EXPERTS - 1).softmax(-1)
    shares, chosen = scores.topk(2)
    return normal(6, TOKENS, HIDDEN), chosen, shares


def gradients(function: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    """The result, and the gradients of a sum of it, whose weights are not alike."""
    leaves = [each.clone().requires_grad_() for each in given]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, normal(7, *out.shape))


def of_linear(weight: Weight) -> tuple[Tensor, ...]:
    return gradients(lambda x: ops.linear(x, weight), normal(4, 3, 5, HIDDEN))


def of_experts(gate_up: Weight, down: Weight) -> tuple[Tensor, ...]:
    x, chosen, shares = expert_inputs()
    return gradients(lambda x, shares: ops.experts(x, chosen, shares, gate_up, down), x, shares)


def close(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], error: float) -> None:
    for own, their in zip(ours, theirs, strict=True):
        assert relative(own, their) < error


@pytest.mark.parametrize("name", FORMATS)
def test_the_gradient_is_that_of_the_dequantized_weights(name: str) -> None:
    matrix, both = blocks(name, 100, HIDDEN), blocks(name, EXPERTS, 2 * INNER, HIDDEN, seed=1)
    down = blocks(name, EXPERTS, HIDDEN, INNER, seed=2)
    close(of_linear(matrix), of_linear(matrix.dequantize()), 1e-6)
    floats = both.dequantize() / 16, down.dequantize() / 16
    mixed = of_experts(both, floats[1])
    close(mixed, of_experts(both.dequantize(), floats[1]), 2e-6)
    close(of_experts(both, down), of_experts(both.dequantize(), down.dequantize()), 2e-6)


@pytest.mark.parametrize("kind", ["FP8", "INT8"])
def test_the_gradient_passes_straight_through_the_codes_of_the_other_factor(kind: str) -> None:
    codes = round_rows(normal(1, 100, HIDDEN), kind)
    out, of_x = of_linear(codes)
    _, expected = of_linear(codes.dequantize())
    assert relative(of_x, expected) < 1e-6
    with torch.no_grad():
        assert torch.equal(out, ops.linear(normal(4, 3, 5, HIDDEN), codes))


@compiled
@pytest.mark.parametrize("activations", ["int8", "bf16"])
def test_packed_weights_multiply_as_they_serve_and_have_a_gradient(activations: str) -> None:
    packed, _ = weights("Q4_K", activations, 100, HIDDEN)
    out, of_x = of_linear(packed)
    assert relative(of_x, of_linear(packed.dequantize())[1]) < 1e-6
    both, _ = weights("Q4_K", activations, EXPERTS, 2 * INNER, HIDDEN)
    down, _ = weights("Q8_0", activations, EXPERTS, HIDDEN, INNER)
    mixed, *rest = of_experts(both, down)
    # The gate reads products that were rounded, so its derivative is another by so much.
    close(tuple(rest), of_experts(both.dequantize(), down.dequantize())[1:], 0.03)
    with torch.no_grad():
        x, chosen, shares = expert_inputs()
        assert torch.equal(out, ops.linear(normal(4, 3, 5, HIDDEN), packed))
        assert torch.equal(mixed, ops.experts(x, chosen, shares, both, down))


def test_nothing_of_a_weights_size_is_kept_or_made(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, both = blocks("Q4_K", 100, HIDDEN), blocks("Q4_K", EXPERTS, 2 * INNER, HIDDEN, seed=1)
    down, (x, chosen, shares) = blocks("Q4_K", EXPERTS, HIDDEN, INNER, seed=2), expert_inputs()
    kept, made = [], []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
        made.append(math.prod(weight.shape))
        return ops.dense(weight, dtype)

    monkeypatch.setattr(frozen, "dense", dense)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        x = x.requires_grad_()
        out = ops.linear(x, matrix).sum() + ops.experts(x, chosen, shares, both, down).sum()
    assert sum(kept) == x.nbytes + chosen.nbytes + shares.nbytes
    out.backward()
    rows = [40 * HIDDEN, 40 * HIDDEN, 20 * HIDDEN]
    # The experts that are chosen, by one weight and then by the other.
    assert sorted(made) == sorted(rows + 3 * [HIDDEN * INNER] + 3 * [2 * INNER * HIDDEN])


@pytest.mark.parametrize("function", [ops.linear, ops.linear.reference])
def test_a_product_without_gradient_dequantizes_by_parts(
    function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, x = blocks("Q4_K", 100, HIDDEN), normal(4, 3, HIDDEN)

    def product() -> tuple[Tensor, int]:
        with LiveBytes() as count, torch.no_grad():
            return function(x, matrix), count.most

    by_parts, some = product()
    monkeypatch.setattr(reference, "SLICE", 100 * HIDDEN)
    at_once, most = product()
    assert relative(by_parts, at_once) < 1e-6
    assert most - some >= 4 * 60 * HIDDEN
