"""What the HTTP side may use of an engine: `EngineClient`, and the `ServedModel` that it serves.

Neither has a network or a tensor in it, and this module does not load torch, so that an engine may
live in another process one day.
`Engine` is the only implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future
    from contextlib import AbstractContextManager
    from pathlib import Path

    from sfumato.api import Model
    from sfumato.diffusion.constraints.call_grammar import Source
    from sfumato.diffusion.sampler_config import SamplerConfig
    from sfumato.engine.decision import DecisionRequest
    from sfumato.engine.engine_config import EngineConfig
    from sfumato.engine.events import Failed
    from sfumato.engine.handle import DecisionHandle, DecisionSink, Handle, Sink
    from sfumato.engine.request import Request
    from sfumato.engine.stats import EngineState, Health
    from sfumato.model.model_config import ModelConfig
    from sfumato.tasks.works import Prompt
    from sfumato.text.template import ChatTemplate
    from sfumato.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model as clients of its engine see it. Hashed by identity."""

    name: str  # of its file or folder
    embedded: bool  # whether it is the demonstration model that comes with this package
    family: str  # as people write it
    device: str
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    sampler_defaults: SamplerConfig
    end_ids: tuple[int, ...]
    written: float | None = None  # when its weights were, in seconds since 1970
    nbytes: int | None = None  # of its files of weights
    undecided: str | None = None  # why it cannot answer questions; None: it can

    @classmethod
    def of(cls, model: Model) -> ServedModel:
        """For the process that has the model."""
        from sfumato.api import EMBEDDED  # which loads torch

        return cls(
            model.path.name,
            model.path == EMBEDDED,
            model.family.title,
            str(model.network.device),
            model.config,
            model.tokenizer,
            model.template,
            model.sampler_defaults,
            model.end_ids,
            *_files(model.path),
            _undecided(model),
        )


def _undecided(model: Model) -> str | None:
    """Why no question can be read with this model: what its tokenizer or chat template lacks."""
    try:
        _ = model.read_template
    except ValueError as error:
        return str(error)
    return None


def _files(path: Path) -> tuple[float | None, int | None]:
    """When the newest file of weights was written, and bytes of all; None where the files are
    gone."""
    try:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
        states = [file.stat() for file in files or [path]]
    except OSError:
        return None, None
    return max(state.st_mtime for state in states), sum(state.st_size for state in states)


class EngineClient(Protocol):
    """An engine, for those who send it requests. Any thread may call."""

    @property
    def served(self) -> ServedModel:
        """The model that answers."""
        ...

    @property
    def config(self) -> EngineConfig:
        """Slots, queue and limits."""
        ...

    # Requests.

    def submit(self, request: Request, sink: Sink | None = None) -> Handle:
        """Queues a request. sink: called with each of its events, in a thread of the engine, and
        must not block.

        Raises ValueError, naming the field, for what cannot be done; TooLarge, a ValueError, for
        what no slot can ever hold; QueueFull; NotReady; EngineDead.
        """
        ...

    def offer(self, request: Request, sink: Sink | None = None) -> Handle | None:
        """Submits a request; a full queue gives None and counts as no refusal."""
        ...

    def decide(self, request: DecisionRequest, sink: DecisionSink | None = None) -> DecisionHandle:
        """Queues a decision, whose terminal event is a `Decided` or a `Failed` and whose only event
        it is. Raises what `submit` raises; the fields of a question are named
        "questions.<id>.<field>"."""
        ...

    def try_grammar(self, source: Source, client: str) -> Future[Any]:
        """Begins to compile a grammar in another process, within limits, as every grammar of a
        client has to be before its request is submitted. Clients take turns. Cancelling the future
        ends it; the future, and this, raise what `submit` raises. May take some milliseconds."""
        ...

    def check(self, request: Request) -> None:
        """Raises what `submit` raises for a request that cannot be done."""
        ...

    def drop(self, request: Request, terminal: Failed) -> None:
        """Reports the end of a request that was checked and then never submitted."""
        ...

    def late(self, request: Request) -> str | None:
        """Why the deadline ends a request that is not submitted yet; None before its deadline."""
        ...

    def refusals(self, request: Request | DecisionRequest) -> AbstractContextManager[None]:
        """Reports a refusal of the request that is raised within the context."""
        ...

    # Prompts.

    def prompt(self, request: Request) -> Prompt:
        """The request's prompt as tokens: for a caller who needs the length, or who submits the
        prompt several times and then sets `Request.made`. Raises ValueError and TooLarge."""
        ...

    def check_length(self, text: str, field: str) -> None:
        """Raises TooLarge, naming the field, for a text that no context here could hold. The text
        is not tokenized for that."""
        ...

    # State.

    def now(self) -> float:
        """The engine's clock in seconds, for `Request.since`."""
        ...

    def health(self) -> Health:
        """Whether requests are taken."""
        ...

    @property
    def death(self) -> str | None:
        """Why the engine has stopped and will not go on by itself; None where it has not."""
        ...

    def state(self) -> EngineState:
        """Running requests, slots, totals and speeds, as of about now."""
        ...

    def used_memory(self) -> int | None:
        """Bytes that the engine's process holds on the model's device; None where unknown."""
        ...

    def reset_prefix_cache(self) -> Future[int]:
        """Empties the free slots before the next step; gives how many held tokens. Raises
        EngineDead."""
        ...
