"""The engine of a front whose replicas are elsewhere: what is lost, refused, cancelled and late."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.support.scripted_engine import Script, engine

import sfumato
from sfumato.api import load_outline
from sfumato.cli import deploy, main
from sfumato.deploy import engine_client
from sfumato.deploy.engine_client import (
    EngineClient,
    Facts,
    ReplicaLost,
    Report,
    merged,
    session_of,
)
from sfumato.engine import (
    DecisionRequest,
    Engine,
    EngineDead,
    Failed,
    Finished,
    NotReady,
    QueueFull,
    Request,
    Settled,
    Terminal,
)
from sfumato.engine.errors import REFUSALS
from sfumato.engine.request import AnyRequest
from sfumato.refused import Refused

SCRIPT = Script(40, 5, "Hello there, you two.<turn|>")
Plan = int | Exception | None
"""What becomes of one run: it is lost after so many events; it is refused; or it ends well."""


@dataclass
class Here:
    """Replicas that are one engine of this process."""

    engine: Engine
    plans: list[Plan] = field(default_factory=list)  # of the runs to come; then all end well
    requests: list[AnyRequest] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    called: list[tuple[Any, ...]] = field(default_factory=list)
    held: asyncio.Event | None = None  # what a replica waits for before it accepts

    async def events(self, request: AnyRequest, session: str) -> AsyncGenerator[Any, None]:
        self.requests.append(request)
        self.sessions.append(session)
        plan = self.plans.pop(0) if self.plans else None
        if self.held is not None:
            await self.held.wait()
        if isinstance(plan, Exception):
            yield plan
            return
        queue, loop = asyncio.Queue[Any](), asyncio.get_running_loop()
        assert isinstance(request, Request)
        try:
            handle = self.engine.submit(
                request, lambda event: loop.call_soon_threadsafe(queue.put_nowait, event)
            )
        except REFUSALS as error:
            yield error
            return
        self.handle = handle
        yield None
        event: Any = None
        while not isinstance(event, Terminal):
            if plan == 0:
                raise ReplicaLost("killed")
            event = await queue.get()
            plan = None if plan is None else plan - 1
            yield event

    async def all(self, method: str, *args: Any) -> list[Any]:
        self.called.append((method, *args))
        if method == "cancel":
            self.handle.cancel()
            return [None]
        return [report(self.engine)] if method == "report" else []


def report(engine: Engine) -> Report:
    return Report(engine.health(), engine.state(), 7)


@dataclass
class Fixture:
    here: Here
    ends: list[tuple[str, str]] = field(default_factory=list)  # what on_finish was told
    now: float = 0.0
    client: EngineClient = field(init=False)

    def run(self, work: Callable[[EngineClient], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            own = self.here.engine
            facts = Facts(own.config, own.longest, "cpu", {})
            self.client = EngineClient(own.model, facts, [report(own)], self.here, lambda: self.now)
            self.client.on_finish = lambda request, end: self.ends.append((request.id, end.outcome))
            async with asyncio.timeout(20):
                return await work(self.client)

        return asyncio.run(main())

    def reply(self, request: Request) -> list[Any]:
        """The events of a request; raises what refuses it."""

        async def work(client: EngineClient) -> list[Any]:
            return await events_of(client, request)

        return self.run(work)


async def events_of(client: EngineClient, request: Request) -> list[Any]:
    events: list[Any] = []
    handle = await asyncio.to_thread(client.submit, request, events.append)
    while handle.terminal is None:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)  # a second end would come now
    assert sum(isinstance(event, Terminal) for event in events) == 1
    return events


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixture]:
    monkeypatch.setattr(engine_client, "AGAIN_S", 0.001)
    own, _ = engine(SCRIPT)
    with own:
        yield Fixture(Here(own))


def texts(events: Sequence[Any]) -> list[str]:
    return [event.text for event in events if isinstance(event, Settled)]


@pytest.mark.parametrize(
    ("streams", "plans", "outcome", "runs"),
    [
        (False, [], "eos", 1),
        (True, [], "eos", 1),
        (False, [0], "eos", 2),
        (True, [0], "eos", 2),  # nothing was sent
        (False, [1, 2], "eos", 3),  # canvases that the front has are not given twice
        (True, [1], "internal", 1),  # a part was sent: one clear error
        (False, [EngineDead("it shuts down")], "eos", 2),
        (False, [0, 0, 0], "internal", 3),  # a request that ends replicas does not end all
    ],
)
def test_what_is_lost_runs_again_where_nothing_was_sent(
    front: Fixture, streams: bool, plans: list[Plan], outcome: str, runs: int
) -> None:
    expected = front.reply(SCRIPT.request())
    front.here.plans, front.here.requests[:], front.ends[:] = list(plans), [], []
    request = replace(SCRIPT.request(), seed=None, streams=streams)
    events = front.reply(request)
    assert events[-1].outcome == outcome and len(front.here.requests) == runs
    assert front.ends == [(request.id, outcome)]
    (seed,) = {each.seed for each in front.here.requests}
    assert seed is not None, "every run has the seed that was drawn first"
    assert len(set(front.here.sessions[-runs:])) == runs, "each time another session"
    if outcome == "eos":
        assert texts(events) == texts(expected) and len(texts(events)) == 3
        assert events[-1].reply.text == "Hello there, you two."
    elif streams:
        assert "part of the answer was sent" in events[-1].message
    else:
        assert "3 replicas were lost" in events[-1].message


@pytest.mark.parametrize(
    ("plan", "request_", "kind"),
    [
        (QueueFull("full"), SCRIPT.request(), QueueFull),
        (NotReady("it fails", 3.0), SCRIPT.request(), NotReady),
        (Refused("x", "is wrong"), SCRIPT.request(), Refused),
        (None, SCRIPT.request(max_tokens=10**6), Refused),  # the front finds it
        (None, SCRIPT.request(adapter="none"), Refused),
    ],
)
def test_a_refusal_of_the_front_is_raised_and_one_of_a_replica_is_the_end(
    front: Fixture, plan: Plan, request_: Request, kind: type[Exception]
) -> None:
    front.here.plans = [plan]
    if plan is None:
        with pytest.raises(kind):
            front.reply(request_)
    else:
        (end,) = front.reply(request_)
        assert end.message == str(plan) and isinstance(end.refused, kind) == (kind is Refused)
    assert [request for request, _ in front.ends] == [request_.id]
    assert len(front.here.requests) == isinstance(plan, Exception)


def test_a_replica_that_writes_another_text_is_no_second_half(front: Fixture) -> None:
    front.here.plans = [1]
    own = front.here.engine

    async def work(client: EngineClient) -> list[Any]:
        run = front.here.events

        async def other(request: AnyRequest, session: str) -> AsyncGenerator[Any, None]:
            async for event in run(request, session):
                wrong = isinstance(event, Settled) and len(front.here.requests) > 1
                yield replace(event, token_ids=[1]) if wrong else event

        client._replicas.events = other  # type: ignore[method-assign]
        return await events_of(client, SCRIPT.request())

    events = front.run(work)
    assert "another text" in events[-1].message and own.health().ok


def test_nobody_waits_for_a_replica_that_never_comes(
    front: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits gets an error, and who comes later one at once."""
    monkeypatch.setattr(engine_client, "REPORT_S", 0.01)

    async def work(client: EngineClient) -> None:
        front.here.held = asyncio.Event()
        waiting = list[Any]()
        await asyncio.to_thread(client.submit, SCRIPT.request(), waiting.append)
        assert client.health().waiting == client.state().waiting == 1
        front.here.held.set()
        while not front.ends:
            await asyncio.sleep(0.001)
        assert waiting[-1].outcome == "eos" and client.health().waiting == 0

    front.run(work)

    async def absent(client: EngineClient) -> None:
        front.here.held, events = asyncio.Event(), list[Any]()
        monkeypatch.setattr(front.here, "all", _nothing, raising=False)
        client.start()
        handle = await asyncio.to_thread(client.submit, SCRIPT.request(), events.append)
        front.now += engine_client.ABSENT_S + 1
        while handle.terminal is None:
            await asyncio.sleep(0.01)
        assert isinstance(events[0], Failed) and events[0].kind == "not_ready"
        assert not client.health().ok and client.death is None
        with pytest.raises(NotReady, match="no replica has answered"):
            await asyncio.to_thread(client.submit, SCRIPT.request())

    front.run(absent)


