"""Rules of one row on many rows: lifted where they can be, and each row's own fault where not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tests.diffusion.tiny import calm_oracle
from tests.support.oracle import network_of
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import (
    SAMPLERS,
    EntropyBound,
    FixedCount,
    Never,
    StableAndConfident,
    StepView,
    Threshold,
)
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.rules import RuleGroup
from sfumato.model.cache import Slot
from sfumato.model.network import Network

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network() -> Network:
    return network_of(calm_oracle())


def prepared(
    network: Network, rules: list[dict[str, Any]]
) -> tuple[Denoiser, list[Canvas], list[Slot]]:
    """A row for each of the rules, all in one batch."""
    canvases, slots = [], []
    for seed, rule in enumerate(rules):
        config = SamplerConfig(**({"max_steps": 9, "canvas_length": 8} | rule)).over(REFERENCE)
        canvases.append(Canvas(config, Noise(seed, 0), 97, CPU, pinned={2: 7} if seed % 2 else {}))
        slots.append(network.new_slot(16))
        network.encode([torch.arange(3 + seed)], slots[-1:])
    return Denoiser(network, len(rules)), canvases, slots


def groups_of(denoiser: Denoiser) -> list[RuleGroup]:
    """Those of the last step."""
    assert denoiser._layout
    return [group for part in denoiser._layout[1].parts for group in part.rules.groups]


def run(network: Network, rules: list[dict[str, Any]], count: int = 3) -> list[list[Any]]:
    """The results of some steps."""
    denoiser, canvases, slots = prepared(network, rules)
    steps = [denoiser.advance(denoiser.forward(canvases, slots)) for _ in range(count)]
    return [list(row) for row in zip(*steps, strict=True)]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        torch.equal(getattr(a, name), getattr(b, name))
        for a, b in zip(one, other, strict=True)
        for name in ("token_ids", "accepted", "entropy")
    )


class Reads:
    """Branches on a value."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def accept(self, view: StepView) -> Tensor:
        self.seen.append(view.tokens.ndim)
        if view.stats.entropy.mean() > 0.5:
            return view.stats.entropy < 0.5
        return view.stats.entropy < view.stats.entropy.max().item()


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_lifted_rule_gives_what_it_gives_alone(network: Network, name: str) -> None:
    rule: dict[str, Any] = {"sampler": SAMPLERS[name](), "stopping": Never()}
    together = run(network, [rule] * 4)
    others: list[dict[str, Any]] = [
        {"temperature": 2.0, "stopping": Never(), "canvas_length": 5}
    ] * 4
    for seed, drafts in enumerate(together):
        mixed = list(others)
        mixed[seed] = rule
        assert same(drafts, run(network, mixed)[seed])


def test_a_lifted_rule_is_called_once_for_its_rows(network: Network) -> None:
    calls = []

    class Counts:
        def done(self, view: StepView) -> Tensor:
            assert (view.tokens.shape, view.step.shape, view.max_steps) == ((8,), (), 9)
            calls.append(1)
            return view.step == 2

    rule: dict[str, Any] = {"stopping": Counts()}
    drafts = run(network, [rule] * 5, count=2)
    assert len(calls) == 1 + 2  # tried once, before it meets a step
    assert all(row[1].step == 2 for row in drafts)


BUILT_IN: list[dict[str, Any]] = [
    *({"sampler": sampler(), "stopping": Never()} for sampler in SAMPLERS.values()),
    {"stopping": StableAndConfident()},
]


@pytest.mark.parametrize("rule", BUILT_IN, ids=str)
def test_built_in_rules_are_lifted(network: Network, rule: dict[str, Any]) -> None:
    denoiser, canvases, slots = prepared(network, [rule] * 2)
    denoiser.forward(canvases, slots)
    (group,) = groups_of(denoiser)
    assert group.lifted is True


SETTINGS: list[dict[str, Any]] = [
    *({"sampler": EntropyBound(bound)} for bound in (0, 0.05, 0.3)),
    *({"sampler": FixedCount(count)} for count in (1, 3, 10**6)),
    *({"sampler": Threshold(top, 0.1 * top)} for top in (0.1, 0.3, 1)),
    *({"stopping": StableAndConfident(*both)} for both in ((0, 9.0), (0, 0.01), (1, 9))),
]


OTHER: dict[str, Any] = {"canvas_length": 3, "stopping": Never()}


def test_built_in_rules_of_one_kind_are_one_group(network: Network) -> None:
    """Whatever their settings and the number of steps; each row as with its equals alone."""
    calm = {"sampler": EntropyBound(0.1), "stopping": Never()}
    rules = [calm | rule | {"max_steps": 4 + i % 3} for i, rule in enumerate(SETTINGS)]
    denoiser, canvases, slots = prepared(network, rules)
    steps = [denoiser.advance(denoiser.forward(canvases, slots)) for _ in range(4)]
    groups = groups_of(denoiser)
    assert sorted((len(group.rows), group.lifted) for group in groups) == [(3, True)] * 4
    assert len(denoiser._probe._results) == 5  # each kind was tried once
    for number in range(3):  # one of each kind: groups of one, which are not lifted
        alone = [rule if i % 3 == number else OTHER for i, rule in enumerate(rules)]
        for row, results in list(enumerate(run(network, alone, count=4)))[number::3]:
            drafts = [step[row] for step in steps if isinstance(step[row], Draft)]
            assert same(drafts, [result for result in results if isinstance(result, Draft)])
    confident, unsure, unstable = (canvas.step for canvas in canvases[-3:])
    assert confident == 1 and unsure == 4 and unstable > 1


