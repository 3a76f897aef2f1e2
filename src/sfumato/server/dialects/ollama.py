"""Ollama's routes: POST /api/chat and POST /api/generate, which generate; and what its clients ask
of the model and the server: tags, show, ps, version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from sfumato.diffusion.constraints.grammar import GrammarSource, schema_source
from sfumato.engine import Finished, Request
from sfumato.options import exclusions
from sfumato.options.limits import MOST_TOKENS
from sfumato.refused import Refused
from sfumato.server.chat import objects
from sfumato.server.chat.call import (
    ChatCall,
    Thinking,
    before,
    call_token,
    check_count,
    requests_of,
)
from sfumato.server.chat.deltas import DeltaRenderer, Entry
from sfumato.server.chat.objects import written_at
from sfumato.server.chat.pictures import message_part, of_base64
from sfumato.server.chat.sampling import given_in
from sfumato.server.http.errors import ErrorForm, Wording
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.route import Dialect, Frame, Get, Post, Wire, line
from sfumato.server.schemas import (
    IDS,
    NAME,
    NULL,
    TEXT,
    TOOLS,
    Body,
    Ids,
    Ignored,
    ModelName,
    Objects,
    Only,
    Sampling,
    Schema,
    Texts,
    Unknown,
    closed,
    either,
    list_of,
    within,
    without_effect,
)
from sfumato.server.service import Service
from sfumato.server.settings import ServerSettings
from sfumato.text.calls import ToolCall

LATEST = ":latest"  # the tag of names that have none
LEVELS = ("low", "medium", "high", "max")
THINK: Schema = {"enum": [True, False, *LEVELS, None]}
FORMAT = either({"enum": ["", "json", None]}, {"type": "object"})
NO_IDS = either(IDS | {"maxItems": 0}, NULL)
_ANY: Schema = {}
_NO_IMAGES: Schema = {"images": either({"const": []}, NULL)}
_CALL = closed(
    {"function": closed({"name": {"type": "string", "pattern": NAME}}, {"arguments": _ANY})},
    {"id": either(TEXT, NULL), "type": {"const": "function"}},
)
_CALL["properties"]["function"]["properties"] |= {
    "arguments": either({"type": "object"}, NULL),
    "index": _ANY,
    "description": _ANY,
}
_TEXT = {"content": TEXT}
MESSAGES = either(
    list_of(
        either(
            closed({"role": {"enum": ["system", "developer", "user"]}, **_TEXT}, _NO_IMAGES),
            closed(
                {"role": {"const": "assistant"}},
                _NO_IMAGES
                | {"content": either(TEXT, NULL), "thinking": _ANY}
                | {"tool_calls": either(list_of(_CALL), NULL), "tool_name": NULL},
            ),
            closed(
                {"role": {"const": "tool"}, **_TEXT},
                _NO_IMAGES
                | {name: either(TEXT, NULL) for name in ("tool_name", "name", "tool_call_id")},
            ),
        )
    ),
    NULL,
)

_PENALTY = "penalties are not supported: the tokens of a canvas are drawn together"
Think = Annotated[
    Any,
    WithJsonSchema(THINK),
    Field(description="true, false, or low, medium, high, max: tokens of a thought (false)."),
]
Format = Annotated[
    Any,
    WithJsonSchema(FORMAT),
    Field(description="json, or the JSON schema that the answer has to match."),
]


@without_effect(
    "num_ctx num_keep num_batch num_gpu num_gqa num_thread main_gpu low_vram numa f16_kv "
    "logits_all vocab_only use_mmap use_mlock embedding_only penalize_newline repeat_last_n "
    "mirostat_tau mirostat_eta",
    mirostat=Only(0, why="is not supported"),
    repeat_penalty=Only(0, 1, why=_PENALTY),
    tfs_z=Only(0, 1, why="is not supported; use top_p"),
    typical_p=Only(0, 1, why="is not supported; use top_p"),
)
class OllamaOptions(Sampling):
    """Ollama's options, and the fields of our own."""

    num_predict: int | None = Field(
        None, ge=-2, le=MOST_TOKENS, description="Tokens at most; -1, -2, 0: what fits."
    )


class Tagged(Body):
    """A body of Ollama's clients, who add a tag to the names of models."""

    @property
    def asked_names(self) -> tuple[str, ...]:
        names = super().asked_names
        return (*names, *(name.removesuffix(LATEST) for name in names))


