"""The meters: totals, the last minute, and the history, by a clock of the test's own."""

from __future__ import annotations

from sfumato.engine.stats import GRAIN_S, GRAINS, Statistics


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_history_is_of_whole_grains() -> None:
    clock = Clock()
    meters = Statistics(clock)
    assert meters.history().canvas_tokens == ()
    meters.stepped(3, 0.1)
    meters.settled(64)
    meters.stepped(2, 0.1)
    assert meters.history().canvas_tokens == (), "the first grain is not over"
    clock.now += GRAIN_S
    assert meters.history().canvas_tokens == (64 / GRAIN_S,)
    assert meters.history().rows == (3,)
    clock.now += 2 * GRAIN_S
    meters.stepped(1, 0.1)
    clock.now += GRAIN_S
    points = meters.history()
    assert points.canvas_tokens == (64 / GRAIN_S, 0, 0, 0)
    assert (points.rows, points.grain_s) == ((3, 0, 0, 1), GRAIN_S)


def test_the_history_forgets() -> None:
    clock = Clock()
    meters = Statistics(clock)
    for _ in range(3 * GRAINS):
        meters.stepped(1, 0.1)
        meters.settled(64)
        clock.now += GRAIN_S
    points = meters.history()
    assert points.canvas_tokens == (64 / GRAIN_S,) * GRAINS and points.rows == (1,) * GRAINS
    clock.now += (GRAINS - 1) * GRAIN_S
    assert meters.history().rows == (1,) + (0,) * (GRAINS - 1)
    clock.now += 1e6
    assert meters.history().rows == (0,) * GRAINS
