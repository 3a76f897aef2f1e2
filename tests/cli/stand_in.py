"""A hub on 127.0.0.1: what huggingface_hub asks of the real one, with the files of a test."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REVISION = "a" * 40


class StandIn:
    """The repositories, and what was asked for."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.about: dict[str, dict[str, Any]] = {}  # more of what the hub says of a repository
        self.gated: set[str] = set()
        self.cut: int | None = None  # bytes of a large file after which the line breaks
        self.status = 200
        self.sent: list[tuple[str, str | None]] = []  # (file, Range) of each GET of a file
        self.url = ""

    def info(self, repo: str) -> dict[str, Any]:
        siblings = []
        for name, data in self.repos[repo].items():
            sibling: dict[str, Any] = {"rfilename": name, "size": len(data)}
            if name.endswith((".gguf", ".safetensors")):
                digest = hashlib.sha256(data).hexdigest()
                sibling["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
            siblings.append(sibling)
        gated = "manual" if repo in self.gated else False
        about = self.about.get(repo, {})
        return {"id": repo, "sha": REVISION, "siblings": siblings, "gated": gated, **about}


class Handler(BaseHTTPRequestHandler):
    """Answers for the repositories of its server's hub."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            self._info(path.removeprefix("/api/models/").partition("/revision/")[0])
        else:
            self._file(body=True)

    def _info(self, repo: str) -> None:
        hub = self.server.hub
        if hub.status != 200:
            self._refuse(hub.status, "")
        elif repo not in hub.repos:
            self._refuse(401, "RepoNotFound")
        else:
            data = json.dumps(hub.info(repo)).encode()
            self._begin(200, len(data), {"Content-Type": "application/json"})
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self._begin(status, 0, {"X-Error-Code": code})

    def _begin(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def _file(self, body: bool) -> None:
        hub = self.server.hub
        repo, _, rest = self.path.lstrip("/").partition("/resolve/")
        name = rest.partition("?")[0].partition("/")[2]
        data = hub.repos.get(repo, {}).get(name)
        if repo in hub.gated:
            self._refuse(403, "GatedRepo")
        elif data is None:
            self._refuse(404, "EntryNotFound" if repo in hub.repos else "RepoNotFound")
        else:
            self._send(name, data, body)

    def _send(self, name: str, data: bytes, body: bool) -> None:
        hub, wanted = self.server.hub, self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": REVISION,
            "Accept-Ranges": "bytes",
        }
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._begin(206 if wanted else 200, len(data) - start, headers)
        if not body:
            return
        hub.sent.append((name, wanted))
        if hub.cut is not None and len(data) > hub.cut:
            self.wfile.write(data[start : start + hub.cut])
            self.close_connection = True  # in the midst of the file
            return
        self.wfile.write(data[start:])


class Server(ThreadingHTTPServer):
    """On a free port."""

    daemon_threads = True

    def __init__(self, hub: StandIn) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub
        hub.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """Serves until the block ends."""
    hub = StandIn()
    server = Server(hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
