"""Torch serves each operation whose kernels are off, wrong, refuse a call, or do not run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.kernels import close, interpreted, seen_as

import sfumato.engine.runner  # noqa: F401, which registers all operations
from sfumato import ops
from sfumato.ops import reference, registry
from sfumato.ops.paths import paths
from sfumato.ops.registry import PLANES
from sfumato.ops.triton import FORMATS_OF, OPERATIONS, self_test
from sfumato.ops.triton.kernel import LaunchError
from sfumato.ops.triton.planes import twin_name
from sfumato.ops.triton.self_test import KernelTwin, Trial
from sfumato.weights.formats import KINDS, SCALED

CPU = torch.device("cpu")
WAYS = ("off", "failed", "refused", "does not run")


@pytest.fixture
def seen_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(self_test, "_failed", {})
    monkeypatch.setattr("sfumato.ops.triton._refused", set())
    with seen_as("cpu", "cuda"):
        yield


def kernels(way: str) -> Callable[[str], KernelTwin]:
    """The kernels of every operation, which in one of WAYS do not serve."""

    def function(*arguments: Any) -> str:
        if way == "does not run":
            raise LaunchError("a kernel: too large")
        return "kernels"

    return lambda name: KernelTwin(name, function, lambda *_: way != "refused", lambda trial: None)


def served(operation: str, form: str, *arguments: Any) -> object:
    return registry.choose(operation, CPU, form, *arguments)(*arguments)


def fall_back(
    operation: str, name: str, call: tuple[Any, ...], way: str, patch: pytest.MonkeyPatch
) -> None:
    """With its kernels, and then without them. call: the form of the weight, and the arguments."""
    everything = frozenset((*OPERATIONS, name))
    torch_serves = SimpleNamespace(reference=lambda *arguments: "torch")
    patch.setattr(registry, "_operations", dict.fromkeys(registry.operations(), torch_serves))
    patch.setattr(self_test, "_passed", {CPU: everything})
    patch.setattr("sfumato.ops.triton._twin", kernels(""))
    assert served(operation, *call) == "kernels"
    patch.setattr("sfumato.ops.triton._twin", kernels(way))
    if way == "failed":
        patch.setattr(self_test, "_passed", {CPU: everything - {name}})
    if way == "off":
        patch.setattr(registry, "_off", {operation})
    for _ in range(2):
        assert served(operation, *call) == "torch"
    if way == "does not run":
        assert self_test.prepared(CPU) == everything - {name}


@pytest.mark.usefixtures("seen_as_a_gpu")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_each_operation(operation: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = OPERATIONS[operation][1]
    fall_back(operation, operation, (form, *[torch.ones(1)] * 4), way, monkeypatch)


@pytest.mark.usefixtures("seen_as_a_gpu")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("operation", "format"),
    [(name, format) for name in sorted(FORMATS_OF) for format in ("Q8_0", *KINDS)
     if format in FORMATS_OF[name]],
)  # fmt: skip
def test_each_operation_with_weights_of_a_format(
    operation: str, format: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = Trial(CPU).weight(format, 4, 64)
    call = (SCALED if format in KINDS else PLANES, torch.ones(1), weight)
    fall_back(operation, twin_name(operation, format), call, way, monkeypatch)


@interpreted
@pytest.mark.usefixtures("seen_as_a_gpu")
def test_a_broken_kernel_falls_back_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The real kernels of two operations, one of which gives 1.3 times what it should."""
    from sfumato.ops.triton import norms, step

    right = norms.rms_norm
    monkeypatch.setattr(norms, "rms_norm", lambda *given: right(*given) * 1.3)
    monkeypatch.setattr(self_test, "_passed", {})
    twins = {"rms_norm": norms.TWINS["rms_norm"], "step_noise": step.TWINS["step_noise"]}
    with caplog.at_level(logging.WARNING, logger=self_test.__name__):
        for _ in range(2):
            assert self_test.prepare(Trial(CPU), twins, dict) == {"step_noise"}
    (record,) = caplog.records
    why = "the self-test of kernels failed (AssertionError: the relative error is 3.00e-01"
    assert f"rms_norm: torch serves on cpu, since {why}" in record.getMessage()
    rows = {row.operation: row for row in paths(CPU)}
    assert rows["rms_norm"].path == "torch" and rows["rms_norm"].reason.startswith(why)
    assert rows["step_noise"].path == "Triton"
    x = torch.randn(3, 72)
    close(ops.rms_norm(x, None, 1e-6), reference.rms_norm.reference(x, None, 1e-6))
