"""uvicorn around the application: the socket, and an end in good order.

After SIGTERM or SIGINT no connection is accepted any more, the requests that run may finish for a
while, and what is left then ends in an error of its own. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AFTER_DRAIN_S = 10.0  # until all connections are closed, whatever they do
LAST_WORDS_S = 1.0  # for the last errors to reach their clients

_log = logging.getLogger("uvicorn.error")


def bind(host: str, port: int) -> socket.socket:
    """A socket of that address, not listening yet. Raises ValueError where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise ValueError(f"--host: {host!r} is no address of this machine") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        said = error.strerror or str(error)
        raise ValueError(
            f"{host}:{port}: cannot be listened on ({said}); choose another --port or --host"
        ) from None
    return bound


class Listener(uvicorn.Server):
    """Serves until a signal comes, or what it serves has died."""

    def __init__(
        self,
        app: FastAPI,
        drain_s: float,
        close: Callable[[float], None],
        ready: Callable[[], None] = lambda: None,
        dead: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> None:
        """close(seconds): drains the engine for so long, then fails the rest; it may block.
        ready: called when connections are accepted. dead: asked ten times a second; where it is
        true the server ends as after a signal."""
        limit = int(drain_s + AFTER_DRAIN_S)
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=limit,
                **options,
            )
        )
        self._drain_s, self._close, self._ready, self._dead = drain_s, close, ready, dead

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._dead()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal asks for an end, the second one insists."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            _log.disabled = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The engine drains while uvicorn waits for its connections."""
        _log.disabled = True  # it would show a trace for each request that is broken off
        closer = threading.Thread(target=self._close, args=(self._drain_s,), daemon=True)
        closer.start()
        hanging_up = asyncio.create_task(self._hang_up(closer))
        await super().shutdown(sockets)
        hanging_up.cancel()
        if not self.force_exit:
            closer.join(AFTER_DRAIN_S)

    async def _hang_up(self, closer: threading.Thread) -> None:
        """Once the engine has ended nothing is to come on what is still open: clients that do not
        end their requests, or do not read."""
        while closer.is_alive() and not self.force_exit:
            await asyncio.sleep(0.05)
        for end in ("close", "abort"):  # what is not read holds up a close, too
            if not self.force_exit:
                await asyncio.sleep(LAST_WORDS_S)
            for connection in list(self.server_state.connections):
                getattr(connection.transport, end)()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end the server, and are not raised again afterwards as uvicorn does."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
