"""A decision of an HTTP call: within the body's limits while it is planned, and cancelled."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tests.server.dialects.decisions.test_decisions import ONE, SYSTEM_ONE, Client

from sfumato.engine import DecisionRequest
from sfumato.server.http.admission import Admission, Budget
from sfumato.server.http.inflight import InFlight


def test_a_call_that_is_cancelled_while_it_is_planned_cancels_its_request() -> None:
    begun, go, cancelled = threading.Event(), threading.Event(), threading.Event()

    def decide(request: Any, sink: Any) -> Any:
        begun.set()
        assert go.wait(5)
        return SimpleNamespace(cancel=cancelled.set)

    async def main() -> None:
        engine: Any = SimpleNamespace(
            decide=decide, drop=lambda *_: None, config=SimpleNamespace(slots=1)
        )
        request = DecisionRequest("state", {})
        call = asyncio.create_task(InFlight(engine, [request]).begin(None))  # type: ignore[arg-type]
        await asyncio.to_thread(begun.wait, 5)
        call.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())
    assert cancelled.wait(5)  # by the planning thread, which may end after the call


def test_a_decision_is_planned_within_the_limits_of_its_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[Budget] = []
    real = Admission.__init__

    def kept(self: Admission, max_body: int) -> None:
        real(self, max_body)
        limits.append(self.small)

    monkeypatch.setattr(Admission, "__init__", kept)
    client = Client()
    free: list[int] = []
    decide = client.engine.decide

    def watched(request: Any, sink: Any = None) -> Any:
        free.append(limits[0]._free)
        return decide(request, sink)

    monkeypatch.setattr(client.engine, "decide", watched)
    assert client.post(ONE, SYSTEM_ONE).status_code == 200
    assert free == [1] and limits[0]._free == 2