@without_effect("truncate shift")
class OllamaGeneration(Tagged):
    """What both routes share."""

    model: ModelName = None
    options: OllamaOptions | None = None
    stream: bool | None = Field(None, description="False: one body; else lines of JSON.")
    stream_drafts: bool | None = Field(None, description="Also a line for every step.")
    format: Format = None
    think: Think = None
    logprobs: bool | None = Field(None, description="Of the step that settled each token.")
    top_logprobs: Annotated[int | None, within("top_tokens")] = None
    keep_alive: Ignored = None


class OllamaChatBody(OllamaGeneration):
    messages: Annotated[Objects | None, WithJsonSchema(MESSAGES)] = Field(
        None, description="Empty: nothing is generated; the model is loaded already."
    )
    tools: Annotated[Objects | None, WithJsonSchema(TOOLS)] = None


@without_effect(
    template=Only("", why="cannot be set; use raw"),
    width=Only(0, why="no images are made here"),
    height=Only(0, why="no images are made here"),
    steps=Only(0, why="no images are made here; use options.max_steps"),
)
class OllamaGenerateBody(OllamaGeneration):
    prompt: str | None = Field(None, description="Empty: nothing is generated.")
    images: Texts | None = Field(None, description="Pictures, in base64.")
    suffix: str | None = Field(None, description="What comes after the reply.")
    system: str | None = None
    raw: bool | None = Field(None, description="True: no chat template; markers are tokens.")
    context: Annotated[Ids | None, WithJsonSchema(NO_IDS)] = Field(
        None, description="Refused unless empty: send messages to /api/chat."
    )


@without_effect("verbose system template options")
class OllamaShowBody(Body):
    model: str | None = None
    name: str | None = Field(None, description="The same as model.")


_SCHEMA = {
    "type": "object",
    "properties": {"error": {"type": "string"}},
    "required": ["error"],
}


OLLAMA_ERRORS = ErrorForm(
    lambda error: {"error": error.message}, name="OllamaError", schema=_SCHEMA
)


def now() -> str:
    """The time of the day, in UTC."""
    return shown(datetime.now(UTC))


def shown(moment: datetime) -> str:
    """moment: in UTC."""
    return moment.isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, round(1e9 * seconds))


_KEYS = {
    "system": {"content"},
    "user": {"content"},
    "assistant": {"content", "thinking", "tool_calls"},
    "tool": {"content", "tool_name", "name", "tool_call_id"},
}


def conversation(
    given: Sequence[Mapping[str, Any]], settings: ServerSettings, unknown: Unknown
) -> list[dict[str, Any]]:
    """The messages in the roles of the chat template. Clients may leave out which call a result
    belongs to, and send results in the order of the calls. Raises Refused."""
    check_count(given, settings)
    messages: list[dict[str, Any]] = []
    calls: list[Any] = []  # of the last message that is no result
    results = 0  # of these calls, so far
    for number, message in enumerate(given):
        clean = _message(message, f"messages[{number}]", unknown)
        if clean["role"] == "tool":
            function = _of(calls[results] if results < len(calls) else None, "function")
            # LiteLLM leaves ids out of calls and sends them in results, where they say nothing.
            if calls and all(_of(call, "id") is None for call in calls):
                clean.pop("tool_call_id", None)
            if clean["name"] is None and "tool_call_id" not in clean:
                clean["name"] = _of(function, "name")
            results += 1
        else:
            made, results = clean.get("tool_calls"), 0
            calls = made if isinstance(made, list) else []
        messages.append(clean)
    return messages


def _of(value: Any, name: str) -> Any:
    """A field of what may be no object."""
    return value.get(name) if isinstance(value, Mapping) else None


def _message(message: Mapping[str, Any], where: str, unknown: Unknown) -> dict[str, Any]:
    role = message.get("role")
    role = "system" if role == "developer" else role
    if not isinstance(role, str) or role not in _KEYS:
        raise Refused(f"{where}.role", "must be one of system, user, assistant, tool")
    unknown.check(message, _KEYS[role] | {"role", "images"}, where)
    content = message.get("content")
    if not isinstance(content, str | None):
        raise Refused(f"{where}.content", "must be text")
    clean: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        clean["content"] = content or ""
    if (images := message.get("images")) not in (None, []):
        if role not in ("user", "tool"):
            raise Refused(f"{where}.images", "only messages of users and tools have pictures")
        clean["content"] = _with_images(content or "", images, f"{where}.images")
    if role == "tool":
        clean["name"] = message.get("tool_name") or message.get("name")
    for name in ("tool_calls", "tool_call_id"):
        if name in _KEYS[role] and message.get(name) is not None:
            clean[name] = message[name]
    return clean


