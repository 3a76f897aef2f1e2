"""Counts every answer by route, status and time, and writes refusals to the logs.

The outermost middleware, so that it sees what the gate refuses too. Labels are templates of routes
and statuses, never a client's text. Plain ASGI.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from sfumato.server.http.errors import CLIENT_GONE, REFUSAL, ApiError
from sfumato.server.http.logs import RateLimit
from sfumato.server.http.security import App, Message, Receive, Scope, Send, canonical
from sfumato.server.metrics import Metrics

log = logging.getLogger(__name__)

PAGE, OTHER = "page", "other"
AuditLine = Callable[[dict[str, Any]], None]


class Observer:
    """Counts and times answers, and reports refusals."""

    def __init__(
        self, app: App, routes: Sequence[Any], metrics: Metrics, audit: AuditLine | None
    ) -> None:
        """audit: takes a line for the audit log."""
        self.app, self._routes, self._metrics = app, routes, metrics
        self._refusals = Refusals(audit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        status = CLIENT_GONE  # where no answer is begun

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = canonical(scope["path"])  # as the gate has it
        try:
            await self.app(scope, receive, watched)
        except Exception:
            status = 500
            raise
        finally:
            route = self._route(scope, path, status)
            self._metrics.answered(route, status, time.perf_counter() - began)
            if status >= 400 and status != CLIENT_GONE:
                self._refusals.add(scope, route, status)

    def _route(self, scope: Scope, path: str, status: int) -> str:
        """The template of the route that matches the request."""
        matched = scope.get("route")
        if matched is None:
            matched = next((r for r in self._routes if r.path_regex.match(path)), None)
        template = getattr(matched, "path", "")
        if template:
            return str(template)
        # Other requests reach the page's files.
        return OTHER if matched is None or status in (404, 405) else PAGE


class Refusals:
    """Writes refusals to the log and the audit log: some of each status at once, then one every ten
    seconds with the number of those left out. The metrics count them all."""

    def __init__(self, audit: AuditLine | None, limit: RateLimit | None = None) -> None:
        self._audit, self._limit = audit, limit or RateLimit()

    def add(self, scope: Scope, route: str, status: int) -> None:
        held_back = self._limit.passes(status)
        if held_back is None:
            return
        error: ApiError | None = scope.get(REFUSAL)
        kind = error.code if error else None
        client = scope["client"][0] if scope.get("client") else None
        method = str(scope["method"])[:20]
        more = f"; {held_back} more with this status since the last such line" if held_back else ""
        log.warning(
            "refused: %s %s, status %d, %s, client %s%s",
            *(method, route, status, kind or "no code", client, more),
        )
        if self._audit is None or (error is not None and error.recorded):
            return
        self._audit(
            {
                "event": "refused",
                "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "request_id": error.headers.get("X-Request-Id") if error else None,
                "endpoint": route,
                "method": method,
                "status": status,
                "error": kind,
                "client": client,
                "success": False,
                "seconds": None,
                "held_back": held_back,
            }
        )
