"""llama-server's own routes: /completion, /tokenize, /detokenize, /apply-template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from sfumato.engine import Account, Finished, Request, Settled
from sfumato.server.dialects.shared import openai_objects
from sfumato.server.dialects.shared.openai_messages import continuation, conversation
from sfumato.server.dialects.shared.sampling import request_fields, seeds_of
from sfumato.server.examples import warnings
from sfumato.server.http import inflight, request_body, stream
from sfumato.server.http.errors import bad_request, from_value_error
from sfumato.server.schemas.llama_cpp import DetokenizeBody, LlamaBody, TemplateBody, TokenizeBody
from sfumato.server.service import Service
from sfumato.text.prompt import check_long_texts

_STOP_TYPES = {"eos": "eos", "max_tokens": "limit", "stop": "word", "cancelled": "none"}


async def completion(service: Service, http: HttpRequest) -> Response:
    """Raises ApiError."""
    async with request_body.read(service, http, LlamaBody) as body:
        request = await run_in_threadpool(request_of, service, body)
    body = request_body.light(body)
    started = await inflight.start(service.engine, [request])
    if body.stream:
        return stream.response(service, started, LlamaWriter(service, body), done=False)
    (outcome,) = await inflight.outcomes(http, started)
    return await run_in_threadpool(
        _whole, service, body, outcome.finished, inflight.headers_of(started)
    )


def _whole(service: Service, body: LlamaBody, end: Finished, headers: dict[str, str]) -> Response:
    """In a thread."""
    found = {"content": end.reply.text, **_last(service, body, end)}
    return JSONResponse(found, headers=headers)


def request_of(service: Service, body: LlamaBody) -> Request:
    """Raises ApiError."""
    ids = service.raw_prompt(body.prompt, "/completion")
    if not ids:
        raise bad_request("prompt: is empty", "prompt")
    seed = None if body.seed == -1 else body.seed  # as llama-server reads it
    return Request(
        ids=ids,
        max_tokens=service.limit(body.n_predict, len(ids), body.canvas_length),
        seed=seeds_of(seed, 1)[0],
        **request_fields(body, service.model, "/completion"),
    )


def _last(service: Service, body: LlamaBody, end: Finished) -> dict[str, Any]:
    """All but the text: what llama-server sends at the end."""
    reply, account = end.reply, end.account
    told = [*openai_objects.notes(body), *warnings(service.model, reply)]
    found = {
        "index": 0,
        "id_slot": -1 if account.slot is None else account.slot,
        "stop": True,
        "stop_type": _STOP_TYPES[reply.stop_reason],
        "model": service.name,
        "tokens_predicted": account.output_tokens,
        "tokens_evaluated": account.prompt_tokens,
        "tokens_cached": account.cached_tokens,
        "truncated": False,
        "timings": openai_objects.timings(account),
    }
    return found | ({"warnings": told} if told else {})


class LlamaWriter:
    """Frames of a streamed /completion: no choices, no [DONE]; the last says stop."""

    def __init__(self, service: Service, body: LlamaBody) -> None:
        self._service, self._body, self._sent = service, body, 0

    def extra(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"index": 0, "content": "", "stop": False} | fields

    def begin(self, number: int) -> Iterable[dict[str, Any]]:
        return ()

    def commit(self, number: int, commit: Settled) -> Iterable[dict[str, Any]]:
        yield from self._texts(commit.text)

    def finish(self, number: int, end: Finished) -> Iterable[dict[str, Any]]:
        yield from self._texts(end.reply.text[self._sent :])
        yield {"content": "", **_last(self._service, self._body, end)}

    def close(self, accounts: Sequence[Account]) -> Iterable[dict[str, Any]]:
        return ()

    def _texts(self, text: str) -> Iterable[dict[str, Any]]:
        self._sent += len(text)
        for piece in stream.pieces(text):
            yield self.extra({"content": piece})


async def tokenize(service: Service, http: HttpRequest) -> Response:
    """Raises ApiError."""
    async with request_body.read(service, http, TokenizeBody) as body:
        return await run_in_threadpool(_tokens, service, body)


def _tokens(service: Service, body: TokenizeBody) -> Response:
    """Raises ApiError."""
    tokenizer = service.model.tokenizer
    text = body.prompt if body.content is None else body.content
    field = "prompt" if body.content is None else "content"
    if text is None:
        raise bad_request("content: is missing", "content", "missing")
    if body.prompt is not None and body.prompt != text:
        raise bad_request("content, prompt: differ; send one", "content")
    marked = body.parse_special is not False
    try:
        ids = service.encode(text, field, marked)
    except ValueError as error:
        raise from_value_error(error) from None
    if (body.add_special or body.add_special_tokens) and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    found: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": service.context}
    if body.with_pieces:
        pieces = zip(ids, service.pieces(ids), strict=True)
        found["tokens"] = [{"id": token, "piece": piece} for token, piece in pieces]
    return JSONResponse(found | openai_objects.warned(body))


async def detokenize(service: Service, http: HttpRequest) -> Response:
    """Raises ApiError."""
    async with request_body.read(service, http, DetokenizeBody) as body:
        return await run_in_threadpool(_text, service, body)


def _text(service: Service, body: DetokenizeBody) -> Response:
    """Raises ApiError."""
    ids = body.tokens
    most = service.model.config.context_length
    if len(ids) > most:
        raise bad_request(
            f"tokens: are {len(ids):,}, and this model's context has {most:,}; send them in parts",
            "tokens",
        )
    try:
        text = service.model.tokenizer.decode(ids, skip_special=False)
    except (ValueError, OverflowError) as error:
        raise bad_request(f"tokens: {error}", "tokens") from None
    # The prompt is as vLLM has it.
    return JSONResponse({"content": text, "prompt": text} | openai_objects.warned(body))


async def apply_template(service: Service, http: HttpRequest) -> Response:
    """Raises ApiError."""
    async with request_body.read(service, http, TemplateBody) as body:
        return await run_in_threadpool(_prompt, service, body)


def _prompt(service: Service, body: TemplateBody) -> Response:
    """Raises ApiError."""
    messages, continued = conversation(body, service.settings), None
    opened = body.add_generation_prompt
    if opened is not False or body.continue_final_message:
        messages, continued = continuation(
            messages, body.continue_final_message, opened, service.engine.check_length
        )
    kwargs = body.chat_template_kwargs
    try:
        check_long_texts(
            [messages, body.tools], lambda text: service.engine.check_length(text, "messages")
        )
        prompt = service.model.template.render(
            messages,
            thinking=bool(kwargs and kwargs.enable_thinking),
            tools=body.tools,
            add_generation_prompt=opened is not False or continued is not None,
        )
    except ValueError as error:
        raise from_value_error(error) from None
    return JSONResponse({"prompt": prompt + (continued or "")} | openai_objects.warned(body))
