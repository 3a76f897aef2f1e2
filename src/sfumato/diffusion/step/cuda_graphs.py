"""CUDA graphs as a `GraphBackend`; AMD's GPUs have the same calls. Knows no steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sfumato.diffusion.step.graphs import GraphBackend


class CudaGraphs:
    """Graphs of one device. They share one memory pool, since no two run at the same time: nothing
    that is allocated in a capture outlives a replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile; this one does only what a graph can hold.
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            function()
        replay: Callable[[], None] = graph.replay
        return replay


def graph_backend(device: torch.device) -> GraphBackend | None:
    """What captures steps on a device; None where nothing does."""
    return CudaGraphs(device) if device.type == "cuda" and torch.cuda.is_available() else None
