"""Brings tensors of the host to a device through page-locked buffers.

While the device copies one buffer, the host fills the next from the mapped file, so that reading
and copying overlap.  A tensor changes its dtype on the way, so that the device never holds it
twice.  Knows no checkpoints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from sfumato.ops import gpu
from sfumato.weights.formats import Stored

BUFFER = 64 << 20  # bytes: a few ms of copying, beside which a start costs nothing
BUFFERS = 2  # one is filled while the other is copied


class Copies(Protocol):
    """Copies that go on while the host works."""

    def buffer(self, nbytes: int) -> Tensor:
        """uint8 memory of the host from which the device copies by itself."""
        ...

    def start(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Starts a copy of a buffer to the device; the result waits until it is done."""
        ...


class CudaCopies:
    """Copies on a stream of their own, which later work of the current stream waits for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._current = torch.cuda.current_stream(device)

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def start(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        self._stream.wait_stream(self._current)  # the target's memory may be in use until here
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done.record(self._stream)
        target.record_stream(self._stream)
        self._current.wait_event(done)
        return done.synchronize


class Uploader:
    """Uploads tensors one after another. Its buffers live as long as it does."""

    def __init__(self, device: torch.device, copies: Copies, buffer: int = BUFFER) -> None:
        """buffer: bytes of each, a multiple of 8."""
        self._device, self._copies = device, copies
        self._free: deque[Tensor] = deque(copies.buffer(buffer) for _ in range(BUFFERS))
        self._busy: deque[tuple[Tensor, Callable[[], None]]] = deque()

    def upload(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor of the host, in a dtype, on the device. The source may change afterwards."""
        target = torch.empty(source.shape, dtype=dtype, device=self._device)
        values, places = source.reshape(-1), target.view(-1)
        start = 0
        while start < len(values):
            buffer = self._next_buffer()
            room = buffer.view(dtype)
            stop = min(start + len(room), len(values))
            part = room[: stop - start]
            part.copy_(values[start:stop])
            self._busy.append((buffer, self._copies.start(places[start:stop], part)))
            start = stop
        return target

    def finish(self) -> None:
        """Waits until all copies are done."""
        while self._busy:
            self._wait()

    def _next_buffer(self) -> Tensor:
        if not self._free:
            self._wait()
        return self._free.popleft()

    def _wait(self) -> None:
        buffer, done = self._busy.popleft()
        done()
        self._free.append(buffer)


class Mover:
    """Moves loaded values to a device, by page-locked buffers where the device copies from them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uploader: Uploader | None = None

    def to(self, value: Tensor | Stored, dtype: torch.dtype) -> Tensor | Stored:
        """A float tensor in a dtype, or a weight in another form as it is, on the device."""
        if isinstance(value, Stored):
            return value.moved(self._as_it_is)
        return self._moved(value, dtype)

    def _as_it_is(self, part: Tensor) -> Tensor:
        return self._moved(part.view(torch.uint8), torch.uint8).view(part.dtype)

    def wait(self) -> None:
        """Waits for what is still being copied: what is packed next must be on the device."""
        if self._uploader is not None:
            self._uploader.finish()

    def finish(self) -> None:
        """Waits for what is still being copied, and gives the buffers back."""
        if self._uploader is not None:
            self._uploader.finish()
            self._uploader = None

    def _moved(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        if not gpu.is_gpu(self._device) or value.device.type != "cpu":
            return value.to(self._device, dtype)
        if self._uploader is None:
            self._uploader = Uploader(self._device, CudaCopies(self._device))
        return self._uploader.upload(value, dtype)
