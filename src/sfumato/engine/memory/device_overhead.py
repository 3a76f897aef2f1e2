"""What a GPU takes beside the bytes of tensors: blocks of torch's allocator, graphs, workspaces.

The sizes of blocks are those of torch's caching allocator for CUDA and ROCm.  What a graph and a
library take is an assumption until a device confirms or corrects it.  Knows no models.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sfumato.diffusion.step.graphs import READS, most_graphs
from sfumato.ops import gpu
from sfumato.ops.triton.workspaces import rounded_up

MIB = 1 << 20
SMALL, LARGE = 1 * MIB, 10 * MIB  # bounds of tensors that share a segment
GRAIN, SMALL_SEGMENT, SEGMENT = 512, 2 * MIB, 20 * MIB

GRAPH = 8 * MIB  # of the driver, for the thousand kernels of a step; assumed
WORKSPACE = 32 * MIB  # of cuBLAS and of cuBLASLt on Hopper, for each stream; smaller on others
STREAMS = 2  # that multiply: the current one, and that of captures
CODE = 256 * MIB  # kernels, which are loaded when they first run; assumed


def held_bytes(sizes: Iterable[int], device: torch.device) -> int:
    """What an allocator holds for tensors of these bytes that live together: on a CUDA device in
    blocks, elsewhere their sum.

    Tensors up to SMALL share segments of 2 MiB, those below LARGE segments of 20 MiB, and larger
    ones have one of their own, a multiple of 2 MiB.
    """
    if not gpu.is_gpu(device):
        return sum(sizes)
    small = own = 0
    shared: list[int] = []
    for size in sizes:
        if size <= SMALL:
            small += rounded_up(size, GRAIN)
        elif size < LARGE:
            _place(rounded_up(size, GRAIN), shared)
        else:
            own += rounded_up(size, SMALL_SEGMENT)
    return rounded_up(small, SMALL_SEGMENT) + len(shared) * SEGMENT + own


def _place(size: int, free: list[int]) -> None:
    """Takes room of the fullest segment that has it, as the allocator does, or opens one."""
    fitting = [room for room in free if room >= size]
    if fitting:
        room = min(fitting)
        free.remove(room)
    else:
        room = SEGMENT
    free.append(room - size)


def overhead_bytes(device: torch.device, rows: int, step: int, captures: bool = True) -> int:
    """Graphs of steps and of reads, workspaces and code of an engine of so many rows; step: bytes
    of its buffers; captures: whether there are graphs.

    Captured steps share a memory pool of their own, which the first run of a step, without a
    graph, cannot use: the buffers of a step are held twice.
    """
    if not gpu.is_gpu(device):
        return 0
    libraries = 2 * STREAMS * WORKSPACE + CODE
    return libraries + (step + (most_graphs(rows) + READS) * GRAPH if captures else 0)
