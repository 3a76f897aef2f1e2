"""How long encodes took on a device, for which the host does not wait. Knows no requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from sfumato.engine.row import Row

Stamp = torch.cuda.Event | float


@dataclass(frozen=True)
class EncodeTime:
    """What an encode took, and the rows that had a part in it."""

    rows: tuple[Row, ...]
    seconds: float


class EncodeTimes:
    """The encodes of one device, from their launch until the device has done them."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device, self._clock = device, clock
        self._launched: list[tuple[tuple[Row, ...], Stamp, Stamp]] = []

    def stamp(self) -> Stamp:
        """When the device has done what was launched so far."""
        if self._device.type != "cuda" or not torch.cuda.is_available():
            return self._clock()
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event

    def add(self, rows: Sequence[Row], began: Stamp) -> None:
        """Notes an encode, all of which has been launched since `began`."""
        self._launched.append((tuple(dict.fromkeys(rows)), began, self.stamp()))

    def done(self) -> list[EncodeTime]:
        """The encodes that the device has done since the last call."""
        times: list[EncodeTime] = []
        with suppress(RuntimeError):  # a lost device, which the step reports
            while self._launched:
                rows, began, ended = self._launched[0]
                if isinstance(began, float) or isinstance(ended, float):
                    assert isinstance(began, float) and isinstance(ended, float)
                    times.append(EncodeTime(rows, ended - began))
                elif ended.query():
                    times.append(EncodeTime(rows, began.elapsed_time(ended) / 1e3))
                else:
                    break
                del self._launched[0]
            return times
        self._launched.clear()
        return times
