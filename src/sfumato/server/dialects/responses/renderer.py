"""A response as one body, and as the events of a stream; what it repeats of its request; and the
routes of those that are kept.

The body loses its lists and longer texts before the reply is written. The echo lives as long as the
reply is written, so its bytes are bounded here: nothing else counts them.

A thought is an item of its own, text is a message, and each call is an item. Items follow each
other; where text comes behind a call, it is another message.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from sfumato.engine import Account, Finished, Request
from sfumato.refused import Refused
from sfumato.server.chat import objects
from sfumato.server.chat.deltas import DeltaRenderer, Entry, Logged
from sfumato.server.dialects.responses.body import (
    ENCRYPTED,
    LOGPROBS,
    PATH,
    WORDING,
    ResponsesBody,
    new_id,
    request_and_input,
    shown_tools,
)
from sfumato.server.http import request_body
from sfumato.server.http.errors import ApiError
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.middleware import OWNER
from sfumato.server.http.route import SSE, Dialect, Frame, named_event
from sfumato.server.openapi import fails
from sfumato.server.response_store import Item, Missing, Stored
from sfumato.server.service import Service
from sfumato.text.calls import ToolCall

_ENCRYPTED = "not-needed"
"""The value of `encrypted_content`: no past thought returns to the model, so nothing has to be
encrypted."""


_STATUS = {"max_tokens": "incomplete", "cancelled": "cancelled"}  # other replies are completed
_CODES = {400: "invalid_prompt"}  # others are errors of the server
_NOT_KEPT = "store: the response was not kept: --response-store has no room, or it was deleted"


MOST_ECHOED = 2**18  # characters of the tools, and again of the schema
MOST_WAITING = 2**20  # of an input that was cut, and waits for the end of its reply to be kept


@dataclass(frozen=True)
class RequestEcho:
    owner: str
    items: tuple[Item, ...]  # of the body's own input, where the response is kept
    fields: dict[str, Any]  # of the response
    logprobs: bool
    encrypted: bool  # whether thoughts have an encrypted content
    notes: tuple[str, ...]  # for `warnings`


def is_short(values: Iterable[Any], most: int = MOST_ECHOED) -> bool:
    """Whether values of JSON come to at most so many characters."""
    count = 0
    for value in values:
        count += len(json.dumps(value, ensure_ascii=False))
        if count > most:
            return False
    return True


def bounded(fields: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The fields, in which long tools are none and a long schema is an empty one; notes: gets a
    line for each."""
    if not is_short(fields["tools"]):
        fields = fields | {"tools": []}
        notes.append("tools: too long to be repeated in the response")
    text = fields["text"]
    if not is_short([text["format"].get("schema")]):
        fields = fields | {"text": text | {"format": text["format"] | {"schema": {}}}}
        notes.append("text.format.schema: too long to be repeated in the response")
    return fields


def shown_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any]:
    """tool_choice, after it was checked, as the response repeats it."""
    if isinstance(choice, Mapping):
        return {"type": "function", "name": choice["name"]}
    return choice or "auto"


def parse(service: Service, body: ResponsesBody) -> list[Request]:
    """The one request. Raises Refused."""
    requests, own, notes = request_and_input(service, body)
    body.envelope.echo = _echo(service, body, own, notes)
    return requests