class ShortOfMemory:
    """A rule in whose next call memory runs out."""

    def __init__(self, error: Exception, reads: bool = False) -> None:
        self.error, self.reads, self.fails = error, reads, False

    def accept(self, view: StepView) -> Tensor:
        if self.reads:
            view.stats.entropy.max().item()
        if self.fails:
            self.fails = False
            raise self.error
        return view.stats.entropy < 0.5


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("x"), MemoryError(), RuntimeError("can't allocate memory")]
)
def test_memory_that_runs_out_is_no_fault_of_a_rule(
    network: Network, error: Exception, reads: bool
) -> None:
    """The step raises it and may be run again; rules stay lifted."""
    rule: dict[str, Any] = {"sampler": ShortOfMemory(error, reads), "stopping": Never()}
    calm = run(network, [rule] * 3, count=1)
    denoiser, canvases, slots = prepared(network, [rule] * 3)
    findings = denoiser.forward(canvases, slots)
    rule["sampler"].fails = True
    with pytest.raises(type(error)):
        denoiser.advance(findings)
    again = denoiser.advance(denoiser.forward(canvases, slots))
    assert all(same(a, [b]) for a, b in zip(calm, again, strict=True))
    assert [group.lifted for group in groups_of(denoiser)] == [not reads]


def test_a_probe_that_runs_out_of_memory_is_no_answer(network: Network) -> None:
    sampler = ShortOfMemory(MemoryError())
    sampler.fails = True
    denoiser, canvases, slots = prepared(network, [{"sampler": sampler}] * 2)
    with pytest.raises(MemoryError):
        denoiser.forward(canvases, slots)
    denoiser.forward(canvases, slots)
    assert [group.lifted for group in groups_of(denoiser)] == [True]


def test_a_row_with_more_statistics_leaves_the_others_lifted(network: Network) -> None:
    shapes = []

    class Notes:
        def accept(self, view: StepView) -> Tensor:
            shapes.append(view.stats.top_ids.shape[-1])
            return view.stats.entropy < 0.5

    rule: dict[str, Any] = {"sampler": Notes(), "stopping": Never()}
    plain = run(network, [rule] * 4, count=1)
    shapes.clear()
    mixed = run(network, [rule, rule | {"top_tokens": 12}, rule, rule], count=1)
    assert shapes == [8, 8, 12]  # the probe, all rows, the one row
    assert all(same(a, b) for a, b in zip(plain, mixed, strict=True))


def test_what_cannot_be_lifted_runs_row_by_row_and_says_so_once(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    rule: dict[str, Any] = {"sampler": Reads(seen), "stopping": Never()}
    denoiser, canvases, slots = prepared(network, [rule] * 3)
    with caplog.at_level(logging.WARNING):
        steps = [denoiser.advance(denoiser.forward(canvases, slots)) for _ in range(3)]
        denoiser.forward(canvases[1:], slots[1:])  # a row has left
    together = [list(row) for row in zip(*steps, strict=True)]
    assert [group.lifted for group in groups_of(denoiser)] == [False]
    (record,) = [r for r in caplog.records if "row by row" in r.message]
    assert record.message.startswith("Reads cannot run on several rows at once")
    assert set(seen) == {1}
    for seed, drafts in enumerate(together):
        rules: list[dict[str, Any]] = [{"stopping": Never(), "canvas_length": 3}] * 3
        assert same(drafts, run(network, [*rules[:seed], rule, *rules[seed + 1 :]])[seed])


def test_what_a_rule_raises_ends_its_row_alone(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails:
        def accept(self, view: StepView) -> Tensor:
            raise RuntimeError("no such luck")

    class Odd:
        def accept(self, view: StepView) -> Any:
            return view.stats.entropy

    class Picky:
        """Fails on a row's values."""

        def accept(self, view: StepView) -> Tensor:
            if bool(view.pinned.any()):
                raise ValueError("pinned")
            return view.stats.entropy < 1

    plain: dict[str, Any] = {"stopping": Never()}
    rules = [plain, *[{"sampler": s} for s in (Fails(), Odd())], plain, {"sampler": (p := Picky())}]
    rows = run(network, [*rules, {"sampler": p}], count=1)
    assert [type(row[0]).__name__ for row in rows] == [
        "Draft", "RuntimeError", "ValueError", "Draft", "Draft", "ValueError",
    ]  # fmt: skip
    assert str(rows[2][0]) == "sampler Odd: accept must return bool [8], got float32 [8]"
    assert str(rows[5][0]) == "pinned"
    alone = run(network, [plain, *[{"canvas_length": 3}] * 2, plain], count=1)
    assert same(rows[0], alone[0]) and same(rows[3], alone[3])
    assert isinstance(rows[4][0], Draft)
