"""The trial of a device that has no kernels of ours, with a CPU in its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sfumato
from sfumato import api, device_trial
from sfumato.ops import registry
from sfumato.ops.registry import ANY

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_trial, "_tried", {})
    monkeypatch.setattr(registry, "_replaced", {})


def test_every_faster_form_of_this_machine_agrees_with_its_reference() -> None:
    calls = device_trial._calls(api.EMBEDDED)
    assert {"attend", "attend_padded", "experts", "linear", "route"} < {
        call.operation for call in calls
    }
    assert device_trial.try_device(CPU, api.EMBEDDED) == {}


def test_a_model_on_a_device_with_a_wrong_operation_writes_the_right_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question = "What is the capital of France?"
    right = sfumato.load().generate(question, seed=1).text
    wrong = {("rotate", "cpu", ANY): [registry.Twin(lambda x, *_: x, _all, 0, _none, "")]}
    monkeypatch.setattr(registry, "_twins", wrong)
    assert sfumato.load().generate(question, seed=1).text != right
    monkeypatch.setattr(api, "has_twins", lambda device: False)
    tried: list[tuple[torch.device, Path]] = []
    monkeypatch.setattr(
        api, "try_device", lambda *of: tried.append(of) or device_trial.try_device(*of)
    )
    assert sfumato.load().generate(question, seed=1).text == right
    assert tried == [(CPU, api.EMBEDDED)] and list(device_trial._tried["cpu"]) == ["rotate"]
    sfumato.load()  # a second model: nothing is tried again
    assert len(device_trial._tried) == 1


def _all(*arguments: object) -> bool:
    return True


def _none(device: torch.device) -> str:
    return ""
