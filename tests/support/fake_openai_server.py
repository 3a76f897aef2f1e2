"""An HTTP server that says what it is told to, and remembers what it was asked."""

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


@contextmanager
def scripted(
    script: Script,
    status: int = 200,
    kind: str = "text/event-stream; charset=utf-8",
    models: str = '{"data": [{"id": "painter"}]}',
) -> Iterator[Scripted]:
    """Serves GET /v1/models and POST /v1/chat/completions."""
    lock, running = threading.Lock(), 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = models if self.path == "/v1/models" else "{}"
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def do_POST(self) -> None:
            nonlocal running
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.bodies.append(body)
                server.keys.append(self.headers.get("Authorization"))
                running += 1
                server.at_a_time = max(server.at_a_time, running)
            answered = status if self.path == "/v1/chat/completions" else 404
            self.send_response(answered)
            self.send_header("Content-Type", kind)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with ExitStack() as counted:
                counted.callback(self.leave)
                parts = list(script(body))
                for number, part in enumerate(parts, 1):
                    if number == len(parts):  # a client that has read it may ask again at once
                        counted.close()
                    if isinstance(part, str):
                        data = part.encode()
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                    else:
                        time.sleep(part)
                self.wfile.write(b"0\r\n\r\n")

        def leave(self) -> None:
            nonlocal running
            with lock:
                running -= 1

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *about: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # a client may hang up
                super().handle_error(*about)

    http = Server(("127.0.0.1", 0), Handler)
    server = Scripted(f"http://127.0.0.1:{http.server_port}/v1")
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


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
