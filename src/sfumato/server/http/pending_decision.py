"""One decision of an HTTP call, from its submission to its terminal event. Knows no form."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool

from sfumato.engine import Decided, DecisionRequest, EngineClient, Failed
from sfumato.engine.handle import DecisionHandle
from sfumato.server.http import inflight
from sfumato.server.http.errors import CLIENT_GONE, ApiError, from_failed, from_refusal


class PendingDecision:
    """A request that the engine has, or is being given."""

    def __init__(self, engine: EngineClient, request: DecisionRequest) -> None:
        self._engine, self._request = engine, request
        self._handle: DecisionHandle | None = None
        self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Decided | Failed] = self._loop.create_future()

    async def begin(self) -> None:
        """Submits the request, whose texts are tokenized for that in a thread. Raises ApiError
        where the engine refuses it. A caller who is cancelled meanwhile cancels the request."""
        try:
            await run_in_threadpool(self._submit)
        except Exception as error:
            raise from_refusal(error, self._request) from None
        except BaseException:
            self.cancel()
            raise

    async def result(self, http: HttpRequest) -> Decided:
        """Waits for the answers. Raises ApiError where the request fails, and where the client has
        disconnected, which cancels the request."""
        disconnected = asyncio.create_task(inflight.disconnect(http))
        waits: set[asyncio.Future[Any]] = {self._ended, disconnected}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not self._ended.done():
                raise ApiError(CLIENT_GONE, "the client has disconnected")
            event = self._ended.result()
        finally:
            self.cancel()
            disconnected.cancel()
        if isinstance(event, Failed):
            raise from_failed(event)
        return event

    def cancel(self) -> None:
        """Does nothing once the request has ended."""
        self._cancelled = True
        if self._handle is not None:
            self._handle.cancel()

    def _submit(self) -> None:
        """In a thread."""
        self._handle = self._engine.decide(self._request, self._deliver)
        if self._cancelled:  # in the meantime
            self._handle.cancel()

    def _deliver(self, event: Decided | Failed) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has stopped
            self._loop.call_soon_threadsafe(self._end, event)

    def _end(self, event: Decided | Failed) -> None:
        if not self._ended.done():
            self._ended.set_result(event)
