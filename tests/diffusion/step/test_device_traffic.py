"""A whole step leaves everything on the device but for one packed tensor, and takes as many
operations for eight rows as for one. Traced on a device that holds no numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.support.fake_device import DEVICE, HostTraffic, Trace, fake_device, fake_network
from tests.support.oracle import tiny_config
from torch import Tensor

from sfumato import ops
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.processors import LogitBias
from sfumato.diffusion.sampler import EntropyBound, FixedCount, StepView, Threshold
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.diffusion.step import Denoiser, denoise, rules
from sfumato.diffusion.stopping import Never, StableAndConfident
from sfumato.model.families.diffusion_gemma.config_json import config_from_hf

CONFIG = config_from_hf(tiny_config(canvas_length=32).to_dict())
OPERATIONS = ("attend", "canvas_attention", "embed", "experts", "linear", "own_scores")


class Stalled:
    """A third party's rule: pure tensor operations."""

    history = 2

    def done(self, view: StepView) -> Tensor:
        return (view.history == view.stats.argmax).float().mean(dim=(-1, -2)) > 0.9


class Step:
    """One step of canvases with these choices, laid out beforehand as from the second step on."""

    def __init__(self, choices: Sequence[dict[str, Any]]) -> None:
        network = fake_network(CONFIG)
        self.slots = network.new_slots(len(choices), 64)
        with torch.device("cpu"):
            configs = [SamplerConfig(**{"canvas_length": 32} | c).over(REFERENCE) for c in choices]
            self.canvases = [
                Canvas(config, Noise(i, 0), CONFIG.vocab_size, DEVICE, pinned={3: 5} if i else None)
                for i, config in enumerate(configs)
            ]
            for canvas in self.canvases:
                canvas.step = 1
            self.denoiser = Denoiser(network, len(choices))
            self.denoiser._lay_out(self.canvases, self.slots)

    def __call__(self) -> Tensor:
        words, errors = denoise.move(self.denoiser.forward(self.canvases, self.slots))
        assert not any(errors), errors
        return words


def traced(choices: Sequence[dict[str, Any]]) -> Trace:
    with fake_device():
        step = Step(choices)
        with Trace() as trace:
            assert step().device == DEVICE
    return trace


BANS = (LogitBias({4: float("-inf"), 9: float("-inf")}),)
MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "processors": BANS},
    {"sampler": FixedCount(4), "max_steps": 7},
    {"sampler": Threshold(0.8), "stopping": Never()},
    {"self_conditioning": False, "canvas_length": 20},
    {"canvas_length": 16},
    {"canvas_length": 5, "processors": BANS},
    {"stopping": Stalled()},
]


def test_a_step_of_rows_of_every_kind_stays_on_the_device() -> None:
    """Pins, bans, widths, samplers, histories: all that is no group of its own."""
    traced(MIXED)


def test_built_in_rules_are_lifted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a group by one call, and none by itself."""
    monkeypatch.setattr(rules, "_row", None)
    samplers = EntropyBound(), FixedCount(4), Threshold(0.8)
    pairs: list[dict[str, Any]] = [{"sampler": sampler} for sampler in samplers] * 2
    pairs += [{"stopping": Never()}, {"stopping": StableAndConfident(2)}] * 2
    with fake_device():
        step = Step(pairs)
        with Trace():
            step()
    assert step.denoiser._layout
    (part,) = step.denoiser._layout[1].parts
    assert [(len(group.rows), group.lifted) for group in part.groups] == [(2, True)] * 5


def test_eight_rows_take_the_operations_of_one(note: Callable[[str], None]) -> None:
    one, eight = traced([{}]).count, traced([{}] * 8).count
    note(f"tensor operations of a step: {one} for a row, {eight} for 8")
    assert eight <= 1.1 * one


def test_calls_of_ops_do_not_depend_on_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        serve = getattr(ops, name)

        def call(*inputs: Any, **options: Any) -> Any:
            calls[name] += 1
            return serve(*inputs, **options)

        return call

    for name in OPERATIONS:
        monkeypatch.setattr(ops, name, counting(name))
    counts = []
    for rows in (1, 8):
        calls.clear()
        traced([{}] * rows)
        counts.append(dict(calls))
    assert counts[0] == counts[1] and counts[0]["canvas_attention"] == len(CONFIG.layers)


PLANTED: dict[str, Callable[[Tensor], object]] = {
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "from the host": lambda x: x + torch.ones(3, device="cpu").to(x.device).sum(),
}


# Every part of a step once, and every kind of wait once or more: that a kind is seen depends on
# the operation, and that a part is seen on its running inside the trace, so pairs prove no more.
PLANTED_IN = {
    "draw": "cpu",
    "hidden_states": "tolist",
    "score_rows": "nonzero",
    "change": "from the host",
    "write": "tolist",
    "pack": "cpu",
}


def test_what_waits_for_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every part of a step. One network serves all cases, and its plain step is refused nowhere:
    neither before nor after them."""
    assert set(PLANTED_IN.values()) == set(PLANTED)
    with fake_device():
        step = Step([{}])
        with Trace():
            step()
        for place, name in PLANTED_IN.items():
            serve = getattr(denoise, place)

            def planted(*inputs: Any, name: str = name, serve: Any = serve) -> Any:
                PLANTED[name](torch.zeros(4, dtype=torch.int64))
                return serve(*inputs)

            with monkeypatch.context() as patch, Trace():
                patch.setattr(denoise, place, planted)
                with pytest.raises(HostTraffic):
                    step()
        with Trace():
            step()


@pytest.mark.parametrize("name", ["cpu", "tolist", "nonzero"])
def test_a_rule_that_waits_for_the_device_is_found(name: str) -> None:
    class Reads:
        def done(self, view: StepView) -> Tensor:
            PLANTED[name](view.stats.argmax)
            return view.step > 3

    with pytest.raises(AssertionError):
        traced([{"stopping": Reads()}])