def _with_images(text: str, images: Any, where: str) -> list[dict[str, Any]]:
    """The pictures, and the text behind them. Raises Refused."""
    if not isinstance(images, list):
        raise Refused(where, "must be a list of pictures in base64")
    sources = (of_base64(image, f"{where}[{i}]") for i, image in enumerate(images))
    return [*map(message_part, sources), {"type": "text", "text": text}]


CHAT_PATH = "/api/chat"
GENERATE_PATH = "/api/generate"


def parse_chat(service: Service, body: OllamaChatBody) -> list[Request]:
    """Raises Refused."""
    unknown = body.envelope.unknown
    messages = conversation(body.messages or (), service.settings, unknown)
    return requests_of(service, _call(body, CHAT_PATH, messages=messages, tools=body.tools))


def parse_generate(service: Service, body: OllamaGenerateBody) -> list[Request]:
    """Raises Refused."""
    if body.context:
        raise Refused(
            "context", "is not supported", "send the conversation as messages to /api/chat"
        )
    prompt, suffix = body.prompt or "", body.suffix or ""
    if not (suffix or body.raw):
        system = [{"role": "system", "content": body.system}] if body.system else []
        content = _with_images(prompt, body.images, "images") if body.images else prompt
        messages = [*system, {"role": "user", "content": content}]
        return requests_of(service, _call(body, GENERATE_PATH, messages=messages))
    exclusions.check(exclusions.OLLAMA, given_in(body))
    if body.images:
        raise Refused("images", "goes with neither raw nor suffix", "send one of them")
    ids = service.raw_prompt(prompt, GENERATE_PATH, special=bool(body.raw))
    call = _call(body, GENERATE_PATH)
    if suffix:
        call = before(service, call, suffix)
    return requests_of(service, call, [ids])


def _call(body: OllamaGeneration, endpoint: str, **prompt: Any) -> ChatCall:
    """Raises Refused."""
    if body.top_logprobs and not body.logprobs:
        raise Refused("top_logprobs", "needs logprobs to be true")
    options, limit = options_of(body), None
    if options.num_predict is not None and options.num_predict > 0:  # others: what fits
        limit = options.num_predict
    return ChatCall(
        endpoint,
        options,
        forms=_format(body.format),
        thinking=_thinking(body, options),
        logprobs=bool(body.logprobs),
        alternatives=body.top_logprobs,
        limit=limit,
        is_most=True,
        **prompt,
    )


def options_of(body: OllamaGeneration) -> OllamaOptions:
    """The options, with the body's own fields of sending and when it had arrived."""
    given = body.options or OllamaOptions.model_validate({})
    sending = {"stream": streams(body), "stream_drafts": body.stream_drafts}
    options = given.model_copy(update=sending)
    options.envelope.since = body.envelope.since
    options.envelope.pictures = body.envelope.pictures
    return options


def streams(body: OllamaGeneration) -> bool:
    """Whether the reply is streamed: by default it is."""
    return body.stream is not False


def _thinking(body: OllamaGeneration, options: OllamaOptions) -> Thinking:
    """Raises Refused."""
    think = body.think
    if isinstance(think, str) and think in LEVELS:
        return Thinking(think, None, options.max_thinking_tokens, "think", "think")
    if not isinstance(think, bool | None):
        raise Refused("think", f"must be true, false or one of {', '.join(LEVELS)}")
    return Thinking(None, bool(think), options.max_thinking_tokens, "think", "think")


def _format(given: Any) -> Iterator[GrammarSource]:
    """Raises ValueError."""
    if given is None or given == "":
        return
    if given == "json":
        given = {"type": "object"}
    if not isinstance(given, dict):
        raise Refused("format", 'must be "json" or a JSON schema object')
    yield schema_source(given, "format")


# JSON may begin with a space, and clients would read an empty line as a broken object.
WIRE = Wire("application/x-ndjson", line, keepalive=" ")


