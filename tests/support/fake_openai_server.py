"""An HTTP server that answers by a script, and records the requests."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[dict[str, Any]], Iterator[str | float]]
"""A request's body → raw text to send and seconds to wait, in turn."""


@dataclass
class Scripted:
    """A running server."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    at_a_time: int = 0  # most requests at a time so far


class Handler(BaseHTTPRequestHandler):
    """Serves GET /v1/models and POST /v1/chat/completions as its server's script says."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        answer = self.server.models if self.path == "/v1/models" else "{}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.enter(body, self.headers.get("Authorization"))
        known = self.path == "/v1/chat/completions"
        self.send_response(self.server.status if known else 404)
        self.send_header("Content-Type", self.server.kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with ExitStack() as counted:
            counted.callback(self.server.leave)
            parts = list(self.server.script(body))
            for number, part in enumerate(parts, 1):
                if number == len(parts):  # a client that has read it may ask again at once
                    counted.close()
                if isinstance(part, str):
                    data = part.encode()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                else:
                    time.sleep(part)
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Listens on a free port, and records the requests."""

    def __init__(self, script: Script, status: int, kind: str, models: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.status, self.kind, self.models = script, status, kind, models
        self.record = Scripted(f"http://127.0.0.1:{self.server_port}/v1")
        self.lock, self.running = threading.Lock(), 0

    def enter(self, body: dict[str, Any], authorization: str | None) -> None:
        """A request has arrived."""
        with self.lock:
            self.record.bodies.append(body)
            self.record.keys.append(authorization)
            self.running += 1
            self.record.at_a_time = max(self.record.at_a_time, self.running)

    def leave(self) -> None:
        """A request is all but answered."""
        with self.lock:
            self.running -= 1

    def handle_error(self, *about: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client may hang up
            super().handle_error(*about)


@contextmanager
def scripted(
    script: Script,
    status: int = 200,
    kind: str = "text/event-stream; charset=utf-8",
    models: str = '{"data": [{"id": "painter"}]}',
) -> Iterator[Scripted]:
    """Serves GET /v1/models and POST /v1/chat/completions."""
    server = Server(script, status, kind, models)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.record
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def event(**chunk: Any) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(chunk)}\n\n"


def text(content: str | None = None, **more: Any) -> str:
    """A chunk of a reply."""
    delta = {} if content is None else {"content": content}
    return event(choices=[{"index": 0, "delta": delta | more, "finish_reason": None}])


def end(reason: str = "stop") -> str:
    """The last chunk of a reply."""
    return event(choices=[{"index": 0, "delta": {}, "finish_reason": reason}])


DONE = "data: [DONE]\n\n"
