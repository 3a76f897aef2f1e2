"""CUDA graphs as a `GraphBackend`; AMD's GPUs have the same calls. Knows no steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from sfumato.diffusion.step.graphs import GraphBackend

Pool = Any
"""A handle of torch's, whose type has no public name."""


class CudaGraphs:
    """Graphs of one device. Those that live at a time share a memory pool, since no two run at the
    same time: nothing that is allocated in a capture outlives a replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._pool: Pool | None = None
        self._stream: torch.cuda.Stream | None = None

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            if self._pool is None or not len(self._graphs):
                # Torch gives a pool up with its last graph, and refuses its handle from then on.
                self._pool = torch.cuda.graph_pool_handle()
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # for the graph's pool
            # `torch.cuda.graph` would leave the thread on its stream where the end fails.
            with torch.cuda.stream(self._stream):
                self._record(graph, function, self._pool)
        self._graphs.add(graph)
        replay: Callable[[], None] = graph.replay
        return replay

    def _record(
        self, graph: torch.cuda.CUDAGraph, function: Callable[[], None], pool: Pool
    ) -> None:
        try:
            # Other threads may use the device meanwhile; this one does only what a graph can hold.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                function()
            except Exception as error:
                try:
                    graph.capture_end()
                except Exception:
                    raise error from None  # the end only says that the capture is invalid
                raise
            graph.capture_end()
        except Exception:
            self._give_up(pool)
            raise

    def _give_up(self, pool: Pool) -> None:
        """After a failure. A capture whose end fails leaves its stream and its pool in it: torch
        allocates from the pool still, and refuses every later capture into it."""
        self._pool = self._stream = None
        index = self._device.index
        with suppress(Exception):  # the capture has ended, or torch has no such functions
            index = torch.cuda.current_device() if index is None else index
            getattr(torch._C, "_cuda_endAllocateToPool")(index, pool)  # noqa: B009
            getattr(torch._C, "_cuda_releasePool")(index, pool)  # noqa: B009


def graph_backend(device: torch.device) -> GraphBackend | None:
    """What captures steps on a device; None where nothing does."""
    return CudaGraphs(device) if device.type == "cuda" and torch.cuda.is_available() else None