async def _nothing(method: str, *args: Any) -> list[Any]:
    return []


def test_a_full_queue_and_the_end_of_the_front(front: Fixture) -> None:
    async def work(client: EngineClient) -> None:
        client.config, front.here.held = replace(client.config, queue=1), asyncio.Event()
        events = list[Any]()
        await asyncio.to_thread(client.submit, SCRIPT.request(), events.append)
        with pytest.raises(QueueFull):
            await asyncio.to_thread(client.submit, SCRIPT.request())
        assert await asyncio.to_thread(client.offer, SCRIPT.request()) is None
        await asyncio.to_thread(client.close)
        while not events:
            await asyncio.sleep(0.001)
        assert events[0].kind == "shutdown"
        with pytest.raises(EngineDead):
            await asyncio.to_thread(client.submit, SCRIPT.request())

    front.run(work)


@pytest.mark.parametrize("accepted", [True, False])
def test_what_is_cancelled_ends(front: Fixture, accepted: bool) -> None:
    """A replica ends a request with what it has; one that none has ends in the front."""
    own = front.here.engine
    own.model.network.before = lambda what, keys: __import__("time").sleep(0.02)  # type: ignore

    async def work(client: EngineClient) -> Any:
        if not accepted:
            front.here.held = asyncio.Event()
        handle = await asyncio.to_thread(client.submit, SCRIPT.request(), lambda event: None)
        while accepted and client.health().waiting:
            await asyncio.sleep(0.001)
        handle.cancel()
        while handle.terminal is None:
            await asyncio.sleep(0.001)
        return handle.terminal

    end = front.run(work)
    assert end.outcome == "cancelled" and isinstance(end, Finished) == accepted
    assert (("cancel", front.ends[0][0]) in front.here.called) == accepted


