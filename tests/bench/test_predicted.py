"""What the model of the step says of a benchmark's subject."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sfumato.bench.step_cost import (
    LIMITS,
    StepShape,
    beside_measured,
    held_bytes,
    network_bytes,
    step_costs,
    step_time,
    stored_bytes,
    to_document,
)
from sfumato.bench.subject import Subject, random_checkpoint, random_subject
from sfumato.model.network import Network


def test_codes_are_held_as_they_are_stored() -> None:
    tensors = random_checkpoint("tiny", "fp8").tensors
    assert any(info.format == "FP8" for info in tensors.values())
    assert held_bytes(tensors) == {name: info.nbytes for name, info in tensors.items()}


def test_a_networks_bytes_are_those_of_its_tensors(tiny: Subject) -> None:
    """Quantized ones too, which are no parameters of their modules."""
    assert network_bytes(tiny.network) == stored_bytes(tiny.network.config, "f32")
    quantized = random_subject("tiny", "q8_0", layers=1, device="cpu").network
    stored = network_bytes(quantized)
    assert stored.keys() == random_checkpoint("tiny", "q8_0", 1).tensors.keys()
    name = "layers.0.experts.down_proj"
    assert stored[name] < network_bytes(tiny.network)[name] / 2


def test_only_known_devices_have_a_prediction(
    tiny: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = StepShape(2, 32, 40)
    assert beside_measured(tiny.network, shape) == {}
    on_gpu: Any = SimpleNamespace(
        device=torch.device("cuda"),
        config=tiny.network.config,
        transformer=tiny.network.transformer,
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    values = beside_measured(cast(Network, on_gpu), shape)
    assert 0 < values["step_floor_ms"][0] < values["step_predicted_ms"][0]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Toaster")
    assert beside_measured(cast(Network, on_gpu), shape) == {}


def test_the_document_says_whether_the_weights_fit(tiny: Subject) -> None:
    config = tiny.network.config
    shapes = [StepShape(rows, 32, 40) for rows in (1, 4)]
    costs = [(shape, step_costs(config, shape, stored_bytes(config))) for shape in shapes]
    steps = [(shape, step_time(kernels, LIMITS["l4"])) for shape, kernels in costs]
    document = to_document(steps, 10**9)
    assert (document["device"], document["fits"], document["measured_limits"]) == ("l4", True, 0)
    assert [step["rows"] for step in document["steps"]] == [1, 4]
    assert sum(k["floor_ms"] for k in document["steps"][0]["kernels"]) == pytest.approx(
        document["steps"][0]["floor_ms"]
    )
    assert not to_document(steps, 10**12)["fits"]


def test_random_weights_are_made_where_they_are_wanted() -> None:
    """The "meta" device has no numbers, and needs no memory."""
    checkpoint = random_checkpoint("26b-a4b", "bf16", 1, device=torch.device("meta"))
    made = checkpoint.read("layers.0.experts.gate_up_proj")
    assert made.device.type == "meta" and made.shape == (128, 1408, 2816)