def _echo(service: Service, body: ResponsesBody, own: list[Item], notes: list[str]) -> RequestEcho:
    """notes: of what the prompt lacks of the input, which nothing else holds then."""
    is_kept = body.store is not False and service.responses.keeps
    if is_kept and notes and not body.stream and not is_short(own, MOST_WAITING):
        is_kept = False
        notes.append("store: the response is not kept: its input is too long, and was cut")
    include = body.include or []
    text = body.text
    shown: dict[str, Any] = {"type": "text"}
    if text is not None and text.format is not None:
        given = text.format
        of_format = {"name": given.name, "schema": given.schema_, "strict": given.strict}
        shown = {"type": given.type}
        shown |= {name: value for name, value in of_format.items() if value is not None}
    reasoning = body.reasoning
    fields = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": dict(body.metadata or {}),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "store": is_kept,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": shown, "verbosity": "medium"},
        "tool_choice": shown_choice(body.tool_choice),
        "tools": shown_tools(body.tools),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    fields = bounded(fields, notes)
    return RequestEcho(
        body.envelope.owner,
        tuple(own) if is_kept else (),
        fields,
        logprobs=LOGPROBS in include or bool(body.top_logprobs),
        encrypted=ENCRYPTED in include,
        notes=tuple(notes),
    )


