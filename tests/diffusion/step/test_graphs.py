"""A captured step gives what it gives operation by operation, whatever joins or leaves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.diffusion.tiny import calm_oracle
from tests.support.fake_device import DEVICE, Trace, fake_device, fake_network
from tests.support.oracle import network_of, tiny_config
from tests.support.recorded_graphs import RecordedGraphs
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import (
    EntropyBound,
    FixedCount,
    LogitBias,
    Never,
    StableAndConfident,
    StepView,
    Threshold,
)
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.batch import Commit
from sfumato.diffusion.step.captured import DeviceStep, StepKind
from sfumato.diffusion.step.graphs import STEPS, StepGraphs
from sfumato.model.cache import Slot
from sfumato.model.families.diffusion_gemma.config import config_from_hf
from sfumato.model.network import Network
from sfumato.ops import registry

BANS = (LogitBias({4: float("-inf"), 9: float("-inf")}),)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network() -> Network:
    return network_of(calm_oracle())


@pytest.fixture(autouse=True)
def pure_tensor_operations() -> Iterator[None]:
    """On a CPU the twins read numbers on the host."""
    with registry.reference_only():
        yield


@pytest.fixture(autouse=True)
def captured_after_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.diffusion.step.graphs.RUNS", 1)


class Calm:
    """A third party's rule: pure tensor operations."""

    def done(self, view: StepView) -> Tensor:
        return view.stats.entropy.mean() < 0.01


class Half:
    """A third party's rule: pure tensor operations."""

    def accept(self, view: StepView) -> Tensor:
        return view.stats.entropy <= view.stats.entropy.mean()


class Reads:
    """A third party's rule that reads a number on the host."""

    def accept(self, view: StepView) -> Tensor:
        return view.stats.entropy < view.stats.entropy.max().item()


HALF = Half()


def config(**choices: Any) -> SamplerConfig:
    return SamplerConfig(**({"max_steps": 6, "canvas_length": 8} | choices)).over(REFERENCE)


def rows(network: Network, choices: list[dict[str, Any]]) -> tuple[list[Canvas], list[Slot]]:
    slots = network.new_slots(len(choices), 64)
    network.encode([torch.arange(3 + i) % 97 for i in range(len(choices))], slots)
    canvases = [
        Canvas(config(**choice), Noise(i, i), 97, CPU, pinned={2: 7} if i % 2 else {})
        for i, choice in enumerate(choices)
    ]
    return canvases, slots


def assert_same(one: Any, other: Any) -> None:
    assert isinstance(one, Draft) and isinstance(other, Draft)
    assert one.step == other.step and torch.equal(one.token_ids, other.token_ids)
    assert torch.equal(one.accepted, other.accepted)
    torch.testing.assert_close(one.entropy, other.entropy, rtol=1e-4, atol=1e-5)


