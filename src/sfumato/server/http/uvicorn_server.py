"""uvicorn around the application: the socket, and an orderly shutdown.

After SIGTERM or SIGINT the server is not ready and takes no request: `/readyz` and new requests get
a 503, so that what stands in front turns to other servers. Running requests have some time to
finish, and each that does not ends in an error event. Then no connection is accepted. A second
signal ends the wait at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AFTER_DRAIN_S = 10.0  # until all connections are closed, whatever they do
LAST_EVENTS_S = 1.0  # for the last errors to reach their clients
FORCED_S = 0.5  # the same after a second signal
PLACES = (  # one behind the default route, one in each private network; RFC 1918, 4193 and 5737
    (socket.AF_INET, "192.0.2.1"),
    (socket.AF_INET, "192.168.0.1"),
    (socket.AF_INET, "10.0.0.1"),
    (socket.AF_INET, "172.16.0.1"),
    (socket.AF_INET6, "2001:db8::1"),
    (socket.AF_INET6, "fd00::1"),
)

_log = logging.getLogger("uvicorn.error")
_own_log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to that address, not listening yet. Raises ValueError where that fails."""
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
        reason = error.strerror or str(error)
        raise ValueError(
            f"{host}:{port}: cannot be listened on ({reason}); choose another --port or --host"
        ) from None
    return bound


def outward_addresses() -> list[str]:
    """The addresses of this machine in its networks, IPv4 first, without loopback. Sends nothing: a
    datagram socket that is connected to a place only asks the system for the way there."""
    addresses: dict[str, None] = {}
    for family, place in PLACES:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((place, 9))
            addresses[asking.getsockname()[0]] = None
    return [address for address in addresses if not ipaddress.ip_address(address).is_loopback]


class Listener(uvicorn.Server):
    """Serves until a signal comes or the engine has died."""

    def __init__(
        self,
        app: FastAPI,
        drain_s: float,
        close: Callable[[float], None],
        ready: Callable[[], None] = lambda: None,
        dead: Callable[[], bool] = lambda: False,
        halt: Callable[[], None] = lambda: None,
        running: Callable[[], int] = lambda: 0,
        **options: Any,
    ) -> None:
        """close(seconds): drains the engine for so long, then fails the rest; it may block.
        ready: called when connections are accepted. dead: asked ten times a second; where it is
        true the server ends as after a signal. halt: fails what is left, without waiting.
        running: how many requests `close` lets end."""
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
        self._halt, self._running = halt, running
        self._signalled = False
        self._closer: threading.Thread | None = None  # in it the engine drains

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        """After the first signal connections are accepted until the engine has drained."""
        is_over = self._signalled and (self.force_exit or not self._drain().is_alive())
        return await super().on_tick(counter) or self._dead() or is_over

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts an orderly shutdown, the second one forces the end."""
        self.force_exit, self._signalled = self._signalled, True

    def _drain(self) -> threading.Thread:
        """Begins to drain the engine, once: from then on no request is taken."""
        if self._closer is None:
            if self._signalled or self.should_exit:
                _own_log.warning("%s", _stopping(self._running(), self._drain_s))
            self._closer = threading.Thread(target=self._close, args=(self._drain_s,), daemon=True)
            self._closer.start()
        return self._closer

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            _log.disabled = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The engine drains, if it has not, while uvicorn waits for its connections."""
        closer = self._drain()
        _log.disabled = True  # it would show a trace for each request that is broken off
        closing = asyncio.create_task(self._close_connections(closer))
        await super().shutdown(sockets)
        closing.cancel()
        until = time.monotonic() + AFTER_DRAIN_S
        while closer.is_alive() and not self.force_exit and time.monotonic() < until:
            await asyncio.sleep(0.02)

    async def _close_connections(self, closer: threading.Thread) -> None:
        """Closes what is still open once the engine has ended and no event can follow: connections
        of clients that do not end their requests, or do not read."""
        while closer.is_alive() and not self.force_exit:
            await asyncio.sleep(0.05)
        if self.force_exit:
            threading.Thread(target=self._halt, daemon=True).start()
            until = time.monotonic() + FORCED_S
            while self.server_state.tasks and time.monotonic() < until:
                await asyncio.sleep(0.02)
        for end in ("close", "abort"):  # what is not read holds up a close, too
            if not self.force_exit:
                await asyncio.sleep(LAST_EVENTS_S)
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


def _stopping(running: int, drain_s: float) -> str:
    """What an operator reads after the first signal."""
    if not running:
        return "stopping: no request is running"
    count = "1 request has" if running == 1 else f"{running} requests have"
    return (
        f"stopping: {count} {drain_s:g} seconds to finish; a second signal ends the server at once"
    )