class ResponsesRenderer(DeltaRenderer):
    """One reply, as items of an output."""

    def __init__(self, service: Service, body: ResponsesBody, requests: Sequence[Request]) -> None:
        echo: RequestEcho | None = body.envelope.echo
        assert echo is not None
        top, progress = (body.top_logprobs or 0) if echo.logprobs else None, body.return_progress
        super().__init__(service, requests, body, alternatives=top, progress=bool(progress))
        self._echo = body.envelope.echo = replace(echo, items=())
        self._inputs = echo.items  # until they are kept
        self.notes += echo.notes
        # Where calls may stand between texts, items are in the order of a stream.
        self.keeps_settled = echo.logprobs or bool(self.tools)
        self._number = 0  # of the next event
        self._is_over = False  # whether the response has ended
        self._base = _head(service, requests[0]) | echo.fields
        self._output: list[Item] = []  # the last one may be open
        self._is_open = False
        self._parts: list[str] = []  # of the open item's text
        self._tokens: list[Entry] = []
        self._held: list[Logged] = []  # white space, which alone makes no message beside calls

    def body(self, replies: Sequence[CollectedReply]) -> Mapping[str, Any]:
        (collected,) = replies
        end = collected.finished
        for settled in collected.settled:
            _drain(self.settled(0, settled))
        collected.settled.clear()
        _drain(self.rest(0, end.reply))
        _drain(self._end_items(_status(end) == "completed"))
        return self._kept(self._ended(end), begun=False)

    def extra(self, fields: Frame) -> Frame:
        """An event of our own, for those who ask for drafts."""
        (kind,) = fields
        return self._event(f"sfumato:{kind}", **fields)

    def begin(self, number: int) -> Iterable[Frame]:
        if self._base["store"]:
            items, self._inputs = self._inputs, ()
            if not self.service.responses.add(self._echo.owner, self._base, items):
                self._base = self._base | {"store": False}
                self.notes.append(_NOT_KEPT)
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._base)

    def reported(self, number: int, progress: dict[str, Any]) -> Frame:
        """Reports progress as llama-server does: one more event `response.in_progress`."""
        return self._event("response.in_progress", response=self._base, prompt_progress=progress)

    def thought(self, number: int, piece: str) -> Iterable[Frame]:
        if not self._is("reasoning"):
            yield from self._close()
            yield self._open({"id": new_id("rs"), "type": "reasoning", "summary": []})
            yield self._of_item("reasoning_summary_part.added", summary_index=0, part=_summary(""))
        self._parts.append(piece)
        yield self._of_item("reasoning_summary_text.delta", summary_index=0, delta=piece)

    def text(self, number: int, piece: str, tokens: list[Entry] | None) -> Iterable[Frame]:
        self._held.append((piece, tokens or []))
        if self._is("message") or piece.strip():
            yield from self._release()

    def call(
        self, number: int, at: int, call: ToolCall, arguments: Sequence[str]
    ) -> Iterable[Frame]:
        yield from self._close()
        item = {
            "id": new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "arguments": "",
            "call_id": new_id("call"),
            "name": call.name,
        }
        yield self._open(item)
        for piece in arguments:
            self._parts.append(piece)
            yield self._of_item("function_call_arguments.delta", delta=piece)
        yield from self._close()

    def end(self, number: int, end: Finished) -> Iterable[Frame]:
        self._is_over = True
        is_complete = _status(end) == "completed"
        yield from self._end_items(is_complete)
        kind = "response.completed" if is_complete else "response.incomplete"
        yield self._event(kind, response=self._kept(self._ended(end), begun=True))

    def left(self) -> None:
        """What is kept is cancelled, with what has settled."""
        if self._base["store"] and not self._is_over:
            _drain(self._end_items(complete=False))
            over = {"status": "cancelled", "output": self._output}
            self.service.responses.update(self._echo.owner, self._base | over)

    def failed(self, error: ApiError, body: Frame) -> Iterable[Frame]:
        self._is_over = True
        _drain(self._end_items(complete=False))
        failure = {"code": _CODES.get(error.status, "server_error"), "message": error.message}
        over = {"status": "failed", "error": failure, "output": self._output}
        yield self._event("response.failed", response=self._kept(self._base | over, begun=True))

    def _end_items(self, complete: bool) -> Iterator[Frame]:
        """The reply has ended. complete: by itself, and at no limit."""
        kinds = {item["type"] for item in self._output}
        if (self._held or complete) and not kinds & {"message", "function_call"}:
            yield from self._release()
        yield from self._close("completed" if complete else "incomplete")

    def _is(self, kind: str) -> bool:
        return self._is_open and self._output[-1]["type"] == kind

    def _release(self) -> Iterator[Frame]:
        """The held text, in a message."""
        if not self._is("message"):
            yield from self._close()
            item = {"id": new_id("msg"), "type": "message", "status": "in_progress"}
            yield self._open(item | {"role": "assistant", "content": []})
            yield self._of_item("content_part.added", content_index=0, part=self._content("", []))
        for text, tokens in self._held:
            self._parts.append(text)
            self._tokens += tokens
            yield self._of_item("output_text.delta", content_index=0, delta=text, logprobs=tokens)
        self._held = []

    def _content(self, text: str, tokens: list[Entry]) -> Item:
        content = {"type": "output_text", "text": text, "annotations": []}
        return content | ({"logprobs": tokens} if self._echo.logprobs else {})

    def _open(self, item: Item) -> Frame:
        self._output.append(item)
        self._is_open, self._parts, self._tokens = True, [], []
        at = len(self._output) - 1
        return self._event("response.output_item.added", output_index=at, item=dict(item))

    def _close(self, status: str = "completed") -> Iterator[Frame]:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return
        item, text, tokens = self._output[-1], "".join(self._parts), self._tokens
        if item["type"] == "message":
            part = self._content(text, tokens)
            yield self._of_item("output_text.done", content_index=0, text=text, logprobs=tokens)
            yield self._of_item("content_part.done", content_index=0, part=part)
            item |= {"content": [part], "status": status}
        elif item["type"] == "reasoning":
            part = _summary(text)
            yield self._of_item("reasoning_summary_text.done", summary_index=0, text=text)
            yield self._of_item("reasoning_summary_part.done", summary_index=0, part=part)
            item["summary"] = [part]
            if self._echo.encrypted:
                item["encrypted_content"] = _ENCRYPTED
        else:
            yield self._of_item("function_call_arguments.done", name=item["name"], arguments=text)
            item |= {"arguments": text, "status": "completed"}
        self._is_open = False
        at = len(self._output) - 1
        yield self._event("response.output_item.done", output_index=at, item=item)

    def _ended(self, end: Finished) -> Frame:
        """The response without what is said of its keeping."""
        account, status = end.account, _status(end)
        now = int(time.time())
        return self._base | {
            "status": status,
            "completed_at": now if status == "completed" else None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "output": self._output,
            "usage": _usage(account),
            "timings": objects.timings(account),
            **self.warned(end.reply),
            **self.verified(end.reply),
        }

    def _kept(self, response: Frame, begun: bool) -> Frame:
        """The response, kept where it is to be. begun: whether it was kept from its beginning, and
        may have been deleted since."""
        store, owner = self.service.responses, self._echo.owner
        if not response["store"]:
            return response
        if begun:
            is_kept = store.update(owner, response)
        else:
            is_kept = store.add(owner, response, self._inputs)
        if is_kept:
            return response
        notes = [*response.get("warnings", ()), _NOT_KEPT]
        return response | {"store": False, "warnings": notes}

    def _event(self, kind: str, **fields: Any) -> Frame:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Frame:
        """An event of the open item."""
        at = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(f"response.{kind}", **at, **fields)


