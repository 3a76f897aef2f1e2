"""The circuit breaker: distinguishes failures that last from those of single requests.

Requests that fail one after another only raise a suspicion.  Then the engine runs a probe, a tiny
request of its own: where that works, the requests were at fault. Where it fails, the circuit
opens: no row runs and no request is taken until a later probe works, and after the last one the
engine stops, so that the process can be started again.  A probe that finds no memory says nothing:
it is repeated later, and neither opens nor closes the circuit.  Knows no rows, slots and threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from sfumato.api import Model
from sfumato.diffusion.limits import Limits
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine.errors import Stops
from sfumato.engine.events import Failed, Terminal
from sfumato.model.devices import is_out_of_memory
from sfumato.tasks.alone import generate
from sfumato.weights.files.tensorfile import FileSizes

EVERY_S = 1.0


class FileCheck:
    """Asks for the sizes of the files once a second at most: some microseconds each."""

    def __init__(self, files: FileSizes, clock: Callable[[], float]) -> None:
        self._files, self._clock, self._next = files, clock, clock()

    def check(self) -> None:
        """Raises Stops, with the file's name and not its folder."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + EVERY_S
        path = self._files.truncated()
        if path is not None:
            raise Stops(f"{path.name} was made shorter while the model is in use; restore the file")


log = logging.getLogger(__name__)

FAILURES = 3  # requests that end in an internal failure, one after another, raise the suspicion
WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # before each further probe; when the last fails, it is over
LENGTH = 16  # positions of the probe's canvas at most


class Circuit:
    """Written by the engine's thread alone; any thread may read."""

    def __init__(self, probe: Callable[[], None], clock: Callable[[], float]) -> None:
        """probe: raises where the engine does not work."""
        self._probe, self._clock, self._waits = probe, clock, WAITS_S
        self.failures = 0  # requests that have failed since the last one that worked
        self.probes, self._next = 0, 0.0  # probes that have failed, one after another
        self.reason: str | None = None  # why no request is taken; None while the circuit is closed

    def retry_s(self) -> float:
        """Seconds until the next probe of an open circuit."""
        return max(0.0, self._next - self._clock())

    def ended(self, terminal: Terminal) -> None:
        """Records how a request has ended."""
        if isinstance(terminal, Failed):
            self.failures += terminal.kind == "internal"
        elif terminal.outcome != "cancelled":
            self.failures = 0

    def check(self) -> bool:
        """Whether rows may run now. Runs the probe where that is due. Raises Stops when the
        last probe has failed."""
        is_closed = self.reason is None
        if (is_closed and self.failures < FAILURES) or self._clock() < self._next:
            return is_closed
        try:
            self._probe()
        except Exception as error:
            if is_out_of_memory(error):  # others may have it all: nothing is known yet
                log.warning("the probe of the engine found no memory; it is repeated later")
                self._next = self._clock() + self._waits[max(0, self.probes - 1)]
                return is_closed
            self._failed(error)
            return False
        log.warning(
            "%d requests failed one after another; the engine's own probe works, so requests %s",
            self.failures,
            "are taken" if self.reason is None else "are taken again",
        )
        self.failures, self.probes, self._next, self.reason = 0, 0, 0.0, None
        return True

    def _failed(self, error: Exception) -> None:
        self.probes += 1
        log.error("probe %d of the engine failed", self.probes, exc_info=error)
        most = len(self._waits) + 1
        probes = f"its own probe {self.probes} of {most} times ({type(error).__name__})"
        what = f"the last {self.failures} requests failed, and {probes}"
        if self.probes == most:
            raise Stops(what)
        self._next = self._clock() + self._waits[self.probes - 1]
        self.reason = f"the engine is not ready: {what}; try again later"


def probe(model: Model) -> None:
    """One token, one short canvas, one step, in a slot of its own: raises where the model or its
    device does not work."""
    config = SamplerConfig(max_steps=1, canvas_length=min(LENGTH, model.config.canvas_length))
    prompt = torch.tensor([model.tokenizer.bos_id or 0])
    config, limits = config.over(model.sampler_defaults), Limits(1, model.end_ids)
    for _ in generate(model.network, prompt, config, limits, seed=0):
        pass
