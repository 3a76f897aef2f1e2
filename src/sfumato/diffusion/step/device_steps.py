"""The steps that a device can run without the host, for any rows that allow it.

Finds the step of some rows, writes what has changed in them, and replays or runs the step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.scoring import kind_of
from sfumato.diffusion.step.batch import StepBatch
from sfumato.diffusion.step.batched_settings import takes_tensors
from sfumato.diffusion.step.commit import Commit
from sfumato.diffusion.step.device_step import DeviceStep, ForwardStep, StepKind
from sfumato.diffusion.step.graphs import GraphBackend, StepGraphs
from sfumato.diffusion.step.lifting import LiftProbe
from sfumato.diffusion.step.seats import Seats
from sfumato.model.cache import KVPool, Slot
from sfumato.model.network import Network

log = logging.getLogger(__name__)

_Version = tuple[int, tuple[tuple[int, int], ...]]


class DeviceSteps:
    """The steps of one denoiser."""

    def __init__(
        self, network: Network, backend: GraphBackend, rows: int, probe: LiftProbe
    ) -> None:
        """rows: for how many batches have room at first."""
        self._network, self._probe = network, probe
        self.graphs = StepGraphs(backend, rows)
        self._prepared: dict[Seats, tuple[_Version, DeviceStep]] = {}
        self._logged: set[str] = set()

    def serve(self, canvases: Sequence[Canvas], slots: Sequence[Slot], batch: StepBatch) -> bool:
        """Whether rows of one batch can have such a step. Logs what is in the way, once."""
        obstacle = self._obstacle(canvases, slots, batch)
        if obstacle is not None and obstacle not in self._logged:
            self._logged.add(obstacle)
            log.info("at most the forward of a step is captured where %s", obstacle)
        return obstacle is None

    def run(self, seats: Seats, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> DeviceStep:
        """Runs the step of the canvases, in the order of their rows; its words hold the results.
        Raises only where no row has moved on."""
        step = self._step(seats, canvases, slots)
        self.graphs.run(step)
        return step

    def hidden(self, batch: StepBatch, rows: int, pool: KVPool) -> Tensor:
        """The hidden states of a batch's first rows, whose slots and lengths it notes, by a forward
        that is captured by itself. They are overwritten by the next such forward."""
        step = self.graphs.find(
            lambda one: isinstance(one, ForwardStep) and one.serves(batch, pool, rows)
        )
        if not isinstance(step, ForwardStep):
            other = self.graphs.find(lambda one: isinstance(one, ForwardStep) and one.is_of(batch))
            room = other.room if isinstance(other, ForwardStep) else None
            step = ForwardStep(self._network, batch, pool, rows, room)
            self.graphs.add(step)
        self.graphs.run(step)
        return step.hidden

    def forget(self) -> None:
        """What was written for the last steps may have been overwritten."""
        self._prepared.clear()

    def _step(self, seats: Seats, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> DeviceStep:
        """The step, prepared for these canvases."""
        version = seats.version, tuple((id(slot.pool), slot.index) for slot in slots)
        known, last = self._prepared.get(seats, (None, None))
        if known == version and last is not None and last.is_of(seats.batch) and last.is_alive:
            return last
        kind = StepKind.of(canvases, self._network.config.vocab_size)
        batch, pool = seats.batch, slots[0].pool
        step = self.graphs.find(
            lambda one: isinstance(one, DeviceStep) and one.serves(batch, pool, kind)
        )
        if not isinstance(step, DeviceStep):
            step = DeviceStep(self._network, batch, pool, kind)
            self.graphs.add(step)
        self._prepared.pop(seats, None)
        step.prepare_for_replay(canvases, slots)
        self._prepared[seats] = version, step
        return step

    def _obstacle(
        self, canvases: Sequence[Canvas], slots: Sequence[Slot], batch: StepBatch
    ) -> str | None:
        """Why rows cannot have a step of fixed shape; None where they can."""
        if len({id(slot.pool) for slot in slots}) > 1:
            return "rows have slots of several pools"
        for canvas in canvases:
            if isinstance(canvas, Commit):
                continue
            if canvas.guidance is not None and canvas.guidance.mask is not None:
                return "a grammar masks a position"
            if kind_of(canvas) != "plain":
                return "a row changes its scores, keeps them, or names more tokens"
            rules = canvas.config.sampler, canvas.config.stopping
            if all(map(takes_tensors, rules)):
                continue
            names = " or ".join(type(rule).__name__ for rule in rules if not takes_tensors(rule))
            if not self._probe.lifts(canvas, batch):
                return f"{names} reads numbers on the host"
            if canvas.length < batch.width:
                return f"{names} meets a canvas that is shorter than its batch's width"
        return None
