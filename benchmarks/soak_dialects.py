"""The dialects beside OpenAI's chat in benchmarks/soak.py: what is sent, what is a right answer.

All of them send the requests of chat, so their texts are held against chat's. Does not know who
sends, or when.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

REFUSED = {"error", "response.failed"}


class WrongAnswer(Exception):
    """An answer, or the order of its events, is not what the dialect promises."""


@dataclass(frozen=True)
class Dialect:
    """One form of the request {"messages" of one user, "max_tokens", "seed"}."""

    path: str
    body: Callable[[dict[str, Any], str], dict[str, Any]]  # of the request and its rendered prompt
    body_text: Callable[[dict[str, Any]], str]  # the text of a body
    piece: Callable[[dict[str, Any]], str]  # the text of an event
    is_last: Callable[[dict[str, Any]], bool]  # whether an event ends its stream


def text_of_stream(lines: Iterable[bytes], dialect: Dialect) -> str:
    """The text of a stream, read to its end. Raises WrongAnswer unless exactly one event ends it,
    and that event is the last one."""
    text, ended = "", False
    for event in events(lines):
        if ended:
            raise WrongAnswer(f"an event after the terminal one: {json.dumps(event)[:200]}")
        if event.get("type") in REFUSED or event.get("error"):
            raise WrongAnswer(f"a stream ended in an error: {json.dumps(event)[:300]}")
        text += dialect.piece(event)
        ended = dialect.is_last(event)
    if not ended:
        raise WrongAnswer("a stream ended without its terminal event")
    return text


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of server-sent events, or of lines of JSON."""
    for line in lines:
        data = line.strip().removeprefix(b"data:").strip()
        if data.startswith(b"{"):
            yield json.loads(data)


def _responses_piece(event: dict[str, Any]) -> str:
    wanted = ("response.output_text.delta", "response.reasoning_summary_text.delta")
    return str(event["delta"]) if event["type"] in wanted else ""


def _messages_piece(event: dict[str, Any]) -> str:
    delta = event.get("delta", {})
    return delta.get("text") or delta.get("thinking") or ""


def _ollama_text(message: dict[str, Any]) -> str:
    return (message.get("thinking") or "") + message["content"]


def _texts(parts: Iterable[dict[str, Any]]) -> str:
    return "".join(part.get("thinking") or part["text"] for part in parts)


def _responses_text(body: dict[str, Any]) -> str:
    kinds = {"reasoning": "summary", "message": "content"}
    return "".join(_texts(item[kinds[item["type"]]]) for item in body["output"])


DIALECTS = {
    "responses": Dialect(
        "/v1/responses",
        lambda how, _: {
            "input": how["messages"],
            "max_output_tokens": how["max_tokens"],
            "seed": how["seed"],
        },
        _responses_text,
        _responses_piece,
        lambda event: event["type"] in ("response.completed", "response.incomplete"),
    ),
    "messages": Dialect(
        "/v1/messages",
        lambda how, _: how,
        lambda body: _texts(body["content"]),
        _messages_piece,
        lambda event: event["type"] == "message_stop",
    ),
    "ollama": Dialect(
        "/api/chat",
        lambda how, _: {
            "messages": how["messages"],
            "options": {"num_predict": how["max_tokens"], "seed": how["seed"]},
        },
        lambda body: _ollama_text(body["message"]),
        lambda event: _ollama_text(event["message"]),
        lambda event: bool(event["done"]),
    ),
    "llama": Dialect(
        "/completion",
        lambda how, rendered: {
            "prompt": rendered,
            "n_predict": how["max_tokens"],
            "seed": how["seed"],
        },
        lambda body: body["content"],
        lambda event: event["content"],
        lambda event: bool(event["stop"]),
    ),
}


def check_vectors(body: dict[str, Any], count: int) -> None:
    """Raises WrongAnswer unless there is a vector of length 1 for each text."""
    lengths = [math.hypot(*item["embedding"]) for item in body["data"]]
    if len(lengths) != count or not all(abs(length - 1) < 1e-3 for length in lengths):
        raise WrongAnswer(f"vectors of lengths {lengths} for {count} texts")
