"""A whole step leaves everything on the device but for one copy to the host, and takes as many
operations for eight rows as for one. Traced on a device that holds no numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.counted_calls import counted_calls
from tests.support.fake_device import DEVICE, HostTraffic, Trace, fake_device, fake_network
from tests.support.oracle import tiny_config
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, CanvasPlan
from sfumato.diffusion.limits import of_process
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import (
    EntropyBound,
    FixedCount,
    LinearPace,
    LogitBias,
    LowConfidence,
    Never,
    Sequential,
    StableAndConfident,
    StepView,
    Threshold,
)
from sfumato.diffusion.sampler_config import MASKS, REFERENCE, SamplerConfig
from sfumato.diffusion.step import Denoiser, rules
from sfumato.diffusion.step import step as parts
from sfumato.diffusion.step.denoiser import Pending
from sfumato.diffusion.step.step import row_words
from sfumato.model.families.diffusion_gemma.config import config_from_hf
from sfumato.ops.online_softmax import TOP

CONFIG = config_from_hf(tiny_config(canvas_length=32).to_dict())


class Event:
    """One of a device that this build of torch may not know."""

    def __init__(self, device: torch.device) -> None:
        assert device == DEVICE
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        raise AssertionError("the host waits")


@pytest.fixture(autouse=True)
def event(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "Event", Event)
        yield


class Stalled:
    """A third party's rule: pure tensor operations."""

    history = 2

    def done(self, view: StepView) -> Tensor:
        return (view.history == view.stats.argmax).float().mean(dim=(-1, -2)) > 0.9


class Step:
    """One step of canvases with these choices, laid out beforehand as from the second step on.
    step: how many the host knows to be done; mask: the token that is the noise."""

    def __init__(
        self, choices: Sequence[dict[str, Any]], step: int = 0, mask: int | None = None
    ) -> None:
        network = fake_network(replace(CONFIG, mask_id=mask))
        defaults = REFERENCE if mask is None else MASKS
        self.slots = network.new_slots(len(choices), 64)
        with torch.device("cpu"):
            configs = [SamplerConfig(**{"canvas_length": 32} | c).over(defaults) for c in choices]
            plans = [
                CanvasPlan(of_process(config, mask), Noise(i, 0), pinned={3: 5} if i else {})
                for i, config in enumerate(configs)
            ]
            self.canvases = [Canvas.of(plan, network) for plan in plans]
            for canvas in self.canvases:
                canvas.step = step
            self.denoiser = Denoiser(network, len(choices))
            self.denoiser._lay_out(self.canvases, self.slots)

    def __call__(self) -> Pending:
        pending = self.denoiser.apply(self.denoiser.forward(self.canvases, self.slots))
        if pending.failure is not None:  # of what failed after the writing began
            raise pending.failure
        return pending


def traced(choices: Sequence[dict[str, Any]], step: int = 0, mask: int | None = None) -> int:
    """The operations of a step; it copies once to the host, when its forward is done."""
    with fake_device():
        prepared = Step(choices, step, mask)
        with Trace() as forward:
            result = prepared.denoiser.forward(prepared.canvases, prepared.slots)
        with Trace(copies=1) as write:
            pending = prepared.denoiser.apply(result)
    assert pending.failure is None and not any(pending.errors), pending.errors
    assert write.copies == 1 and isinstance(pending.copied, Event) and pending.copied.recorded
    assert pending.words.device.type == "cpu" and not pending.extra
    words = sum(rows * row_words(width, TOP) for rows, width in pending.shapes)
    assert pending.words.shape == (words,)
    return forward.count + write.count


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
    """Pins, bans, widths, samplers, histories: all that is no group of its own. The first step is
    as any other."""
    assert traced(MIXED, 0) == traced(MIXED, 1)


def test_a_step_of_mask_tokens_stays_on_the_device() -> None:
    """And takes as many operations for rows of other settings as for one."""
    mixed: list[dict[str, Any]] = [
        {"sampler": LowConfidence(0.2), "max_steps": 3, "canvas_length": 20},
        {"sampler": Sequential(), "pace": LinearPace(), "temperature": 0.0},
        {"sampler": EntropyBound(), "canvas_length": 16},
        {"sampler": FixedCount(4), "stopping": StableAndConfident()},
    ]
    assert traced(mixed, 0, 6) == traced(mixed, 1, 6)
    settings = [{"sampler": LowConfidence(0.1 * i), "max_steps": 8 + i} for i in range(8)]
    assert traced(settings, mask=6) <= traced([{}], mask=6) + 1


def test_built_in_rules_are_lifted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a group by one call, and none by itself."""
    monkeypatch.setattr(rules, "_row", None)
    samplers = EntropyBound(), FixedCount(4), Threshold(0.8)
    pairs: list[dict[str, Any]] = [{"sampler": sampler} for sampler in samplers] * 2
    pairs += [{"stopping": Never()}, {"stopping": StableAndConfident(2)}] * 2
    with fake_device():
        step = Step(pairs)
        with Trace(copies=1):
            step()
    assert step.denoiser._layout
    (part,) = step.denoiser._layout[1].parts
    groups = [(len(group.rows), group.lifted) for group in part.rules.groups]
    assert groups == [(4, True), *[(2, True)] * 3]  # two settings of a rule are one group


def test_eight_rows_take_the_operations_of_one(note: Callable[[str], None]) -> None:
    """Whether their settings are the same or not."""
    settings: list[dict[str, Any]] = [
        {
            "sampler": EntropyBound(0.1 * i),
            "stopping": StableAndConfident(i, 0.01 + i),
            "max_steps": 8 + i,
            "temperature": 0.5 * i,
        }
        for i in range(8)
    ]
    one, eight, different = traced([{}]), traced([{}] * 8), traced(settings)
    note(f"tensor operations of a step: {one} for a row, {eight} for 8, {different} with settings")
    assert max(eight, different) <= 1.1 * one


def test_calls_of_ops_do_not_depend_on_the_rows() -> None:
    """Of any operation that is registered, or will be."""
    counts = []
    for rows in (1, 8):
        with counted_calls() as calls:
            traced([{}] * rows)
        counts.append(dict(calls))
    assert counts[0] == counts[1] and counts[0]["attend_padded"] == len(CONFIG.layers)


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
    "forward": "tolist",
    "score": "nonzero",
    "update": "from the host",
    "apply_update": "tolist",
    "pack": "cpu",
}


def test_what_waits_for_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every part of a step. One network serves all cases, and its plain step is refused nowhere:
    neither before nor after them."""
    assert set(PLANTED_IN.values()) == set(PLANTED)
    with fake_device():
        step = Step([{}])
        with Trace(copies=1):
            step()
        for place, name in PLANTED_IN.items():
            serve = getattr(parts, place)

            def planted(*inputs: Any, name: str = name, serve: Any = serve) -> Any:
                PLANTED[name](torch.zeros(4, dtype=torch.int64))
                return serve(*inputs)

            with monkeypatch.context() as patch, Trace(copies=1):
                patch.setattr(parts, place, planted)
                with pytest.raises(HostTraffic):
                    step()
        with Trace(copies=1):
            step()


@pytest.mark.parametrize("name", ["cpu", "tolist", "nonzero"])
def test_a_rule_that_waits_for_the_device_is_found(name: str) -> None:
    class Reads:
        def done(self, view: StepView) -> Tensor:
            PLANTED[name](view.stats.argmax)
            return view.step > 3

    with pytest.raises(AssertionError):
        traced([{"stopping": Reads()}])
