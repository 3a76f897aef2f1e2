"""Operations that a device computes wrongly, and the CPU in their place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sfumato import ops
from sfumato.ops import registry
from sfumato.ops.device_check import Call, check, on_host

CPU = torch.device("cpu")
X, WEIGHT = torch.linspace(-1, 1, 24).view(3, 8), torch.linspace(0.5, 2, 8)


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """No twins for a CPU but those of a test, and nothing replaced."""
    monkeypatch.setattr(registry, "_operations", dict(registry.operations()))
    monkeypatch.setattr(registry, "_twins", {})
    monkeypatch.setattr(registry, "_replaced", {})


def _norm_is(function: Callable[..., Any]) -> Call:
    registry.twin("rms_norm", "cpu")(function)
    return Call("rms_norm", (X, WEIGHT, 1e-6))


def _given(result: object, *arguments: object) -> object:
    return result


def _fails(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    raise NotImplementedError("no norm here\nand more")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, weight, eps: 1.01 * x, "its result differs by 2.3e-01 of its size"),
        (lambda x, weight, eps: x / 0, "its result is not finite where the reference's is"),
        (lambda x, weight, eps: x[:2], "its result has the shape (2, 8), not (3, 8)"),
        (_fails, "it fails there (NotImplementedError: no norm here)"),
    ],
)
def test_a_wrong_operation_goes_to_the_cpu(
    function: Callable[..., Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    call = _norm_is(function)
    right = ops.rms_norm.reference(X, WEIGHT, 1e-6)
    with caplog.at_level(logging.WARNING):
        wrong = check(CPU, [call, call])
    assert list(wrong) == ["rms_norm"]
    assert wrong["rms_norm"].split(" by ")[0] == why.split(" by ")[0]
    assert len(caplog.records) == 1 and "the CPU serves it on cpu, since" in caplog.text
    assert registry.why_replaced("rms_norm", CPU) == wrong["rms_norm"]
    assert torch.equal(ops.rms_norm(X, WEIGHT, 1e-6), right)


def test_a_right_one_stays() -> None:
    near = ops.rms_norm.reference
    call = _norm_is(lambda *arguments: near(*arguments) * (1 + 1e-6))
    assert check(CPU, [call]) == {}
    assert not registry.why_replaced("rms_norm", CPU)


def test_integers_may_differ_where_numbers_are_nearly_equal() -> None:
    chosen, shares = torch.arange(400).view(100, 4), torch.ones(100, 4)

    @registry.operation
    def choice(x: Tensor) -> tuple[Tensor, Tensor]:
        return chosen, shares

    with_swap = chosen.clone()
    with_swap[0, :2] = with_swap[0, [1, 0]]
    for computed, wrong in ((with_swap, False), (chosen.flip(1), True)):
        registry._twins.clear()
        registry._replaced.clear()
        result = computed, shares
        registry.twin("choice", "cpu")(partial(_given, result))
        assert bool(check(CPU, [Call("choice", (X,))])) is wrong


def test_what_is_written_in_place_comes_back() -> None:
    stored, new = torch.zeros(2, 1, 4, 2), torch.ones(1, 3, 1, 2)
    places = (torch.tensor([1]), torch.tensor([0]), torch.tensor([2]))
    assert on_host(ops.write_cache.reference)(stored, new, *places) is None
    assert stored.sum() == 4 and stored[1, 0, :2].eq(1).all()