KINDS: dict[str, list[dict[str, Any]]] = {
    "one row": [{}],
    "settings": [{"sampler": EntropyBound(0.1 * i), "max_steps": 4 + i} for i in range(3)],
    "rules": [
        {"sampler": FixedCount(2)},
        {"sampler": Threshold(0.4), "stopping": Never(), "temperature": 0.0},
        {"stopping": StableAndConfident(2), "self_conditioning": False},
    ],
    "bans and a short canvas": [{"processors": BANS}, {"canvas_length": 5}],
    "a third party's rule": [{"stopping": Calm()}, {}],
    "built-in rules beside a third party's": [
        {"sampler": HALF, "stopping": StableAndConfident(1, 50.0)},
        {"sampler": HALF, "stopping": StableAndConfident(3, 50.0)},
        {"sampler": HALF, "stopping": Never()},
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_is_the_step(network: Network, kind: str) -> None:
    choices = KINDS[kind]
    (plain, slots), (captured, same_slots) = rows(network, choices), rows(network, choices)
    backend = RecordedGraphs()
    eager, graphs = Denoiser(network, 4), Denoiser(network, 4, backend)
    assert graphs.graphs
    while not all(canvas.done for canvas in plain):
        live = [i for i, canvas in enumerate(plain) if not canvas.done]
        expected = eager.step([plain[i] for i in live], [slots[i] for i in live])
        pending = graphs.launch([captured[i] for i in live], [same_slots[i] for i in live])
        graphs.graphs.capture_next()
        for one, other in zip(expected, pending.results(), strict=True):
            assert_same(other, one)
    assert [canvas.convergence for canvas in plain] == [c.convergence for c in captured]
    assert backend.captures >= 1 and backend.replays >= 2


def test_one_graph_serves_other_rows_and_settings(network: Network) -> None:
    """Rows that join by index, with other lengths, seeds, samplers' settings and slots."""
    stopping = Never(), StableAndConfident(9)
    choices = [{"sampler": EntropyBound(0.05 * i), "stopping": stopping[i % 2]} for i in range(5)]
    canvases, slots = rows(network, choices)
    plain, same_slots = rows(network, choices)
    backend = RecordedGraphs()
    eager, graphs = Denoiser(network, 4), Denoiser(network, 4, backend)
    assert graphs.graphs
    for members in ([0, 1], [1, 0], [3, 1], [2, 4], [4, 0]):
        pending = graphs.launch([canvases[i] for i in members], [slots[i] for i in members])
        expected = eager.step([plain[i] for i in members], [same_slots[i] for i in members])
        for one, other in zip(pending.results(), expected, strict=True):
            assert_same(one, other)
        graphs.graphs.capture_next()
    assert (backend.captures, backend.replays) == (1, 4)


def test_a_commit_is_a_row_of_the_step(network: Network) -> None:
    """It stores what an encode stores, and the row beside it is denoised: captured or not."""
    for capture in (False, True):
        (canvas, *_), slots = rows(network, [{"stopping": Never()}] * 2)
        (alone, *_), others = rows(network, [{"stopping": Never()}] * 2)
        backend = RecordedGraphs()
        graphs, eager = Denoiser(network, 2, backend), Denoiser(network, 2)
        assert graphs.graphs
        for ids in ([5, 6, 7, 8, 9], list(range(20, 28))):
            commit = Commit(ids, config(), network)
            denoised, committed = graphs.launch([canvas, commit], slots).results()
            slots[1].advance(len(ids))
            assert committed is None
            assert_same(denoised, eager.step([alone], others[:1])[0])
            network.encode([torch.tensor(ids)], others[1:])
            if capture:
                graphs.graphs.capture_next()
        assert (backend.captures, backend.replays) == ((1, 1) if capture else (0, 0))
        for layer in range(len(network.config.layers)):
            for one, other in zip(slots[1].read(layer), others[1].read(layer), strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"top_k": 4}, "a row changes its scores"),
        ({"sampler": Reads()}, "Reads reads numbers on the host"),
        ({"stopping": Calm(), "canvas_length": 5}, "Calm meets a canvas that is shorter"),
    ],
)
def test_of_what_no_graph_can_hold_the_forward_is_captured(
    network: Network, choice: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    canvases, slots = rows(network, [choice, {}])
    plain, others = rows(network, [choice, {}])
    backend = RecordedGraphs()
    graphs, eager = Denoiser(network, 2, backend), Denoiser(network, 2)
    with caplog.at_level(logging.INFO, "sfumato.diffusion.step.denoiser"):
        for _ in range(3):
            for one, other in zip(
                graphs.launch(canvases, slots).results(), eager.step(plain, others), strict=True
            ):
                assert_same(one, other)
            assert graphs.graphs
            graphs.graphs.capture_next()
    # On a CPU positions past a short canvas are left out, so that shapes depend on lengths.
    assert (backend.captures, backend.replays) == ((0, 0) if "canvas_length" in choice else (1, 2))
    assert caplog.text.count(f"is captured where {reason}") == 1


def test_widths_are_launched_apart_where_each_has_a_graph() -> None:
    network = network_of(calm_oracle())
    network.config.__dict__["canvas_length"] = 32
    canvases, slots = rows(network, [{"canvas_length": 20}, {"canvas_length": 8}, {}])
    graphs = Denoiser(network, 3, RecordedGraphs())
    assert graphs.groups(canvases, slots) == [[0], [1, 2]]
    canvases, slots = rows(network, [{"canvas_length": 20}, {"top_k": 3}])
    assert graphs.groups(canvases, slots) is None


def test_a_step_is_captured_once_it_has_run_often(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sfumato.diffusion.step.graphs.RUNS", 2)
    canvases, slots = rows(network, [{"stopping": Never()}])
    denoiser = Denoiser(network, 1, RecordedGraphs())
    assert denoiser.graphs
    captured = []
    for _ in range(3):
        denoiser.launch(canvases, slots).results()
        captured.append(denoiser.graphs.capture_next())
    assert captured == [False, True, False]


def test_a_capture_that_fails_costs_only_the_graph(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    canvases, slots = rows(network, [{}])
    backend = RecordedGraphs()
    denoiser = Denoiser(network, 1, backend)
    assert denoiser.graphs
    graphs = denoiser.graphs
    for error in (RuntimeError("not in a capture"), None):
        backend.capture_error = error
        assert isinstance(denoiser.launch(canvases, slots).results()[0], Draft)
        assert graphs.capture_next() is (error is not None)
    assert "runs without a graph: its capture failed" in caplog.text
    assert (backend.captures, graphs.captured) == (0, 0)


def test_a_replay_that_fails_is_the_last_of_its_graph(network: Network) -> None:
    """And nothing of the step has been written: it may be tried again."""
    (canvas,), slots = rows(network, [{}])
    (alone,), others = rows(network, [{}])
    backend, eager = RecordedGraphs(), Denoiser(network, 1)
    denoiser = Denoiser(network, 1, backend)
    assert denoiser.graphs
    graphs = denoiser.graphs
    assert_same(denoiser.launch([canvas], slots).results()[0], eager.step([alone], others)[0])
    assert graphs.capture_next()
    backend.replay_error = RuntimeError("a fault")
    with pytest.raises(RuntimeError, match="a fault"):
        denoiser.launch([canvas], slots)
    assert_same(denoiser.launch([canvas], slots).results()[0], eager.step([alone], others)[0])
    assert (graphs.captured, graphs.capture_next(), backend.replays) == (0, False, 0)


def test_a_memory_shortage_drops_graphs_and_delays_captures(network: Network) -> None:
    canvases, slots = rows(network, [{"stopping": Never()}])
    backend = RecordedGraphs()
    denoiser = Denoiser(network, 1, backend)
    assert denoiser.graphs
    graphs = denoiser.graphs
    denoiser.launch(canvases, slots).results()
    assert graphs.capture_next() and graphs.captured == 1
    graphs.release()
    denoiser.launch(canvases, slots).results()
    assert (graphs.captured, graphs.capture_next()) == (0, False)


def test_graphs_are_bounded_and_go_with_their_pool(network: Network) -> None:
    graphs = StepGraphs(RecordedGraphs(), 1)
    (canvas,), slots = rows(network, [{}])
    denoiser = Denoiser(network, 1)
    denoiser.step([canvas], slots)
    assert canvas.place
    kind, pool = StepKind.of([canvas], slots, 97), slots[0].pool
    steps = [DeviceStep(network, canvas.place[0], pool, kind) for _ in range(STEPS + 3)]
    for step in steps:
        graphs.add(step)
    assert [step in graphs.kept(DeviceStep) for step in steps].count(False) == 3
    del pool, slots
    assert not any(step.is_alive for step in steps)
    graphs.add(DeviceStep(network, canvas.place[0], network.new_slots(1, 8)[0].pool, kind))
    assert not set(steps).intersection(graphs.kept(DeviceStep))


def test_steps_of_a_batch_that_was_outgrown_are_dropped(network: Network) -> None:
    canvases, slots = rows(network, [{}, {}, {}])
    denoiser = Denoiser(network, 1, RecordedGraphs())
    assert denoiser.graphs
    graphs, kept = denoiser.graphs, []
    for count in (1, 3):
        denoiser.launch(canvases[:count], slots[:count]).results()
        kept += [step for step in graphs._records if step not in kept]
    assert [(step.rows, step.is_alive) for step in kept] == [(1, False), (3, True)]
    assert list(graphs._records) == kept[1:]


def test_a_step_leaves_all_on_the_device() -> None:
    """Bans, every built-in rule, short canvases and commits: traced on a device without numbers."""
    shape = config_from_hf(tiny_config(canvas_length=32).to_dict())
    choices: list[dict[str, Any]] = [
        *({}, {"processors": BANS, "canvas_length": 20}, {"sampler": FixedCount(3)}),
        {"sampler": Threshold(0.8), "stopping": Never()},
    ]
    with fake_device():
        tiny = fake_network(shape)
        slots = tiny.new_slots(5, 64)
        with torch.device("cpu"):
            canvases = [
                Canvas(config(**({"canvas_length": 32} | choice)), Noise(i, 0), 97, DEVICE)
                for i, choice in enumerate(choices)
            ]
            canvases.append(Commit(range(9), config(canvas_length=32), tiny))
            denoiser = Denoiser(tiny, 5, RecordedGraphs())
            batch_rows = denoiser._rows_of(denoiser._key(canvases[0]))
            placed = batch_rows.take([canvases])
            assert denoiser.graphs
            step = denoiser._step(denoiser.graphs, batch_rows, placed, slots[: len(placed)])
        assert (step.kind.commits, step.kind.bans, len(step.kind.rules)) == (True, 8, 3)
        with Trace() as trace:
            step.run()
    assert trace.count
