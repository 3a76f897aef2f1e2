"""A small client of OpenAI's HTTP API: lists models, and streams chat completions.

Only what a benchmark needs, on the standard library. What a server answers is not trusted: where
it is malformed, `ServerError` says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from sfumato.refused import Refused
from sfumato.weights.errors import quoted

_LONGEST_LINE = 16 << 20  # bytes of an event; a canvas with all its entropies is far shorter
_LONGEST_BODY = 1 << 20


def printable(text: str) -> str:
    """A line of a server's words, without what controls a terminal or cannot be encoded."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


class ServerError(OSError):
    """The server cannot be reached, refuses, or breaks off. The message says where and why, and is
    printable whatever the server sent."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


@dataclass(frozen=True)
class Endpoint:
    """An API by its base URL, such as http://localhost:8000/v1."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0  # without a byte from the server

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is no number
            usable = False
        if not usable or parts.query or parts.fragment or parts.username:
            raise Refused("url", f"{quoted(self.url)} is not like http://localhost:8000/v1")

    def models(self) -> list[str]:
        """The names of the server's models. Raises ServerError."""
        with self._request("GET", "/models") as response:
            try:
                listed = json.loads(response.read(_LONGEST_BODY))["data"]
                return [str(model["id"]) for model in listed]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ServerError(f"{self.url}/models: lists no models; name one with -m") from None

    def stream_chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a chat completion as they come. Raises ServerError, on the way too."""
        with self._request("POST", "/chat/completions", body) as response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise ServerError(f"{self.url}: answers with {kind}, not with a stream of events")
            for data in _events(response):
                if data == "[DONE]":
                    return
                yield self._chunk(data)

    @contextmanager
    def _request(self, method: str, path: str, body: Any = None) -> Iterator[HTTPResponse]:
        parts = urlsplit(self.url)
        assert parts.hostname
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        text = None if body is None else json.dumps(body)
        with closing(kind(parts.hostname, parts.port, timeout=self.timeout_s)) as connection:
            try:
                connection.request(method, parts.path.rstrip("/") + path, text, headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise ServerError(f"{self.url}{path}: HTTP {response.status}{_why(response)}")
                yield response
            except ServerError:
                raise
            except (OSError, HTTPException) as error:
                why = str(error) or type(error).__name__
                raise ServerError(f"{self.url}{path}: {why}") from error

    def _chunk(self, data: str) -> dict[str, Any]:
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, dict):
            raise ServerError(f"{self.url}: sends {quoted(data)}, which is no chunk of a reply")
        if chunk.get("error"):
            raise ServerError(f"{self.url}: {_message(chunk)}")
        return chunk


def _events(response: HTTPResponse) -> Iterator[str]:
    """The data of server-sent events; comments, which keep the connection alive, and other fields
    are passed over."""
    lines: list[str] = []
    while line := response.readline(_LONGEST_LINE):
        if not line.endswith(b"\n") and len(line) == _LONGEST_LINE:
            raise ServerError(f"sends an event of more than {_LONGEST_LINE >> 20} MiB")
        text = line.decode(errors="replace").rstrip("\r\n")
        if text.startswith("data:"):
            lines.append(text.removeprefix("data:").removeprefix(" "))
        elif not text and lines:
            yield "\n".join(lines)
            lines.clear()
    if lines:  # the last event lacks its empty line
        yield "\n".join(lines)


def _why(response: HTTPResponse) -> str:
    text = response.read(_LONGEST_BODY).decode(errors="replace")
    try:
        text = _message(json.loads(text))
    except (ValueError, RecursionError):
        text = " ".join(text.split())[:200]
    return f": {text}" if text else ""


def _message(answer: Any) -> str:
    """The message of an error object; servers have several forms of it."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:300]
