"""Copies to a device that stand for overlapped ones at their worst."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from sfumato.ops.side_copies import SideCopies


class LateCopies(SideCopies):
    """Overlapped copies at their worst: the old bytes are gone when a copy starts, and the new
    ones are there when it is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def start(self, target: Tensor, sources: Sequence[Tensor]) -> Callable[[], None]:
        target.fill_(255)  # of floats: NaN
        name = str(int(sources[0][0]))
        self.log.append(f"copy {name}")

        def wait() -> None:
            SideCopies.start(self, target, sources)
            self.log.append(f"wait {name}")

        return wait