def test_turns_of_one_conversation_are_one_session() -> None:
    system = {"role": "system", "content": "Be short."}
    first = [system, {"role": "user", "content": "Hi"}]
    later = [*first, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Bye"}]
    other = [system, {"role": "user", "content": "Hello"}]
    one, two, three = (session_of(Request(messages=each)) for each in (first, later, other))
    assert one == two != three
    assert session_of(Request(ids=[5] * 9000)) == session_of(Request(ids=[5] * 5000))
    assert session_of(Request(prompt="a")) != session_of(Request(prompt="b"))
    assert session_of(DecisionRequest("s", {})) == session_of(DecisionRequest("s", {}, samples=2))
    named = Request(messages=other, call={"x-session-id": "mine", "x-request-id": "1"})
    assert session_of(named) == "mine"


def test_the_states_of_replicas_are_one() -> None:
    states = []
    for slots in (2, 3):
        own, _ = engine(SCRIPT, slots=slots)
        own.submit(SCRIPT.request())
        own.step()
        states.append(own.state())
    both = merged(states)
    assert [slot.index for slot in both.slots] == [0, 1, 2, 3, 4]
    assert [row.slot for row in both.running] == [0, 2]
    assert {both.slots[row.slot].request for row in both.running if row.slot is not None} == {
        row.request_id for row in both.running
    }
    assert both.totals.steps == sum(state.totals.steps for state in states) > 0
    assert merged(states[:1]) == states[0]


def test_an_outline_makes_the_prompts_of_its_model_and_has_no_weights() -> None:
    model, outline = sfumato.load(), load_outline()
    assert all(each.is_meta for each in outline.network.transformer.parameters())
    messages = [{"role": "user", "content": "Who are you?"}]
    assert outline.prompt_ids(messages=messages) == model.prompt_ids(messages=messages)
    assert outline.end_ids == model.end_ids and outline.config == model.config


def test_without_ray_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["deploy", "ray"]) == 2
    assert 'pip install "sfumato[ray]"' in capsys.readouterr().err


@pytest.mark.parametrize("began", [True, False])
def test_what_has_not_begun_is_not_ended(began: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would start again only to end."""
    ended = list[bool]()
    serve = SimpleNamespace(shutdown=lambda: ended.append(True))
    fake: Any = ModuleType("sfumato.deploy.ray")
    fake.ray, fake.serve = SimpleNamespace(is_initialized=lambda: began), serve
    fake.start = lambda args: 1 / 0
    monkeypatch.setitem(sys.modules, "sfumato.deploy.ray", fake)
    monkeypatch.setattr(sfumato.deploy, "ray", fake, raising=False)
    monkeypatch.setattr("signal.signal", lambda *how: None)
    with pytest.raises(ZeroDivisionError):
        deploy.main(argparse.Namespace())
    assert ended == [True] * began