def _summary(text: str) -> Item:
    return {"type": "summary_text", "text": text}


def _status(end: Finished) -> str:
    return _STATUS.get(end.reply.stop_reason, "completed")


def _drain(events: Iterable[Frame]) -> None:
    for _ in events:
        pass


def _head(service: Service, request: Request) -> Frame:
    """The fields of a response before those that its request decides."""
    return {
        "id": f"resp_{request.id.removeprefix('req-')}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": service.name,
        "output": [],
        "usage": None,
        "service_tier": "default",
    }


def _usage(account: Account) -> dict[str, Any]:
    return {
        "input_tokens": account.prompt_tokens,
        "input_tokens_details": {"cached_tokens": account.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": account.output_tokens,
        "output_tokens_details": {"reasoning_tokens": account.thought_tokens},
        "total_tokens": account.prompt_tokens + account.output_tokens,
    }


_PATH = "/v1/responses/{response_id}"
_MOST_LISTED = 100  # items, as OpenAI has it


def _in_range(low: int, high: int) -> WrapValidator:
    """Refuses what is no whole number of a range, and names the range."""

    def check(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(value)
        except ValidationError:
            message = f"must be a whole number from {low:,} to {high:,}"
            raise PydanticCustomError("whole_number", message) from None

    return WrapValidator(check)


_Number = Annotated[int | None, Query(ge=0, lt=10**9), _in_range(0, 10**9 - 1)]
_Limit = Annotated[int, Query(ge=1, le=_MOST_LISTED), _in_range(1, _MOST_LISTED)]
_IN_PROGRESS = "in_progress"
_LOOK_S = 0.25  # how often a stream looks whether its response has ended
_SHOWN: dict[int | str, dict[str, Any]] = fails(400, 404) | {
    200: {
        "description": "The response, as one body or as its last event.",
        "content": {SSE.media_type: {"schema": {}}},
    }
}


def add_routes(app: FastAPI, service: Service) -> None:
    """The four routes below `/v1/responses`."""

    @app.get(_PATH, tags=["OpenAI"], responses=_SHOWN)
    async def response(
        http: HttpRequest, response_id: str, stream: bool = False, starting_after: _Number = None
    ) -> Response:
        """A response that is kept; as a stream, its last event, once it has ended.

        starting_after: the number of the last event that the client has seen."""
        if not stream:
            return await run_in_threadpool(_response, service, http, response_id)
        owner = _entry(service, http, response_id).owner
        events = _until_its_end(service, owner, response_id, starting_after)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type=SSE.media_type, headers=headers)

    @app.delete(_PATH, tags=["OpenAI"], responses=fails(404))
    async def delete_response(http: HttpRequest, response_id: str) -> dict[str, Any]:
        """Forgets a response; one that is being made goes on."""
        try:
            service.responses.remove(_owner(http), response_id)
        except Missing:
            raise _missing(response_id) from None
        return {"id": response_id, "object": "response", "deleted": True}

    @app.post(f"{_PATH}/cancel", tags=["OpenAI"], responses=fails(404, 408))
    async def cancel_response(http: HttpRequest, response_id: str) -> Response:
        """Ends a response that is being made in a stream; others stay as they are."""
        await request_body.discard(http)
        entry = _entry(service, http, response_id)
        if entry.status == _IN_PROGRESS:
            running = service.running.get(_request_id(response_id))
            if running is not None:
                running.cancel()
        return await run_in_threadpool(_response, service, http, response_id)

    @app.get(f"{_PATH}/input_items", tags=["OpenAI"], responses=fails(400, 404))
    def input_items(
        http: HttpRequest,
        response_id: str,
        order: Literal["asc", "desc"] = "desc",
        limit: _Limit = 20,
        after: str | None = None,
    ) -> dict[str, Any]:
        """The items that a response answers, the last one first."""
        items = _inputs(service, http, response_id)
        return _page(items if order == "asc" else items[::-1], limit, after)


def _page(items: list[Item], limit: int, after: str | None) -> dict[str, Any]:
    """The first items behind the one with the id `after`. Raises Refused."""
    if after is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise Refused("after", "is the id of none of these items")
        items = items[at + 1 :]
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }


