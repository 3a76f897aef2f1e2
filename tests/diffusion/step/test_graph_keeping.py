"""Which graphs are kept: those of the steps that ran last, with room for steps and for reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sfumato.diffusion.step.graphs import (
    MOST,
    READS,
    STEPS,
    StepGraphs,
    most_graphs,
)


@pytest.fixture(autouse=True)
def captured_after_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.diffusion.step.graphs.RUNS", 1)


class _Kind:
    """A step of a number of rows, for the keeping of graphs alone."""

    rows, width, is_alive, room = 1, 8, True, "steps"

    def run(self) -> None:
        pass


class _Captures:
    """Counts captures; a replay does nothing."""

    def __init__(self) -> None:
        self.captures = 0

    def capture(self, function: Any) -> Any:
        self.captures += 1
        return lambda: None


def _run(graphs: StepGraphs, steps: Sequence[Any], count: int) -> None:
    """Steps in turns, as rows join and leave, with a capture between two steps."""
    for number in range(count):
        step = steps[number % len(steps)]
        if step not in graphs.kept(_Kind):
            graphs.add(step)
        graphs.run(step)
        graphs.capture_next()


def _captured(graphs: StepGraphs, steps: Sequence[Any]) -> list[bool]:
    return [graphs._records[each].replay is not None for each in steps]


@pytest.mark.parametrize("count", [32, MOST])
def test_the_graphs_of_the_last_used_steps_are_kept(count: int) -> None:
    """16 rows of one width and of two, with and without commits."""
    steps: list[Any] = [_Kind() for _ in range(count)]
    backend = _Captures()
    graphs = StepGraphs(backend, 16)
    _run(graphs, steps, 20 * count)
    assert backend.captures == graphs.captured == count
    others: list[Any] = [_Kind() for _ in range(16)]  # of other requests, from now on
    _run(graphs, others, 64)
    assert all(_captured(graphs, others)) and backend.captures == count + 16
    dropped = max(0, count + 16 - MOST)
    assert _captured(graphs, steps) == [False] * dropped + [True] * (count - dropped)


def test_a_step_that_lost_its_graph_runs_several_times_before_its_next_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More kinds than graphs, in turns: a capture, which waits for the device, is not at each."""
    monkeypatch.setattr("sfumato.diffusion.step.graphs.RUNS", 3)
    steps: list[Any] = [_Kind() for _ in range(STEPS - 1)]
    backend = _Captures()
    graphs = StepGraphs(backend, 16)
    _run(graphs, steps, 20 * len(steps))
    assert graphs.captured == MOST and backend.captures <= 20 * len(steps) / 3


def test_a_step_used_longer_ago_takes_no_graph() -> None:
    backend, old, new = _Captures(), _Kind(), [_Kind() for _ in range(most_graphs(1))]
    graphs: Any = StepGraphs(backend, 1)
    graphs.add(old)
    graphs.run(old)  # and is not captured at once, as during a pause
    for step in new:
        graphs.add(step)
        graphs.run(step)
    while graphs.capture_next():
        pass
    assert _captured(graphs, new) == [True] * len(new) and not any(_captured(graphs, [old]))


class _Reads(_Kind):
    """A forward of reads, for the keeping of graphs alone."""

    room = "reads"


def test_reads_and_steps_do_not_push_out_each_others_graphs() -> None:
    """Each has room of its own, and steps that find none keep no forward of reads from its graph;
    as many graphs as both have room for are what a prediction of memory counts."""
    steps: list[Any] = [_Kind() for _ in range(20)]
    reads: list[Any] = [_Reads() for _ in range(READS + 3)]
    backend = _Captures()
    graphs = StepGraphs(backend, 1)
    _run(graphs, steps, 400)
    _run(graphs, reads[:READS], 20 * READS)
    captures = backend.captures
    _run(graphs, reads[:READS], 400)
    assert backend.captures == captures
    _run(graphs, [*steps, *reads], 400)
    assert graphs.captured == most_graphs(1) + READS
    held = {each for each, record in graphs._records.items() if record.replay is not None}
    assert len(held.intersection(reads)) == READS


def test_few_rows_have_few_graphs() -> None:
    graphs = StepGraphs(_Captures(), 1)
    _run(graphs, [_Kind() for _ in range(20)], 200)
    assert graphs.captured == most_graphs(1) == 12 and most_graphs(16) == MOST
