"""Which steps are captured, and when: one at a time, after it has run a few times.

The graphs that are kept are those of the steps that ran last.  Knows not what a `Step` does: a
`GraphBackend` captures functions. `CudaGraphs` is the one there is; AMD's GPUs have the same calls.
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from sfumato.diffusion.step.batch import StepBatch
from sfumato.model.cache import KVPool
from sfumato.model.devices import is_out_of_memory
from sfumato.model.network import Network
from sfumato.model.segments import PaddedRows, RowPart
from sfumato.ops.gpu import side_stream

log = logging.getLogger(__name__)

MOST = 64
"""Graphs that are kept at most. 16 rows of one width have 32 kinds of step: each number of rows,
with and without a commit."""

READS = 20
"""Graphs of forwards of reads that are kept beside those: all kinds of a pool's, where canvases
have 256 positions at most (1, 2, 4, … rows of each width)."""

KINDS = 12
"""Graphs for each row that a batch has room for: widths, with and without a commit."""

STEPS = 2 * (MOST + READS)
"""Steps that are kept, with a graph or without: one has some hundred kilobytes for itself."""

RUNS = 3
"""After how many runs a step is captured. Many kinds of step run once or twice, when rows join or
leave; a capture makes the host wait for the device."""

PAUSE = 256
"""Steps after a memory shortage before another is captured."""


Room = Literal["steps", "reads"]
"""Graphs of one room push out each other: no number of steps pushes out forwards of reads."""


class Step(ABC):
    """A function that a graph can hold, of rows of one width whose slots are of one pool: it reads
    and writes tensors of fixed address alone."""

    room: Room = "steps"

    def __init__(
        self,
        network: Network,
        pool: KVPool,
        rows: int,
        width: int,
        adapters: frozenset[int],
        batch: StepBatch | None = None,
    ) -> None:
        """adapters: the numbers of those that the slots of the rows have, which its operations
        depend on; batch: whose first rows these are, if they are of a batch."""
        self.network, self.rows, self.width = network, rows, width
        self.adapters = adapters
        self._pool = weakref.ref(pool)
        self._batch = None if batch is None else weakref.ref(batch)

    @property
    def pool(self) -> KVPool | None:
        """None where it is gone."""
        return self._pool()

    def is_of(self, batch: StepBatch) -> bool:
        """Whether the rows are those of this batch, rather than of one that was outgrown."""
        return self._batch is not None and self._batch() is batch

    def has(self, pool: KVPool, rows: int, adapters: frozenset[int]) -> bool:
        """Whether it has so many rows of this pool, with slots of these adapters."""
        return (self.rows, self.adapters) == (rows, adapters) and self.pool is pool

    @property
    def is_alive(self) -> bool:
        """Whether the rows and their pool still exist."""
        return self.pool is not None and (self._batch is None or self._batch() is not None)

    @abstractmethod
    def run(self) -> None:
        """Does the work. Has run before it is captured, so that nothing is made for the first time
        in the capture."""

    def seen(self, slots: Tensor, **more: Any) -> PaddedRows:
        """What attention takes of the rows, whose slots in the pool are these. more: of the
        `RowPart`."""
        pool = self.pool
        assert pool is not None
        return PaddedRows([RowPart(pool, slots, self.width, adapters=self.adapters, **more)])


Kind = TypeVar("Kind")


def most_graphs(rows: int) -> int:
    """How many graphs of steps are kept where batches have room for so many rows."""
    return min(MOST, KINDS * rows)


class GraphBackend(Protocol):
    """Records what functions do on a device, to have it repeated without the host's part in it."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Records the function without running it. What it returns repeats the work on the same
        memory."""
        ...


@dataclass
class _Record:
    """What is known of a step that is kept."""

    replay: Callable[[], None] | None = None
    runs: int = 0  # without a graph, since it last had one
    refused: bool = False  # a capture or a replay has failed

    @property
    def wants_graph(self) -> bool:
        return self.replay is None and self.runs >= RUNS and not self.refused


class StepGraphs:
    """Steps, the last used ones, and the replays of those that have been captured.

    Steps of canvases and forwards of reads have rooms apart."""

    def __init__(self, backend: GraphBackend, rows: int) -> None:
        """rows: for how many batches have room."""
        self._backend = backend
        self._most: dict[Room, int] = {"steps": most_graphs(rows), "reads": READS}
        self._records: dict[Step, _Record] = {}  # the last used last
        self._pause = 0

    @property
    def captured(self) -> int:
        """How many steps have a graph."""
        return sum(record.replay is not None for record in self._records.values())

    def kept(self, kind: type[Kind]) -> list[Kind]:
        """The steps of a class, the last used last."""
        return [step for step in self._records if isinstance(step, kind)]

    def add(self, step: Step) -> None:
        """Keeps a step, and drops those that have not been used for the longest time, such without
        a graph first."""
        self._records = {old: record for old, record in self._records.items() if old.is_alive}
        while len(self._records) >= STEPS:
            plain = (old for old, record in self._records.items() if record.replay is None)
            del self._records[next(plain, next(iter(self._records)))]
        self._records[step] = _Record()

    def run(self, step: Step) -> None:
        """Replays a step, or runs it where it is not captured. A replay that raises is the last of
        its graph."""
        record = self._records.pop(step, None) or _Record()
        self._records[step] = record
        self._pause = max(0, self._pause - 1)
        replay, record.replay = record.replay, None
        if replay is None:
            step.run()
            record.runs += 1
            return
        try:
            replay()
        except Exception:
            record.refused = True
            raise
        record.replay = replay

    def capture_next(self) -> bool:
        """Captures the last used step of those without a graph that have run RUNS times, if there
        is any with room for its graph; whether it did. A capture that fails leaves its step without
        a graph."""
        if self._pause:
            return False
        wanted = [step for step, record in self._records.items() if record.wants_graph]
        alive = (step for step in reversed(wanted) if step.is_alive)
        step = next((step for step in alive if self._make_room(step)), None)
        if step is None:
            return False
        record = self._records[step]
        try:
            record.replay = self._backend.capture(step.run)
        except Exception as error:
            if is_out_of_memory(error):
                self.release()
            else:
                record.refused = True
            log.warning(
                "a step of %d rows of width %d runs without a graph: its capture failed (%s: %s)",
                *(step.rows, step.width, type(error).__name__),
                str(error).splitlines()[0][:200] if str(error) else "no message",
            )
        return True

    def release(self) -> None:
        """Drops all graphs, for want of memory. Steps are captured again after a while."""
        for record in self._records.values():
            record.replay = None
        self._pause = PAUSE

    def _make_room(self, wanted: Step) -> bool:
        """Drops the graph that has not been used for the longest time of those that share room with
        a step's, where there are as many as are kept and the step is used later; whether there is
        room."""
        alike = {step: record for step, record in self._records.items() if step.room == wanted.room}
        held = [step for step, record in alike.items() if record.replay is not None]
        if len(held) < self._most[wanted.room]:
            return True
        if next(step for step in alike if step in (wanted, held[0])) is wanted:
            return False
        record = self._records[held[0]]
        record.replay, record.runs = None, 0
        return True


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
            torch.cuda.synchronize()
            if self._pool is None or not len(self._graphs):
                # Torch gives a pool up with its last graph, and refuses its handle from then on.
                self._pool = torch.cuda.graph_pool_handle()
                torch.cuda.empty_cache()  # for the memory that the pool begins with
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            side_stream(self._stream)  # this thread's, made outside of the capture
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