class OllamaRenderer(DeltaRenderer):
    """Text and thought in pieces, each in an object of its own; the last one says done."""

    def __init__(
        self, service: Service, body: OllamaGeneration, requests: Sequence[Request]
    ) -> None:
        top = (body.top_logprobs or 0) if body.logprobs else None
        super().__init__(service, requests, body, alternatives=top)
        self._waited_s = body.envelope.waited_s

    def content(
        self, text: str, thought: str = "", calls: Sequence[ToolCall] = (), at: int = 0
    ) -> Frame:
        """What a part of a reply stands in. at: how many calls there were before."""
        message: Frame = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = [
                {
                    "id": objects.new_id("call"),
                    "function": {
                        "index": place,
                        "name": call.name,
                        "arguments": dict(call.arguments),
                    },
                }
                for place, call in enumerate(calls, at)
            ]
        return {"message": message}

    def body(self, replies: Sequence[CollectedReply]) -> Mapping[str, Any]:
        (collected,) = replies
        reply, entries = collected.finished.reply, self.entries(0, collected)
        shown = self.content(reply.text, reply.thought or "", reply.tool_calls)
        logs = {} if entries is None else {"logprobs": entries}
        return self._part(shown | self._end(collected.finished) | logs)

    def extra(self, fields: Frame) -> Frame:
        return self._part(self.content("") | {"done": False} | fields)

    def thought(self, number: int, piece: str) -> Iterable[Frame]:
        yield self.extra(self.content("", piece))

    def text(self, number: int, piece: str, tokens: list[Entry] | None) -> Iterable[Frame]:
        logs = {} if tokens is None else {"logprobs": tokens}
        yield self.extra(self.content(piece) | logs)

    def calls(self, number: int, at: int, calls: Sequence[ToolCall]) -> Iterable[Frame]:
        yield self.extra(self.content("", "", calls, at))

    def end(self, number: int, end: Finished) -> Iterable[Frame]:
        yield self._part(self.content("") | self._end(end))

    def _part(self, fields: Frame) -> Frame:
        return {"model": self.service.name, "created_at": now(), **fields}

    def _end(self, end: Finished) -> Frame:
        """Tokens, and times in nanoseconds."""
        account = end.account
        return {
            "done": True,
            "done_reason": "length" if end.reply.stop_reason == "max_tokens" else "stop",
            "total_duration": nanoseconds(account.total_s),
            "load_duration": nanoseconds(self._waited_s),
            "prompt_eval_count": account.prompt_tokens,
            "prompt_eval_duration": nanoseconds(account.prefill_s),
            "eval_count": account.output_tokens,
            "eval_duration": nanoseconds(account.denoise_s + account.commit_s),
            **self.warned(end.reply),
            **self.verified(end.reply),
        }


class GenerateRenderer(OllamaRenderer):
    """The same as a completion."""

    def content(
        self, text: str, thought: str = "", calls: Sequence[ToolCall] = (), at: int = 0
    ) -> Frame:
        return {"response": text} | ({"thinking": thought} if thought else {})


_WORDING: Wording = {
    **{name: f"options.{name}" for name in OllamaOptions.model_fields},
    "max_tokens": "options.num_predict",
}


