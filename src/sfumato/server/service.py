"""What every route works with: the engine, the settings, and the texts of tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar
from weakref import WeakValueDictionary

from fastapi import Request as HttpRequest

from sfumato import __version__
from sfumato.embedded_questions import MOST_TOKENS
from sfumato.engine import Prompt, Request, ServedModel
from sfumato.engine.any_engine import AnyEngine
from sfumato.engine.request import AnyRequest
from sfumato.media.patches import Patches
from sfumato.refused import Refused
from sfumato.server.http.admission import Admission
from sfumato.server.http.errors import RETRY_LATER, ApiError, of_prompt
from sfumato.server.http.inflight import InFlight
from sfumato.server.http.middleware import WITHIN
from sfumato.server.http.pictures import OnPicture, PictureReader
from sfumato.server.models import Models
from sfumato.server.response_store import ResponseStore
from sfumato.server.schemas import Body
from sfumato.server.settings import ServerSettings
from sfumato.tasks.works import PlacedPicture

R = TypeVar("R", bound=AnyRequest)
FINGERPRINT = f"sfumato-{__version__}"


@dataclass(frozen=True)
class Service:
    models: Models
    settings: ServerSettings
    started: int = field(default_factory=lambda: int(time.time()))
    on_picture: OnPicture = lambda seconds, is_read: None
    adapter: str | None = None  # the name of the one that a request asks for
    background: bool = False  # whether its request yields to others
    admission: Admission = field(init=False)
    pictures: PictureReader = field(init=False)
    responses: ResponseStore = field(init=False)
    # By the id of their first request, for those who cancel them from another connection.
    running: WeakValueDictionary[str, InFlight] = field(default_factory=WeakValueDictionary)

    def __post_init__(self) -> None:
        object.__setattr__(self, "responses", ResponseStore(self.settings.response_store))
        object.__setattr__(self, "admission", Admission(self.settings.max_body))
        hosts, folder = self.settings.image_hosts, self.settings.image_folder
        object.__setattr__(self, "pictures", PictureReader(hosts, folder, self.on_picture))

    @property
    def engine(self) -> AnyEngine:
        """The engine of the model that is loaded. Raises ApiError while no model is."""
        return self.models.engine

    @property
    def model(self) -> ServedModel:
        return self.engine.served

    @property
    def name(self) -> str:
        """The name of the model that answers: the adapter of a request, else the model that is
        loaded, or was the last one."""
        return self.adapter or self.models.name

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which a client can mean a model."""
        return (*self.models.names, *self.settings.aliases, *self.models.adapters.copy())

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names of the model that is loaded: the settings have those of the first model."""
        is_first = self.models.name == self.models.names[0]
        return self.settings.aliases if is_first and self.adapter is None else ()

    @property
    def served_names(self) -> tuple[str, ...]:
        """All names of the model that is loaded, and of its adapters; none while no model is."""
        if not self.models.is_loaded:
            return ()
        own = self.settings.aliases if self.models.name == self.models.names[0] else ()
        return (self.models.name, *own, *self.adapters)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters of the model that is loaded, or was the last one."""
        adapters = self.models.adapters.copy()  # other threads change it
        return tuple(name for name, each in adapters.items() if each.base == self.models.name)

    @property
    def unloaded(self) -> tuple[str, ...]:
        """The registered models and adapters that are not loaded."""
        loaded = (self.models.name, *self.adapters) if self.models.is_loaded else ()
        names = (*self.models.names, *self.models.adapters.copy())
        return tuple(name for name in names if name not in loaded)

    def registered(self, *names: str) -> str | None:
        """The model or adapter that has the first of these names that any has; None where none
        has."""
        known = next((name for name in names if name in self.names), None)
        return self.models.names[0] if known in self.settings.aliases else known

    def unknown(self, name: str) -> ApiError:
        """The error for a name that no model has, in Ollama's words, which clients look for."""
        names = ", ".join(map(repr, self.names))
        return ApiError(404, f"model {name[:200]!r} not found; there are {names}", "model")

    async def enter(self, http: HttpRequest, body: Body, may_load: bool = True) -> Service:
        """Waits until the model that the body names, or any, may be asked; see `models`. may_load:
        whether another model may be loaded for it. The service as it is for this request: with the
        adapter that the body names. Raises ApiError, also for an adapter that was unloaded, and in
        the background for a model that is not loaded: a batch takes none away from others."""
        wanted = self.registered(*body.asked_names) if may_load else None
        unloaded = (name for name in body.asked_names if name in self.models.unloaded)
        if wanted is None and may_load and (name := next(unloaded, None)) is not None:
            raise self.unknown(name)
        adapter = self.models.adapters.get(wanted or "")
        name = wanted if adapter is None else adapter.base
        background = WITHIN in http.scope
        if not self.models.entered(http, name):
            if background:
                message = f"{name or self.name!r} is not loaded, and a batch loads no model"
                raise ApiError(429, message, code="model_loading", headers=dict(RETRY_LATER))
            async with body.envelope.apart():
                began = time.monotonic()
                await self.models.wait(http, name)
                body.envelope.waited_s = time.monotonic() - began
        if (number := body.adapter_number) is not None:
            wanted = self._numbered(number)
        elif adapter is None:
            if not background:
                return self
            wanted = None
        service = copy(self)  # which shares all else
        object.__setattr__(service, "adapter", wanted)
        object.__setattr__(service, "background", background)
        return service

    def _numbered(self, number: int) -> str:
        """The name of the adapter of a number. Raises ApiError."""
        named = self.engine.adapters.values()
        for each in named:
            if each.number == number:
                return each.name
        numbers = ", ".join(str(each.number) for each in named) or "none"
        raise ApiError(400, f"lora: there is no adapter {number}; there are {numbers}", "lora")

    def asking(self, requests: Sequence[R], streams: bool = False) -> list[R]:
        """The requests, with the adapter that they are for, and whether they yield to others.
        streams: whether their events go to the client as they come."""
        adapter, background = self.adapter, self.background
        return [
            replace(each, adapter=adapter, background=background, streams=streams)
            for each in requests
        ]

    def now(self) -> float:
        """The clock of all engines here, in seconds."""
        return self.engine.now() if self.models.is_loaded else time.perf_counter()

    @property
    def context(self) -> int:
        """Positions of a slot that is made at start; at most the model's context."""
        return min(self.engine.config.context, self.model.config.context_length)

    @property
    def most_unasked(self) -> int:
        """Tokens at most of a reply whose request names no limit, where the context has as many."""
        most = self.settings.max_tokens
        return most if self.model.packaged is None else min(most, MOST_TOKENS)

    def limit(
        self, given: int | None, prompt: int, canvas: int | None, is_most: bool = False
    ) -> int:
        """Tokens of a reply at most; None and -1 mean what fits. is_most: whether the limit is only
        the most that a client would take, as agents send it: no larger slot is made for it."""
        if given is None or given == -1:
            return self._fitting(prompt, canvas)
        if not is_most:
            return given
        room = self.context - prompt + 1  # the last token of a reply is in no slot
        length = canvas or self.model.config.canvas_length
        complete = (self.model.config.context_length - prompt) // length * length
        room = min(room, complete)  # the model's own context holds complete canvases
        return min(given, max(room, self._fitting(prompt, canvas)))

    def _fitting(self, prompt: int, canvas: int | None) -> int:
        """Tokens of a reply whose request names no limit: the rest of the context after the prompt,
        rounded down to complete canvases, and at most `most_unasked`. A canvas at least: a larger
        slot is made where none holds the reply; where none is made, what a slot holds."""
        canvas = canvas or self.model.config.canvas_length
        left = (self.context - prompt) // canvas * canvas
        if self.engine.config.strict:  # the last token of a reply is in no slot
            canvas = min(canvas, self.context - prompt + 1)
        return max(1, min(self.most_unasked, max(left, canvas)))

    def prompt(self, request: Request) -> Prompt:
        """The prompt of a request's messages or ids. Raises Refused."""
        try:
            return self.engine.prompt(request)
        except Refused as error:
            raise of_prompt(error, request) from None

    def raw_prompt(
        self,
        prompt: str | Sequence[int | str | Patches],
        endpoint: str,
        user: str | None = None,
        special: bool = True,
        field: str = "prompt",
        pictures: list[PlacedPicture] | None = None,
    ) -> list[int]:
        """Ids of a prompt that is no chat: bos, then the text. Of ids and texts in one list, bos
        comes before a text that is the first. special: whether markers in a text are their tokens;
        pictures: gets those of the prompt. Raises Refused, for a prompt without a token too."""
        parts: Sequence[int | str | Patches] = [prompt] if isinstance(prompt, str) else prompt
        text = "".join(part for part in parts if isinstance(part, str))
        bos, tokens = self.model.tokenizer.bos_id, self.model.pictures
        begun = [bos] if parts and isinstance(parts[0], str) and bos is not None else []
        request, ids = Request(text, endpoint=endpoint, user=user), list(begun)
        with self.engine.refusals(request):
            self.engine.check_length(text, field)
            for part in parts:
                if isinstance(part, Patches):
                    assert tokens is not None and pictures is not None
                    pictures.append(tokens.add(ids, part))
                    continue
                own = [part] if isinstance(part, int) else self.encode(part, field, special)
                ids += own[1:] if begun and ids == own[:1] == begun else own
        if not ids:
            lacks = ", and this model has no token to begin with" if parts else ""
            raise Refused(field, f"is empty{lacks}")
        return ids

    def encode(self, text: str, field: str, special: bool = True) -> list[int]:
        """Ids of a text. Raises Refused; TooLarge where no context could hold it."""
        self.engine.check_length(text, field)
        try:
            return self.model.tokenizer.encode(text, special)
        except Refused as error:
            raise error.about(field) from None

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        return [token_text(self.model, token) for token in ids]


@lru_cache(maxsize=2**16)
def token_text(model: ServedModel, token: int) -> str:
    """The text of one token; empty for padding of the vocabulary that no token uses."""
    tokenizer = model.tokenizer
    return tokenizer.token_text(token) if token < tokenizer.vocab_size else ""
