"""What clients may ask of an engine, which is in this process or in another one.

Checks, refusals and deadlines are here, once. How a request gets to the model is the engine's own.
Any thread may call. Knows no queue and no slot.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from os import PathLike
from typing import Any

from sfumato.api import Model, Reply
from sfumato.diffusion.constraints.call_grammar import Source
from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.errors import REFUSALS, EngineDead, QueueFull
from sfumato.engine.events import (
    Decided,
    DecisionSink,
    Failed,
    Handle,
    Sink,
    Terminal,
    explain,
    late,
)
from sfumato.engine.prepare import (
    Job,
    check_length,
    make_prompt,
    prepare,
    prepare_decision,
    snapshot_points_of,
)
from sfumato.engine.request import AnyRequest, DecisionRequest, Request, ServedModel
from sfumato.engine.stats import EngineState, Health
from sfumato.model.adapters import Adapter
from sfumato.model.named_adapters import NamedAdapter
from sfumato.refused import Refused
from sfumato.tasks.works import Prompt

JOIN_S = 30.0  # how long a step under way may hold up `close`


class AnyEngine(ABC):
    """Serves requests with one model."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        longest: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """longest: positions that a slot can have at most."""
        self.model, self.config, self.longest = model, config, longest
        self.served, self._clock = ServedModel.of(model), clock
        self._snapshot_points = snapshot_points_of(model)

    def submit(self, request: Request, sink: Sink | None = None) -> Handle[Reply]:
        """Queues a request. sink: called with each of its events, in a thread of the engine, and
        must not block.

        Raises ValueError, naming the field, for what cannot be done; TooLarge, a ValueError, for
        what no slot can ever hold; QueueFull; NotReady; EngineDead.
        """
        with self.refusals(request):
            return self._put(request, partial(self._job, request), sink)

    def offer(self, request: Request, sink: Sink | None = None) -> Handle[Reply] | None:
        """Does what `submit` does, but a full queue gives None and counts as no refusal."""
        with self.refusals(request), suppress(QueueFull):
            return self._put(request, partial(self._job, request), sink)
        return None

    def decide(self, request: DecisionRequest, sink: DecisionSink | None = None) -> Handle[Decided]:
        """Queues a decision, whose terminal event is a `Decided` or a `Failed` and whose only event
        it is. Raises what `submit` raises; the fields of a question are named
        "questions.<id>.<field>"."""
        with self.refusals(request):
            make = partial(prepare_decision, self.model, request, self.longest)
            return self._put(request, make, sink)

    def try_grammar(self, source: Source, client: str) -> Future[Any]:
        """Begins to compile a grammar in another process, within limits, as every grammar of a
        client has to be before its request is submitted. Clients take turns. Cancelling the future
        ends it; the future, and this, raise what `submit` raises. May take some milliseconds."""
        cache = self.model.grammars.cache
        cache.guard(QueueFull)
        return cache.tried(source, client)

    def drop(self, request: AnyRequest, terminal: Failed) -> None:
        """Reports the end of a request that was checked and then never submitted."""
        self._report(request, terminal)

    def late(self, request: AnyRequest) -> str | None:
        """Why the deadline ends a request that is not submitted yet; None before its deadline."""
        return late(request.since, self._limit_s(request), self._clock())

    @contextmanager
    def refusals(self, request: AnyRequest) -> Iterator[None]:
        """Reports a refusal of the request that is raised within the context."""
        try:
            yield
        except REFUSALS as error:
            kind, message = explain(error)
            if self.death is not None and isinstance(error, EngineDead):
                kind = "internal"  # an error has ended the engine
            self._report(request, Failed(kind, message))
            if isinstance(error, Refused):
                error.recorded = request.id
            raise

    def prompt(self, request: Request) -> Prompt:
        """The request's prompt as tokens: for a caller who needs the length, or who submits the
        prompt several times and then sets `Request.made`. Raises ValueError and TooLarge."""
        with self.refusals(request):
            return make_prompt(self.model, request, self.longest, self._snapshot_points)

    def check_length(self, text: str, field: str) -> None:
        """Raises TooLarge, naming the field, for a text that no context here could hold. The text
        is not tokenized for that."""
        check_length(self.model, text, self.longest, field)

    def now(self) -> float:
        """The engine's clock in seconds, for `Request.since`."""
        return self._clock()

    @property
    @abstractmethod
    def death(self) -> str | None:
        """Why the engine has stopped and will not go on by itself; None where it has not."""

    @abstractmethod
    def check(self, request: Request) -> None:
        """Raises what `submit` raises for a request that cannot be done."""

    @abstractmethod
    def health(self) -> Health:
        """Whether requests are taken."""

    @abstractmethod
    def state(self) -> EngineState:
        """Running requests, slots, totals and speeds, as of about now."""

    @abstractmethod
    def used_memory(self) -> int | None:
        """Bytes that the engine's process holds on the model's device; None where unknown."""

    @abstractmethod
    def reset_prefix_cache(self) -> Future[int]:
        """Empties the free slots before the next step; gives how many held tokens. Raises
        EngineDead."""

    @property
    @abstractmethod
    def adapters(self) -> Mapping[str, NamedAdapter]:
        """The adapters that requests may name."""

    def load_adapter(
        self, name: str, adapter: str | PathLike[str] | Adapter
    ) -> Future[NamedAdapter]:
        """Loads an adapter before the next step; requests may name it once this is done. A file is
        read at once. Raises ValueError, naming the file and what is wrong in it, and EngineDead;
        the future, Refused: a name that is taken, or what does not fit the network or the
        memory. Raises Refused where the network is in other processes."""
        raise Refused("adapter", "replicas load theirs as they start", "name it with --adapter")

    def unload_adapter(self, name: str) -> Future[NamedAdapter]:
        """Takes the name of an adapter off before the next step. Requests that named it before are
        served to their ends; then its memory is freed. Raises EngineDead; the future, Refused.
        Raises Refused where the network is in other processes."""
        raise Refused("adapter", "replicas keep theirs", "deploy again without it")

    @abstractmethod
    def close(self, drain_s: float = 0.0, join_s: float = JOIN_S) -> None:
        """Takes no more requests, waits up to drain_s for those accepted, and fails the rest.

        join_s: how long a step under way may hold this up. Past it all requests are failed all the
        same, and the step is left to itself.
        """

    # How requests are taken.

    @abstractmethod
    def _put(
        self, request: AnyRequest, make: Callable[[], Job], sink: Callable[[Any], None] | None
    ) -> Handle[Any]:
        """Queues a request, of which `make` makes the job. Raises what `submit` raises."""

    @abstractmethod
    def _report(self, request: AnyRequest, terminal: Terminal) -> None:
        """Tells the engine's owner of the end of a request."""

    def _job(self, request: Request) -> Job:
        """Raises ValueError and TooLarge for a request that cannot be done."""
        given = self.model, request, self.longest, self._snapshot_points
        return prepare(*given, self.config.max_steps)

    def _limit_s(self, request: AnyRequest) -> float | None:
        limits = (request.timeout_s, self.config.request_timeout_s)
        return min((s for s in limits if s is not None), default=None)