def _loaded(service: Service, body: OllamaGeneration, content: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a client that only wants the model loaded, or unloaded: the model stays."""
    unloads = body.keep_alive in (0, "0", "0s")
    reason = "unload" if unloads else "load"
    end = {"done": True, "done_reason": reason}
    return {"model": service.name, "created_at": now(), **content, **end}


def _without_messages(service: Service, body: OllamaChatBody) -> dict[str, Any] | None:
    if body.messages:
        return None
    # The other fields are checked as those of any message.
    parse_chat(service, body.model_copy(update={"messages": [{"role": "user", "content": ""}]}))
    return _loaded(service, body, {"message": {"role": "assistant", "content": ""}})


def _without_prompt(service: Service, body: OllamaGenerateBody) -> dict[str, Any] | None:
    if body.prompt or body.suffix or body.system or body.images:
        return None
    parse_generate(service, body.model_copy(update={"prompt": " "}))  # checks the other fields
    return _loaded(service, body, {"response": ""})


OLLAMA_CHAT = Dialect(
    name="ollama_chat",
    path=CHAT_PATH,
    tag="Ollama",
    help="The reply to a conversation, as lines of JSON or, without a stream, as one body.",
    body_type=OllamaChatBody,
    parse=parse_chat,
    renderer=OllamaRenderer,
    streams=streams,
    wire=WIRE,
    errors=OLLAMA_ERRORS,
    wording=_WORDING,
    at_once=_without_messages,
)

OLLAMA_GENERATE = Dialect(
    name="ollama_generate",
    path=GENERATE_PATH,
    tag="Ollama",
    help="The reply to a prompt, or the text between a prompt and a suffix.",
    body_type=OllamaGenerateBody,
    parse=parse_generate,
    renderer=GenerateRenderer,
    streams=streams,
    wire=WIRE,
    errors=OLLAMA_ERRORS,
    wording={"messages": "prompt", **_WORDING},
    at_once=_without_prompt,
)


VERSION = "0.12.6"
"""The version of Ollama whose API this is: clients ask for a version that has what they need."""

NEVER = "2318-01-01T00:00:00Z"  # when the model is unloaded, as Ollama writes it


def tags(service: Service) -> dict[str, Any]:
    """The loaded model under each of its names, and those that a request may have loaded."""
    listed = [_listed(service, name) for name in service.served_names]
    return {"models": listed + [_unloaded(service, name) for name in service.unloaded]}


def running(service: Service) -> dict[str, Any]:
    """The model that is loaded."""
    if not service.models.is_loaded:
        return {"models": []}
    nbytes = service.engine.used_memory()
    on_device = 0 if service.model.device == "cpu" else nbytes or 0
    more = {
        "size": nbytes or service.model.nbytes or 0,
        "size_vram": on_device,
        "expires_at": NEVER,
        "context_length": service.context,
    }
    return {"models": [_listed(service, service.name) | more]}


def show(service: Service, body: OllamaShowBody) -> dict[str, Any]:
    """Raises ApiError."""
    given = body.model or body.name
    if not given:
        raise Refused("model", "is missing", code="missing")
    name = service.registered(given, given.removesuffix(LATEST))
    if name is None:
        raise service.unknown(given)
    if name in service.unloaded:
        return {"details": _NO_DETAILS, "model_info": {}, "capabilities": ["completion"]}
    model, kind = service.model, _kind(service)
    adapter = f"ADAPTER {name}\n" if name in service.adapters else ""
    return {
        "modelfile": f"FROM {service.name}\n{adapter}",
        "parameters": f"num_ctx {service.context}",
        "template": model.template.source,
        "details": _details(service, name),
        "model_info": {
            "general.architecture": kind,
            "general.basename": name,
            f"{kind}.context_length": model.config.context_length,
            f"{kind}.embedding_length": model.config.hidden_size,
            f"{kind}.block_count": len(model.config.layers),
            f"{kind}.vocab_size": model.config.vocab_size,
            f"{kind}.canvas_length": model.config.canvas_length,
        },
        "capabilities": _capabilities(service),
        "modified_at": _modified(service),
    }


def _capabilities(service: Service) -> list[str]:
    markers = service.model.template.markers
    has_tools = call_token(service.model) is not None
    return [
        "completion",
        "insert",
        *(["tools"] if has_tools else []),
        *(["thinking"] if markers.thought_open else []),
        *(["vision"] if service.model.cut else []),
    ]


def _listed(service: Service, name: str) -> dict[str, Any]:
    return {
        **_named(name),
        "modified_at": _modified(service),
        "size": service.model.nbytes or 0,
        "digest": _digest(service, name),
        "details": _details(service, name),
    }


def _unloaded(service: Service, name: str) -> dict[str, Any]:
    """A model of which nothing but the name is known before it is loaded."""
    started = shown(datetime.fromtimestamp(service.started, UTC))
    digest = hashlib.sha256(name.encode()).hexdigest()
    about = {"modified_at": started, "size": 0, "digest": digest, "details": _NO_DETAILS}
    return {**_named(name), **about}


def _named(name: str) -> dict[str, Any]:
    full = name if ":" in name else name + LATEST
    return {"name": full, "model": full}


_NO_DETAILS: Mapping[str, Any] = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}


def _details(service: Service, name: str) -> Mapping[str, Any]:
    is_gguf = service.model.name.endswith(".gguf")
    kind = _kind(service)
    known = {"format": "gguf" if is_gguf else "safetensors", "family": kind, "families": [kind]}
    parent = service.models.name if name in service.adapters else ""
    return {**_NO_DETAILS, **known, "parent_model": parent}


def _kind(service: Service) -> str:
    return service.model.family.lower()


def _modified(service: Service) -> str:
    return shown(written_at(service))


def _digest(service: Service, name: str) -> str:
    """Differs between models. It is not that of the files, which would take minutes to read."""
    model = service.model
    own = name if name in service.adapters else ""
    text = f"{model.name} {model.written} {model.nbytes} {own}".rstrip()
    return hashlib.sha256(text.encode()).hexdigest()


_TAGS = Get(
    path="/api/tags",
    name="tags",
    tag="Ollama",
    help="The models, and each name of the one that is loaded.",
    answer=tags,
    errors=OLLAMA_ERRORS,
    has_head=True,
)
GETS = (
    replace(
        _TAGS,
        path="/api/version",
        name="version",
        help="The version of Ollama whose API this is.",
        answer=lambda service: {"version": VERSION},
    ),
    _TAGS,
    replace(
        _TAGS,
        path="/api/ps",
        name="running",
        help="The model that is loaded.",
        answer=running,
        has_head=False,
    ),
)
SHOW = Post(
    path="/api/show",
    name="show",
    tag="Ollama",
    help="The model's properties and what it can do.",
    body_type=OllamaShowBody,
    at_once=show,
    statuses=(404,),
    errors=OLLAMA_ERRORS,
    may_load=False,
)
