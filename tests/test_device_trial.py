"""The trial of a device that has no kernels of ours, with a CPU in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.support.kernels import seen_as

import sfumato
from sfumato import api, catalog, device_trial
from sfumato.bench.subject import random_subject
from sfumato.ops import registry, torch_device
from sfumato.ops.device_check import mapped
from sfumato.ops.registry import ANY
from sfumato.ops.triton import self_test
from sfumato.ops.triton.self_test import KernelTwin

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    device_trial.try_device.cache_clear()
    monkeypatch.setattr(registry, "_replaced", {})


def test_every_faster_form_of_this_machine_agrees_with_its_reference() -> None:
    calls = device_trial._calls(catalog.EMBEDDED)
    assert {"attend", "attend_padded", "experts", "linear", "route"} < {
        call.operation for call in calls
    }
    assert device_trial.try_device(CPU, catalog.EMBEDDED) == {}


def test_a_model_on_a_device_with_a_wrong_operation_writes_the_right_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question: dict[str, Any] = {"prompt": "What is the capital of France?", "seed": 1}
    question["max_tokens"] = 16  # a wrong network ends no reply
    right = sfumato.load().generate(**question).text
    wrong = {("rotate", "cpu", ANY): [registry.Twin(lambda x, *_: x, _all, 0, _none, "")]}
    monkeypatch.setattr(registry, "_twins", wrong)
    assert sfumato.load().generate(**question).text != right
    monkeypatch.setattr(api, "has_twins", lambda device: False)
    tried: list[tuple[torch.device, Path]] = []
    monkeypatch.setattr(
        api, "try_device", lambda *of: tried.append(of) or device_trial.try_device(*of)
    )
    assert sfumato.load().generate(**question).text == right
    assert tried == [(CPU, catalog.EMBEDDED)]
    assert list(device_trial.try_device(*tried[0])) == ["rotate"]
    sfumato.load()  # a second model: nothing is tried again
    assert device_trial.try_device.cache_info().misses == 1


def test_a_kernel_that_is_wrong_within_layers_is_off_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stand-ins for kernels: one that is wrong with the model's weights alone, one that is right;
    and two that are wrong, of which neither alone explains it."""
    network = random_subject("tiny", "f32", layers=6, device="cpu").network
    wrong = {"after_layer": 1.05, "vocabulary_pass": 1.05}

    def twin(name: str) -> KernelTwin:
        def function(*given: Any) -> Any:
            result = registry.operations()[name].reference(*given)
            by = wrong.get(name, 1.0)
            return mapped(result, lambda x: x * by if x.is_floating_point() else x)

        return KernelTwin(name, function, lambda *_: True, lambda trial: None)

    monkeypatch.setattr("sfumato.ops.triton._twin", twin)
    for served, off in (
        (("after_layer", "rms_norm"), {"after_layer"}),
        (("linear", "vocabulary_pass"), {"vocabulary_pass"}),
        (("linear", "rms_norm"), set()),
        (("after_layer", "linear", "rms_norm"), {"after_layer", "linear", "rms_norm"}),
    ):
        caplog.clear()
        if len(served) == 3:
            wrong["linear"] = 1.02
        monkeypatch.setattr(self_test, "_failed", {})
        monkeypatch.setattr(self_test, "_passed", {CPU: frozenset(served)})
        with seen_as("cpu", "cuda"):
            device_trial.try_network(network)
        assert self_test.prepared(CPU) == set(served) - off
        failures = self_test.failures(CPU)
        assert failures.keys() == off and len(caplog.records) == len(off)
        assert all("layers are wrong with its kernels (Assertion" in w for w in failures.values())


def test_a_comparison_of_two_streams_that_ends_early_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor do numbers that are none on both."""
    is_off: dict[torch.device, str] = {}
    monkeypatch.setattr(torch_device, "one_stream", is_off)
    results: list[Any] = [(torch.zeros(2),), torch.OutOfMemoryError("for the second step")]
    monkeypatch.setattr(device_trial, "_step", Mock(side_effect=results))
    with pytest.raises(torch.OutOfMemoryError):
        device_trial._try_two_streams(Mock())
    wrong = (torch.tensor([1.0, float("nan")]),)
    monkeypatch.setattr(device_trial, "_step", Mock(return_value=wrong))
    device_trial._try_two_streams(Mock())
    assert not is_off


def test_a_search_for_a_wrong_kernel_that_ends_early_leaves_none_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = (torch.ones(2),), (torch.zeros(2),)
    results = [near, near, far, torch.OutOfMemoryError("while one is off")]
    monkeypatch.setattr(device_trial, "_step", Mock(side_effect=results))
    monkeypatch.setattr(device_trial, "Network", Mock())
    monkeypatch.setattr(self_test, "_passed", {CPU: frozenset(("linear", "route"))})
    with pytest.raises(torch.OutOfMemoryError):
        device_trial._switch_off_what_is_wrong(Mock(device=CPU))
    assert self_test.prepared(CPU) == {"linear", "route"}


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_layers_with_other_bits_on_two_streams_have_one(
    factor: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And no kernel is off for it."""
    network = random_subject("tiny", "f32", layers=2, device="cpu").network
    is_off: dict[torch.device, str] = {}
    twin = registry.Twin(
        lambda x, first, second: (first() * factor, second()),
        *(lambda x, *_: x.device not in is_off, 0, _none, ""),
    )
    monkeypatch.setattr(registry, "_twins", {("beside", "cuda", ANY): [twin]})
    monkeypatch.setattr(torch_device, "one_stream", is_off)
    monkeypatch.setattr(self_test, "_passed", {CPU: frozenset(("linear",))})
    with seen_as("cpu", "cuda"):
        for _ in range(2):  # another model is loaded: what was refused is tried no more
            device_trial.try_network(network)
            assert self_test.prepared(CPU) == {"linear"}
            assert is_off.keys() == ({CPU} if factor > 1 else set())
            assert len(caplog.records) == len(is_off)


def _all(*arguments: object) -> bool:
    return True


def _none(device: torch.device) -> str:
    return ""