async def _until_its_end(
    service: Service, owner: str, name: str, after: int | None
) -> AsyncIterator[str]:
    """The last event of a response, which has all of it. after: the number of an event that is not
    sent again."""
    sent, number = time.monotonic(), 0 if after is None else after + 1
    while True:
        try:
            entry = service.responses.get(owner, name)
        except Missing:
            missing = {"type": "error", "code": "not_found", "message": _missing(name).message}
            yield named_event(missing | {"param": None, "sequence_number": number})
            return
        if entry.status != _IN_PROGRESS:
            break
        await asyncio.sleep(_LOOK_S)
        if time.monotonic() - sent >= service.settings.keepalive_s:
            yield SSE.keepalive
            sent = time.monotonic()
    kind = entry.status if entry.status in ("completed", "failed") else "incomplete"
    response = await run_in_threadpool(json.loads, entry.response)
    last = {"type": f"response.{kind}", "sequence_number": number, "response": response}
    yield named_event(last)


def _response(service: Service, http: HttpRequest, name: str) -> Response:
    """Raises ApiError."""
    entry = _entry(service, http, name)
    if entry.status != _IN_PROGRESS:
        return Response(entry.response, media_type="application/json")
    running = service.running.get(_request_id(name))
    is_going = running is not None and running.is_going
    fields = json.loads(entry.response)
    return JSONResponse(fields if is_going else fields | {"status": "cancelled"})


def _inputs(service: Service, http: HttpRequest, name: str) -> list[Item]:
    """The body's own input, behind the inputs and outputs of earlier responses that are still
    here."""
    owner, store = _owner(http), service.responses
    entry = _entry(service, http, name)
    most = service.settings.max_messages
    before = store.chain(owner, entry.previous, most, is_whole=False)
    earlier = [item for one in before for item in (*one.inputs, *one.outputs)]
    return [*earlier, *entry.inputs]


def _entry(service: Service, http: HttpRequest, name: str) -> Stored:
    try:
        return service.responses.get(_owner(http), name)
    except Missing:
        raise _missing(name) from None


def _owner(http: HttpRequest) -> str:
    owner: str = http.scope.get(OWNER, "")
    return owner


def _request_id(name: str) -> str:
    """The id of the request that makes a response."""
    return f"req-{name.removeprefix('resp_')}"


def _missing(name: str) -> ApiError:
    return ApiError(
        404,
        f"there is no response {name[:128]!r} here; it was not kept, was deleted, or was forgotten "
        "(--response-store)",
        "response_id",
        "not_found",
    )


RESPONSES = Dialect(
    name="responses",
    path=PATH,
    tag="OpenAI",
    help="A response, as one body or as a stream of events.",
    body_type=ResponsesBody,
    parse=parse,
    renderer=ResponsesRenderer,
    streams=lambda body: bool(body.stream),
    wire=replace(SSE, encode=named_event),
    wording=WORDING,
)
