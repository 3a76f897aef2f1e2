"""The launches of a step, against those that one makes where nothing is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from tests.support.kernels import interpreted, seen_as
from tests.support.recorded_graphs import RepeatedCalls
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sfumato.bench.step_cost import StepShape, step_costs, stored_bytes
from sfumato.bench.subject import random_config
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.captured import DeviceStep, ReadForward
from sfumato.model.cache import QuestionPool
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.network import Network
from sfumato.model.transformer import Transformer
from sfumato.ops.triton import OPERATIONS, operands, self_test
from sfumato.ops.triton.kernel import MODULES, Kernel

pytestmark = interpreted

VIEWS = ("empty", "_unsafe_view", "detach", "arange.start")


class _Operations(TorchDispatchMode):
    """Counts operations that would be kernels: those that give no view and no memory alone."""

    def __init__(self, counter: Counter[str]) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        results = function._schema.returns
        view = any(each.alias_info and not each.alias_info.is_write for each in results)
        named = any(name in str(function) for name in VIEWS)
        if isinstance(out, Tensor) and not view and not named:
            self._counter[str(function)] += 1
        return out


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts launches of kernels, in place of them."""
    counter: Counter[str] = Counter()

    def launch(kernel: Kernel, *_: Any, **__: Any) -> None:
        counter[kernel.name] += 1

    for name in MODULES:
        module = import_module(f"sfumato.ops.triton.{name}")
        if hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(operands, "interpreting", lambda: False)  # so that they take bfloat16
    everything = frozenset(OPERATIONS)
    monkeypatch.setattr(self_test, "_passed", {torch.device("cpu"): everything})
    with seen_as("cpu", "cuda"):
        yield counter


def tiny_network() -> Network:
    config = DIFFUSION_GEMMA.config.from_hf(random_config("tiny"), {})
    transformer = Transformer(config).to(torch.bfloat16).requires_grad_(False)
    kinds = torch.bfloat16, torch.bfloat16
    return Network(transformer, torch.device("cpu"), *kinds, None)


@pytest.mark.parametrize(("rows", "slots"), [(1, 1), (1, 3), (3, 3)])
def test_the_launches_are_those_of_a_real_step(
    rows: int, slots: int, monkeypatch: pytest.MonkeyPatch, launched: Counter[str]
) -> None:
    """Of an engine with one slot, and with more."""
    network = tiny_network()
    config = network.config
    own = network.new_slots(slots, 64)[:rows]
    vocab = config.vocab_size
    rules = replace(REFERENCE, canvas_length=config.canvas_length)
    canvases = [Canvas(rules, Noise(seed, 0), vocab, network.device) for seed in range(rows)]
    run = DeviceStep.run

    def counted_run(step: DeviceStep) -> None:
        run(step)
        launched.clear()
        with _Operations(launched):
            run(step)

    monkeypatch.setattr(DeviceStep, "run", counted_run)
    Denoiser(network, slots, RepeatedCalls()).launch(canvases, own)
    width = config.canvas_length
    costs = step_costs(config, StepShape(rows, width, 0), stored_bytes(config))
    assert launched.total() == sum(cost.launches for cost in costs), launched


@pytest.mark.parametrize("rows", [1, 3])
def test_the_launches_are_those_of_real_reads(rows: int, launched: Counter[str]) -> None:
    network = tiny_network()
    config, width = network.config, 16
    (slot,) = network.new_slots(1, 64)
    pool = QuestionPool(config, 64, 64, torch.bfloat16, network.device)
    shape = 64, config.hidden_size
    shared = tuple(torch.zeros(shape, dtype=network.dtype, device=network.device) for _ in "sh")
    forward = ReadForward(network, slot.pool, pool, rows, width, frozenset(), shared)
    forward.run()
    launched.clear()
    with _Operations(launched):
        forward.run()
    costs = step_costs(config, StepShape(rows, width, 0, reads=True), stored_bytes(config))
    assert launched.total() == sum(cost.launches for cost in costs), launched
