"""Copies from the host's memory to a device beside the work of the device's current stream.

By the part of torch that all kinds of devices with streams share, so that no vendor is named here.
Devices without streams copy in order.  Knows no weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


class SideCopies:
    """Copies at once, for devices without streams; a subclass's may go on while the device
    computes."""

    def memory(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] in the host's memory, from which the device copies by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def start(self, target: Tensor, sources: Sequence[Tensor]) -> Callable[[], None]:
        """Starts to copy such memory, one piece after another, to uint8 `target` of as many bytes,
        once all work that the device has been given by now is done. Work that it is given after a
        call of the result waits for the copy; the host waits for neither."""
        start = 0
        for source in sources:
            target[start : start + len(source)].copy_(source, non_blocking=True)
            start += len(source)
        return lambda: None


class OnSideStream(SideCopies):
    """Copies on a stream of their own, by events in both directions."""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError or NotImplementedError where the device has no streams."""
        self._device = device
        self._stream = torch.Stream(device)
        self._locks = True

    def memory(self, nbytes: int) -> Tensor:
        """Page-locked where the system grants that: from other memory a copy makes the host wait,
        which is logged once."""
        if self._locks:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._locks = False
                reason = str(error).partition("\n")[0]
                _log.warning("no more memory is page-locked, so copies wait: %s", reason)
        return super().memory(nbytes)

    def start(self, target: Tensor, sources: Sequence[Tensor]) -> Callable[[], None]:
        # What reads the target's old bytes has been given to the current stream before.
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            super().start(target, sources)
        copied = self._stream.record_event()
        target.record_stream(self._stream)  # else its memory could be given away during a copy
        return lambda: torch.accelerator.current_stream(self._device).wait_event(copied)


def side_copies(device: torch.device) -> SideCopies:
    """Copies to a device: beside its work where it has streams, else in order."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        return SideCopies()
    try:
        return OnSideStream(device)
    except (RuntimeError, NotImplementedError):
        return SideCopies()
