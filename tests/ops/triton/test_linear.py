"""The dense product, interpreted, against its reference."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernels import close, counted_launches, interpreted, seen_as

from sfumato.ops import reference
from sfumato.ops.reference import Gating
from sfumato.ops.triton.self_test import Trial
from sfumato.weights.formats import Weight

CPU = torch.device("cpu")

pytestmark = interpreted


def weight_of(format: str, rows: int, columns: int) -> Weight:
    return Trial(CPU).weight(format, rows, columns, number=rows)


@pytest.mark.parametrize("formats", [("", "", ""), ("Q4_0", "Q8_0", "Q4_0"), ("FP8", "FP8", "FP8")])
@pytest.mark.parametrize("widths", [(136, 70, 8), (64, 64), (24, 130, 65)])
def test_products_of_one_input_have_the_bits_that_they_have_alone(
    formats: tuple[str, ...], widths: tuple[int, ...]
) -> None:
    """One launch for the weights of a format, wherever a matrix ends in a tile; and codes of the
    input are made once."""
    from sfumato.ops.triton.linear import linear, linear_each

    x = torch.randn(2, 66, 96)  # more than a tile of tokens
    weights = [weight_of(*each, 96) for each in zip(formats, widths, strict=False)]
    with counted_launches() as launches:
        outs = linear_each(x, *weights)
    assert launches.pop("round_rows_fp8", 1) == 1
    assert launches.total() == len(set(formats[: len(widths)]))
    for out, weight in zip(outs, weights, strict=True):
        assert out.is_contiguous() and torch.equal(out, linear(x, weight))


@pytest.mark.parametrize("gating", ["gelu", "silu"])
@pytest.mark.parametrize("format", ["", "Q5_1", "INT8"])
def test_a_gate_and_what_it_gates_are_one_launch(
    format: str, gating: Gating, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sfumato.ops.triton import tiles
    from sfumato.ops.triton.linear import TWINS, linear_gated

    shape = 72, 96
    gate, up = (Trial(CPU).weight(format, *shape, number=number) for number in (0, 1))
    x = torch.randn(70, 96)
    with counted_launches() as launches:
        out = linear_gated(x, gate, up, gating)
    assert launches.pop("round_rows_int8", 1) == launches.total() == 1
    close(out, reference.linear_gated.reference(x, gate, up, gating), 1e-5)
    monkeypatch.setattr(tiles, "FEW", 8)  # the tile for many tokens
    assert torch.equal(linear_gated(x[3:9], gate, up, gating), out[3:9])
    assert not linear_gated(x[:0], gate, up, gating).numel()
    other = Trial(CPU).weight("Q8_0", *shape)
    assert not TWINS["linear_gated"].serves(x, gate, other, gating), "of two formats"


@pytest.mark.parametrize("shape", [(1, 8, 8), (5, 72, 88), (130, 64, 200)])
def test_products_are_those_of_the_reference(shape: tuple[int, int, int]) -> None:
    from sfumato.ops.triton.linear import linear

    tokens, outputs, inputs = shape
    x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
    close(linear(x, weight), reference.linear.reference(x.double(), weight.double()))
    halves = x.view(tokens, 2, inputs // 2).transpose(0, 1)  # not contiguous, three axes
    part = weight[:, : inputs // 2].contiguous()
    close(linear(halves, part), reference.linear.reference(halves.double(), part.double()))


def test_a_token_has_the_same_result_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where others make the tile that for many tokens."""
    from sfumato.ops.triton import tiles
    from sfumato.ops.triton.linear import linear

    monkeypatch.setattr(tiles, "FEW", 100)
    x, weight = torch.randn(140, 136), torch.randn(70, 136)
    many = linear(x, weight)
    for some in (slice(0, 1), slice(3, 90), slice(130, 140)):
        assert torch.equal(linear(x[some], weight), many[some])


def test_what_it_does_not_take_is_left_to_torch() -> None:
    from sfumato.ops.triton.linear import TWINS

    serves = TWINS["linear"].serves
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    assert serves(x, weight)
    assert not serves(x.double(), weight.double())
    assert not serves(x, torch.randn(8, 4).T)
    assert not serves(torch.randn(3, 6), torch.randn(4, 6))  # rows of 24 bytes


def test_the_registry_calls_it_once_it_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    from sfumato import ops
    from sfumato.ops.triton import self_test
    from sfumato.ops.triton.linear import TWINS

    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    monkeypatch.setattr(self_test, "_passed", {})
    with seen_as("cpu", "cuda"), counted_launches() as launches:
        ops.linear(x, weight)
        assert not launches
        twins = {"linear": TWINS["linear"]}
        trial = self_test.Trial(torch.device("cpu"))
        assert self_test.prepare(trial, twins, dict) == {"linear"}
        launches.clear()
        ops.linear(x, weight)
    assert launches["linear"] == 1


@pytest.mark.parametrize("keeps", [True, False])
def test_a_library_serves_what_the_table_lists(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """Where a row has the same bits at each place, and of no other shape than those listed."""
    from sfumato.ops.triton import linear as module

    monkeypatch.setattr(module, "library", lambda device: {(24, 64)})
    monkeypatch.setattr(module, "keeps_bits", lambda *given: keeps)
    monkeypatch.setattr(module, "ALIGNED", 64)  # as torch has it on a CPU
    x = torch.randn(5, 64)
    with counted_launches() as launches:
        close(module.linear(x, weight := torch.randn(24, 64)), x @ weight.T)
        assert launches["linear"] == (not keeps)
        close(module.linear(x, weight := torch.randn(32, 64)), x @ weight.T)
    assert launches["linear"] == 1 + (not keeps)


def test_a_gpu_without_a_copy_engine_gets_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    from sfumato.ops.triton import kernel, operands
    from sfumato.ops.triton.linear import linear

    for module in (kernel, operands):
        monkeypatch.setattr(module, "has_copy_engine", lambda device: False)
    x, weight = torch.randn(5, 88), torch.randn(72, 88)
    close(linear(x, weight), reference.linear.reference(x.double(), weight.double()))
