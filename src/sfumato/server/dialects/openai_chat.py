"""OpenAI's chat completions: a body becomes requests, and replies become choices or chunks.

The text side checks messages of every API; the checks here are of OpenAI's alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from sfumato.api import Reply
from sfumato.diffusion.prediction import PredictedText
from sfumato.engine import Account, Finished, Request
from sfumato.options.limits import STRENGTH
from sfumato.refused import Refused
from sfumato.server import schemas
from sfumato.server.chat import objects
from sfumato.server.chat.call import (
    ChatCall,
    Thinking,
    check_count,
    requests_of,
)
from sfumato.server.chat.deltas import DeltaRenderer, Entry
from sfumato.server.chat.pictures import message_part, of_url
from sfumato.server.chat.sampling import (
    limited,
)
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.route import SSE, Dialect, Frame
from sfumato.server.schemas import (
    AddPrompt,
    Body,
    Continue,
    Generation,
    MaxTokens,
    Messages,
    Objects,
    Only,
    TemplateKwargs,
    Tools,
    Unknown,
    within,
    without_effect,
)
from sfumato.server.service import Service
from sfumato.server.settings import ServerSettings
from sfumato.text.calls import ToolCall

NoFunctions = Only([], "none", "auto", why="is long deprecated; use tools and tool_choice")


class Prediction(Body):
    """What the canvases of a reply begin as."""

    type: Annotated[Any, Only("content", why='must be "content"')] = None
    content: Annotated[str | Objects, WithJsonSchema(schemas.TEXTS)] = Field(
        description="A text, or text parts."
    )
    strength: float | None = Field(
        None, ge=0, le=1, description="Share of the positions that begins as noise."
    )


@without_effect(
    "metadata prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier "
    "service_tier",
    audio=Only(why="audio is not supported"),
    modalities=Only(["text"], why="only text is supported"),
    functions=NoFunctions,
    function_call=NoFunctions,
    store=Only(False, why="nothing is stored here"),
    web_search_options=Only(why="there is no web search here"),
    moderation=Only(why="there is no moderation here"),
    verbosity=Only("medium", why="cannot be set; say in a message how long the answer should be"),
)
class ChatBody(Generation):
    messages: Messages = Field(min_length=1)
    add_generation_prompt: AddPrompt = None
    continue_final_message: Continue = None
    max_completion_tokens: MaxTokens = Field(None, description="The same as max_tokens.")
    logprobs: bool | None = Field(None, description="Of the step that settled each token.")
    top_logprobs: Annotated[int | None, within("top_tokens")] = None
    tools: Tools = None
    tool_choice: Annotated[str | dict[str, Any] | None, WithJsonSchema(schemas.TOOL_CHOICE)] = (
        Field(
            None,
            description='none, auto, required, or {"type": "function", "function": {"name": …}}.',
        )
    )
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most.")
    reasoning_effort: Annotated[str | None, WithJsonSchema(schemas.EFFORT)] = Field(
        None, description="none and minimal: no thinking; low, medium, high, xhigh, max: thinking."
    )
    chat_template_kwargs: TemplateKwargs | None = None
    prediction: Prediction | None = Field(
        None, description="A text that the reply is expected to resemble."
    )


_KEYS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {
        *("role", "content", "name", "tool_calls", "refusal", "annotations", "audio"),
        *("function_call", "reasoning_content", "reasoning"),
    },
    "tool": {"role", "content", "name", "tool_call_id"},
}
IMAGES = ("image_url", "input_image")
UNSUPPORTED = {
    "input_audio": "audio is not supported",
    "file": "files are not supported",
    "input_file": "files are not supported",
    "video_url": "videos are not supported",
}


def conversation(
    messages: Sequence[Mapping[str, Any]], settings: ServerSettings, unknown: Unknown
) -> list[dict[str, Any]]:
    """The messages in the four roles of the chat template. Raises Refused."""
    check_count(messages, settings)
    return [_message(message, f"messages[{i}]", unknown) for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str, unknown: Unknown) -> dict[str, Any]:
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role == "function":
        raise Refused(f"{where}.role", "function is deprecated", "use tool")
    keys = _KEYS.get(role) if isinstance(role, str) else None
    if keys is None:
        raise Refused(f"{where}.role", "must be one of system, developer, user, assistant, tool")
    unknown.check(message, keys, where)
    for key in ("audio", "function_call"):
        if message.get(key) is not None and key in keys:
            raise Refused(f"{where}.{key}", "is not supported")
    clean = {key: value for key, value in message.items() if key in keys} | {"role": role}
    if not isinstance(clean.get("refusal"), str | None):
        raise Refused(f"{where}.refusal", "must be text")
    if role == "assistant" and clean.get("content") is None and not clean.get("tool_calls"):
        clean["content"] = clean.get("refusal") or ""
    if isinstance(clean.get("content"), list):
        clean["content"] = _parts(clean["content"], f"{where}.content")
    return clean


def _parts(parts: Sequence[Any], where: str) -> list[Any]:
    checked = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        here = f"{where}[{i}]"
        if isinstance(kind, str) and kind in UNSUPPORTED:
            raise Refused(here, UNSUPPORTED[kind], code="unsupported")
        if kind == "refusal":
            part = {"type": "text", "text": part.get("refusal")}
        elif kind in IMAGES:
            part = message_part(of_url(part, here))
        checked.append(part)
    return checked


def prediction_of(given: Prediction) -> PredictedText:
    """Raises Refused."""
    texts = [given.content] if isinstance(given.content, str) else []
    for place, part in enumerate(given.content if isinstance(given.content, list) else ()):
        where = f"prediction.content[{place}]"
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Refused(where, 'must be {"type": "text", "text": …}')
        texts.append(part["text"])
    strength = STRENGTH if given.strength is None else given.strength
    return PredictedText("".join(texts), strength)


PATH = "/v1/chat/completions"


def parse(service: Service, body: ChatBody) -> list[Request]:
    """One request for each of the n replies. Raises Refused."""
    body = limited(body)
    messages = conversation(body.messages, service.settings, body.envelope.unknown)
    _check(body, service.settings.max_choices)
    kwargs = body.chat_template_kwargs
    thinks = None if kwargs is None else kwargs.enable_thinking
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    call = ChatCall(
        PATH,
        body,
        messages,
        wanted=body.continue_final_message,
        opened=body.add_generation_prompt,
        tools=body.tools,
        tool_choice=body.tool_choice,
        is_single=body.parallel_tool_calls is False,
        thinking=Thinking(body.reasoning_effort, thinks, body.max_thinking_tokens),
        logprobs=bool(body.logprobs),
        alternatives=body.top_logprobs,
        prediction=None if body.prediction is None else prediction_of(body.prediction),
        limit=given,
        count=body.n or 1,
        user=body.user,
        sized=("n", "max_tokens", "top_logprobs"),
    )
    return requests_of(service, call)


def _check(body: ChatBody, max_choices: int) -> None:
    if (body.n or 1) > max_choices:
        raise Refused("n", f"at most {max_choices} replies")
    if body.top_logprobs and not body.logprobs:
        raise Refused("top_logprobs", "needs logprobs to be true")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise Refused(("max_tokens", "max_completion_tokens"), "differ", "send one")


class ChoicesRenderer(DeltaRenderer):
    """Choices of one body, and of the chunks of a stream: of chats, and of text completions."""

    ids: str  # what ids begin with
    kind: str  # of a body
    kind_of_chunks: str
    empty: ClassVar[Frame]  # what the last chunk of a reply brings

    def __init__(
        self,
        service: Service,
        body: Generation,
        requests: Sequence[Request],
        alternatives: int | None,
        progress: bool = False,
    ) -> None:
        """alternatives: of each token; None where no log probabilities are wanted."""
        by_id = body.return_tokens_as_token_ids
        super().__init__(
            service, requests, body, alternatives=alternatives, by_id=by_id, progress=progress
        )
        options = body.stream_options
        self._usage = options is not None and bool(options.include_usage)
        self._count = body.n or 1
        self._base = self._head(self.kind_of_chunks)

    @abstractmethod
    def shown(self, number: int, reply: Reply) -> Frame:
        """What a choice has of a reply."""

    @abstractmethod
    def logprobs(self, number: int, collected: CollectedReply) -> Frame | None:
        """The log probabilities of a choice."""

    @abstractmethod
    def reason(self, reply: Reply) -> str:
        """Why a reply has ended."""

    def more(self, number: int, end: Finished) -> Frame:
        """Further fields of a choice."""
        return {}

    def body(self, replies: Sequence[CollectedReply]) -> Mapping[str, Any]:
        ends = [collected.finished for collected in replies]
        accounts = [end.account for end in ends]
        notes = [*self.notes, *(text for end in ends for text in self.warnings(end.reply))]
        return {
            **self._head(self.kind),
            "usage": objects.usage(accounts, self._count),
            **objects.figures(ends, notes),
            "choices": self._choices(replies),
        }

    def _choices(self, replies: Sequence[CollectedReply]) -> Iterator[dict[str, Any]]:
        for number, collected in enumerate(replies):
            end = collected.finished
            choice = {
                "index": number,
                **self.shown(number, end.reply),
                "logprobs": self.logprobs(number, collected),
                "finish_reason": self.reason(end.reply),
                **self.verified(end.reply),
                **self.more(number, end),
            }
            if len(replies) > 1:
                choice["timings"] = objects.timings(end.account)
            yield choice

    def extra(self, fields: Frame) -> Frame:
        return self._base | {"choices": []} | fields

    def end(self, number: int, end: Finished) -> Iterable[Frame]:
        last = self.chunk(number, self.empty, self.reason(end.reply))
        last["choices"][0] |= self.verified(end.reply)
        last["timings"] = objects.timings(end.account)
        last |= self.warned(end.reply)
        if "warnings" in last:
            self.notes = []
        yield last

    def closed(self, accounts: Sequence[Account]) -> Iterable[Frame]:
        if self._usage:
            usage = objects.usage(accounts, self._count)
            # Clients of llama-server read the timings of a single reply there.
            timings = {"timings": objects.timings(accounts[0])} if len(accounts) == 1 else {}
            yield self.extra({"usage": usage, **timings})

    def chunk(
        self, number: int, part: Frame, reason: str | None = None, logprobs: Frame | None = None
    ) -> Frame:
        """A part of a reply."""
        choice = {"index": number, **part, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self._usage else {}
        return {**self._base, "choices": [choice], **usage}

    def _head(self, kind: str) -> Frame:
        return objects.head(self.ids, kind, self.requests[0].id, self.service.name)


class ChatRenderer(ChoicesRenderer):
    """Choices with messages, and chunks with deltas."""

    ids, kind, kind_of_chunks = "chatcmpl", "chat.completion", "chat.completion.chunk"
    empty: ClassVar[Frame] = {"delta": {}}

    def __init__(self, service: Service, body: ChatBody, requests: Sequence[Request]) -> None:
        alternatives = (body.top_logprobs or 0) if body.logprobs else None
        super().__init__(service, body, requests, alternatives, bool(body.return_progress))

    def shown(self, number: int, reply: Reply) -> Frame:
        return {"message": message(reply)}

    def logprobs(self, number: int, collected: CollectedReply) -> Frame | None:
        entries = self.entries(number, collected)
        return None if entries is None else {"content": entries, "refusal": None}

    def reason(self, reply: Reply) -> str:
        return objects.finish_reason(reply, reply.tool_calls)

    def begin(self, number: int) -> Iterable[Frame]:
        yield self._delta(number, {"role": "assistant", "content": ""})

    def thought(self, number: int, piece: str) -> Iterable[Frame]:
        yield self._delta(number, {"reasoning_content": piece})

    def text(self, number: int, piece: str, tokens: list[Entry] | None) -> Iterable[Frame]:
        logprobs = None if tokens is None else {"content": tokens, "refusal": None}
        yield self._delta(number, {"content": piece}, logprobs)

    def call(
        self, number: int, at: int, call: ToolCall, arguments: Sequence[str]
    ) -> Iterable[Frame]:
        begun = objects.call_object(call, "")
        yield self._delta(number, {"tool_calls": [{"index": at, **begun}]})
        for piece in arguments:
            part = {"index": at, "function": {"arguments": piece}}
            yield self._delta(number, {"tool_calls": [part]})

    def _delta(self, number: int, delta: Frame, logprobs: Frame | None = None) -> Frame:
        return self.chunk(number, {"delta": delta}, logprobs=logprobs)


def message(reply: Reply) -> dict[str, Any]:
    """The assistant's message; content is null where there are only tool calls."""
    calls = [objects.call_object(call, objects.arguments(call)) for call in reply.tool_calls]
    thought = {} if reply.thought is None else {"reasoning_content": reply.thought}
    return {
        "role": "assistant",
        "content": None if calls and not reply.text else reply.text,
        "refusal": None,
        **thought,
        **({"tool_calls": calls} if calls else {}),
    }


OPENAI_CHAT = Dialect(
    name="chat_completions",
    path=PATH,
    tag="OpenAI",
    help="The reply to a conversation, as one body or as a stream of chunks.",
    body_type=ChatBody,
    parse=parse,
    renderer=ChatRenderer,
    streams=lambda body: bool(body.stream),
    wire=replace(SSE, end="data: [DONE]\n\n"),
)
