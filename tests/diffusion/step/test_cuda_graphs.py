"""Captures that fail, with a stand-in for torch's graphs and the rules of its memory pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from threading import get_ident

import pytest
import torch

from sfumato.diffusion.step.graphs import CudaGraphs

Pool = tuple[int, int]


class Device:
    """What torch knows: uses of each pool, the pools it records into, the current stream."""

    def __init__(self) -> None:
        self.uses: dict[Pool, int] = {}
        self.recording: set[Pool] = set()
        self.stream: object = "default"
        self.end_error: Exception | None = None
        handles = count(1)
        self.graph_pool_handle = lambda: (0, next(handles))
        self.emptied: list[int] = []  # pools at the time
        self.with_side: list[tuple[object, int]] = []  # streams, and threads

    def end_allocate(self, index: int, pool: Pool) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording")
        self.recording.remove(pool)

    def release(self, index: int, pool: Pool) -> None:
        self.uses[pool] -= 1
        assert self.uses[pool] >= 0

    def beside(self, stream: object) -> None:
        assert not self.recording
        self.with_side.append((stream, get_ident()))

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


def graph_of(device: Device) -> type:
    class Graph:
        _pool: Pool | None = None
        _ended = False

        def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
            assert pool not in device.recording, "already recording to mempool_id"
            assert device.uses.get(pool) != 0, "a pool without graphs"
            assert (device.stream, get_ident()) in device.with_side
            device.uses[pool] = device.uses.get(pool, 0) + 1
            device.recording.add(pool)
            self._pool = pool

        def capture_end(self) -> None:
            error, device.end_error = device.end_error, None
            if error is not None:
                raise error
            assert self._pool
            device.end_allocate(0, self._pool)
            self._ended = True

        def replay(self) -> None:
            pass

        def __del__(self) -> None:
            if self._ended and self._pool:
                device.release(0, self._pool)

    return Graph


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    numbers = count()
    for name, value in {
        "CUDAGraph": graph_of(device),
        "graph_pool_handle": device.graph_pool_handle,
        "Stream": lambda _: f"stream {next(numbers)}",
        "stream": device.on,
        "device": lambda _: nullcontext(),
        "synchronize": lambda: None,
        "empty_cache": lambda: device.emptied.append(len(device.uses)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in {
        "_cuda_endAllocateToPool": device.end_allocate,
        "_cuda_releasePool": device.release,
    }.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr("sfumato.diffusion.step.graphs.side_stream", device.beside)
    return device


def nothing() -> None:
    pass


def fails() -> None:
    raise ValueError("not in a capture")


@pytest.mark.parametrize("function", [nothing, fails])
@pytest.mark.parametrize("end_error", [RuntimeError("capture invalidated"), None])
def test_a_capture_that_fails_is_not_the_last(
    device: Device, function: Callable[[], None], end_error: Exception | None
) -> None:
    """Nor does it move the thread to another stream, or keep memory."""
    graphs = CudaGraphs(torch.device("cuda", 0))
    kept = graphs.capture(nothing)
    (first,) = device.uses
    if function is fails or end_error:
        device.end_error = end_error
        with pytest.raises(ValueError if function is fails else RuntimeError):
            graphs.capture(function)
    assert (device.stream, device.recording) == ("default", set())
    replays = [graphs.capture(nothing) for _ in range(2)]
    assert device.stream == "default"
    del kept, replays
    assert set(device.uses.values()) == {0} and first in device.uses


def test_graphs_share_a_pool_while_one_lives(device: Device) -> None:
    graphs = CudaGraphs(torch.device("cuda", 0))
    replays = [graphs.capture(nothing) for _ in range(3)]
    assert list(device.uses.values()) == [3] and len(device.emptied) == 1, "once for the pool"
    replays.clear()
    replays.append(graphs.capture(nothing))
    assert list(device.uses.values()) == [0, 1]
