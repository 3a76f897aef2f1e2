"""Which steps are captured, and when: one at a time, after it has run a few times.

Knows neither CUDA nor what a step does: a `GraphBackend` captures functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from sfumato.diffusion.step.device_step import DeviceStep, ForwardStep
from sfumato.model.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)

MOST = 32
"""Steps that are kept, with their graphs, which the memory estimate counts."""

RUNS = 2
"""After how many runs a step is captured. Many kinds of step run once, when rows join or leave; a
capture makes the host wait for the device."""

PAUSE = 256
"""Steps after a memory shortage before another is captured."""


Step = DeviceStep | ForwardStep


class GraphBackend(Protocol):
    """Records what functions do on a device, to have it repeated without the host's part in it."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Records the function without running it. What it returns repeats the work on the same
        memory."""
        ...


class StepGraphs:
    """Steps, the last used ones, and the replays of those that have been captured."""

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self._replays: dict[Step, Callable[[], None] | None] = {}  # the last used last
        self._runs: dict[Step, int] = {}  # without a graph
        self._wanted: list[Step] = []  # that have run often enough and are not captured
        self._refused: set[Step] = set()  # whose capture has failed
        self._pause = 0

    @property
    def captured(self) -> int:
        """How many steps have a graph."""
        return sum(replay is not None for replay in self._replays.values())

    def find(self, serves: Callable[[Step], bool]) -> Step | None:
        """The step that serves."""
        return next((step for step in self._replays if serves(step)), None)

    def add(self, step: Step) -> None:
        """Keeps a step, and drops those that have not been used for the longest time."""
        for old in [old for old in self._replays if not old.is_alive]:
            self._drop(old)
        while len(self._replays) >= MOST:
            self._drop(next(iter(self._replays)))
        self._replays[step] = None

    def run(self, step: Step) -> None:
        """Replays a step, or runs it where it is not captured. A replay that raises is the last of
        its graph."""
        replay = self._replays.pop(step, None)
        self._replays[step] = None
        self._pause = max(0, self._pause - 1)
        if replay is None:
            step.run()
            self._runs[step] = self._runs.get(step, 0) + 1
            is_known = step in self._wanted or step in self._refused
            if self._runs[step] >= RUNS and not is_known:
                self._wanted.append(step)
            return
        try:
            replay()
        except Exception:
            self._refused.add(step)
            raise
        self._replays[step] = replay

    def capture_next(self) -> bool:
        """Captures one step that has run RUNS times, if there is any; whether it did. A capture
        that fails leaves its step without a graph."""
        self._wanted = [step for step in self._wanted if step.is_alive]
        if not self._wanted or self._pause:
            return False
        step = self._wanted.pop(0)
        try:
            self._replays[step] = self._backend.capture(step.prepare_for_capture())
        except Exception as error:
            if is_out_of_memory(error):
                self.release()
            else:
                self._refused.add(step)
            log.warning(
                "a step of %d rows of width %d runs without a graph: its capture failed (%s: %s)",
                *(step.rows, step.width, type(error).__name__),
                str(error).splitlines()[0][:200] if str(error) else "no message",
            )
        return True

    def release(self) -> None:
        """Drops all graphs, for want of memory. Steps are captured again after a while."""
        self._replays = dict.fromkeys(self._replays)
        self._wanted, self._pause = [], PAUSE

    def _drop(self, step: Step) -> None:
        del self._replays[step]
        self._runs.pop(step, None)
        self._refused.discard(step)
        if step in self._wanted:
            self._wanted.remove(step)
