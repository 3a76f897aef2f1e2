"""Streams on the wire: drafts, settled canvases, keep-alives, errors on the way, disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
from tests.support.answering_model import answering_model, slow_down

from sfumato.engine import Draft, Engine, EngineConfig, Event, Finished, Request, Settled
from sfumato.server.app import ServerSettings, create_app
from sfumato.server.dialects import DIALECTS
from sfumato.server.http import route as streams
from sfumato.server.http.inflight import MOST_DRAFTS, InFlight
from sfumato.server.models import Models

LONG = {"long": "word " * 400 + "<turn|>"}
ENDLESS = [{"role": "user", "content": "long"}]


def frames(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def test_drafts_come_before_the_text_and_say_all_there_is(server: Any) -> None:
    text = server.chat(seed=3, stream=True, stream_drafts=True).text
    received = list(frames(iter(text.splitlines())))
    kinds = [
        "draft" if "draft" in f else "settled" if "settled" in f else "text"
        for f in received
        if "draft" in f or "settled" in f or f["choices"][0]["delta"].get("content")
    ]
    assert kinds[0] == "draft"
    assert kinds.index("draft") < kinds.index("settled") < kinds.index("text")
    draft = next(f["draft"] for f in received if "draft" in f)
    assert (draft["index"], draft["canvas"], draft["step"], draft["max_steps"]) == (0, 0, 1, 48)
    for name in ("token_ids", "tokens", "entropy", "accepted", "top"):
        assert len(draft[name]) == 32
    assert all(isinstance(flag, bool) for flag in draft["accepted"])
    assert draft["top"][0][0][0] == draft["token_ids"][0]
    assert len(draft["noise"]) == 32 and draft["noise"] != draft["tokens"]
    last = [f["draft"] for f in received if "draft" in f and f["draft"]["canvas"] == 0][-1]
    settled = next(f["settled"] for f in received if "settled" in f)
    count = len(settled["token_ids"])
    assert settled["token_ids"] == last["token_ids"][:count]
    assert (settled["steps"], settled["convergence"]) == (last["step"], "converged")
    assert last["step"] > 1 and "noise" not in last
    assert settled["tokens"] == last["tokens"][:count]
    assert all(f["object"] == "chat.completion.chunk" for f in received)
    assert all(f["choices"] == [] for f in received if "draft" in f or "settled" in f)


def test_a_plain_client_sees_no_drafts(server: Any) -> None:
    assert '"draft"' not in server.chat(stream=True).text
    body: Any = {"messages": [{"role": "user", "content": "Who are you?"}], "seed": 3}
    with_drafts = server.client().chat.completions.create(
        model="m", stream=True, extra_body={"stream_drafts": True}, **body
    )
    text = "".join(c.choices[0].delta.content or "" for c in with_drafts if c.choices)
    assert text == server.chat(seed=3).json()["choices"][0]["message"]["content"]


def test_a_comment_keeps_a_silent_stream_alive(serve: Callable[..., Any]) -> None:
    model = answering_model()
    slow_down(model, lambda: time.sleep(0.4))
    served = serve(model, ServerSettings(keepalive_s=0.1))
    lines = served.chat(stream=True).text.splitlines()
    first_text = next(i for i, line in enumerate(lines) if "Hello" in line)
    assert lines[:first_text].count(": waiting") >= 3


def test_events_without_a_frame_are_silence_too() -> None:
    """A stream is kept alive while nothing is sent, and not while nothing happens."""
    waits: list[float] = []

    class Running:
        id = "req-1"
        open: ClassVar = {0}

        async def next(self, patience_s: float) -> tuple[int, Any] | None:
            waits.append(patience_s)
            await asyncio.sleep(min(0.06, patience_s))
            if len(waits) == 6:
                self.open.clear()
            return None if patience_s < 0.06 else (0, None)  # no event that has frames

    async def texts() -> list[str]:
        chat: Any = DIALECTS[0]
        service: Any = SimpleNamespace(settings=ServerSettings(keepalive_s=0.1))
        renderer: Any = SimpleNamespace(
            begin=lambda number: (), closed=lambda accounts: (), watches_s=None
        )
        running: Any = Running()
        return [text async for text in streams._Stream(service, running, renderer, chat)._texts()]

    assert asyncio.run(texts()).count(": waiting\n\n") == 3


def test_an_error_on_the_way_ends_a_stream(serve: Callable[..., Any]) -> None:
    model = answering_model(LONG)
    slow_down(model, lambda: time.sleep(0.02))
    served = serve(model, context=4096)
    text = served.chat("long", stream=True, timeout=0.3, max_tokens=2000).text
    received = list(frames(iter(text.splitlines())))
    assert received[-1]["error"]["code"] == "timeout"
    assert not any(c["finish_reason"] for f in received for c in f.get("choices", []))
    assert text.rstrip().endswith("data: [DONE]")


def test_the_openai_client_raises_an_error_on_the_way(serve: Callable[..., Any]) -> None:
    import openai

    model = answering_model(LONG)
    slow_down(model, lambda: time.sleep(0.02))
    served = serve(model, context=4096)
    made = served.client().chat.completions.create(
        model="m",
        messages=ENDLESS,  # type: ignore[arg-type]
        stream=True,
        max_tokens=2000,
        extra_body={"timeout": 0.3},
    )
    with pytest.raises(openai.APIError, match="longer than"):
        list(made)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(
    serve: Callable[..., Any], eventually: Any, stream: bool
) -> None:
    model = answering_model(LONG)
    slow_down(model, lambda: time.sleep(0.02))
    served = serve(model, context=4096)
    body = {"messages": ENDLESS, "stream": stream, "max_tokens": 2000}
    client = httpx.Client(base_url=served.url)

    def go() -> None:
        with (
            client.stream("POST", "/v1/chat/completions", json=body, timeout=60) as response,
        ):
            next(response.iter_lines())

    if stream:
        go()
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=body, timeout=0.5)
    client.close()
    eventually(lambda: served.engine.state().totals.requests == {"cancelled": 1})
    assert not served.engine.state().running
    # The slots are told at the end of the turn, after the client.
    eventually(lambda: not any(slot.busy for slot in served.engine.state().slots))


def test_a_client_that_leaves_the_queue(serve: Callable[..., Any], eventually: Any) -> None:
    model = answering_model(LONG)
    slow_down(model, lambda: time.sleep(0.02))
    served = serve(model, slots=1, context=4096)
    body = {"messages": ENDLESS, "max_tokens": 2000}

    def first() -> None:
        with contextlib.suppress(httpx.HTTPError):  # the server ends before it
            served.chat("long", max_tokens=1000)

    threading.Thread(target=first, daemon=True).start()
    eventually(lambda: len(served.engine.state().running) == 1)
    with httpx.Client(base_url=served.url) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=body, timeout=0.3)
    eventually(lambda: served.engine.state().waiting == 0)
    assert len(served.engine.state().running) == 1


def test_a_slow_reader_gets_the_text_whole_and_the_newest_drafts() -> None:
    """A reader that takes nothing until the reply is over."""
    model = answering_model(LONG)
    with contextlib.closing(Engine(model, EngineConfig(context=4096)).start()) as engine:
        expected = engine.generate(Request(prompt="long", max_tokens=600)).text
        requests = [Request(prompt="long", max_tokens=600, drafts=True, seed=i) for i in range(2)]

        async def events() -> list[tuple[int, Event]]:
            no_client: Any = None  # asked only where a grammar is tried
            started = await InFlight(engine, requests).begin(no_client)
            while engine.state().totals.requests != {"max_tokens": 3}:
                await asyncio.sleep(0.01)
            received = []
            while started.open:
                taken = await started.next(10)
                assert taken
                received.append(taken)
            return received

        every = asyncio.run(events())
    for number in range(2):
        mine = [event for of, event in every if of == number]
        drafts = [event for event in mine if isinstance(event, Draft)]
        commits = [event for event in mine if isinstance(event, Settled)]
        end = mine[-1]
        assert isinstance(end, Finished) and end.reply.text == expected
        assert "".join(commit.text for commit in commits) == expected
        assert len(commits) > len(drafts) == MOST_DRAFTS
        assert drafts[-1].canvas == commits[-1].canvas
        assert drafts[-1].step == end.account.steps[-1]


def call(app: Any, body: dict[str, Any], send: Callable[[Any], Any]) -> Any:
    """The application's answer to a chat request of a client that stays."""
    path = "/v1/chat/completions"
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
    scope |= {"method": "POST", "scheme": "http", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "root_path": "", "http_version": "1.1", "state": {}}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope |= {"headers": headers, "client": ("1", 1), "server": ("localhost", 80)}
    sent = asyncio.Event()

    async def receive() -> Any:
        if sent.is_set():
            await asyncio.Event().wait()
        sent.set()
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    return app(scope, receive, send)


@pytest.mark.parametrize("frames_read", [0, 5])
def test_a_stream_that_is_given_up_is_cancelled_at_once(frames_read: int) -> None:
    """Before its generator has begun, and while a frame does not go out; the generator that is
    left over is never collected."""
    model = answering_model(LONG)
    slow_down(model, lambda: time.sleep(0.02))
    with contextlib.closing(Engine(model, EngineConfig(context=4096)).start()) as engine:
        app = create_app(Models("sfumato", engine))
        count = 0

        async def send(message: Any) -> None:
            nonlocal count
            count += 1
            if count > frames_read:
                raise OSError("the connection is gone")

        body = {"messages": ENDLESS, "stream": True, "max_tokens": 2000}

        async def give_up() -> None:
            # Held: frames in a traceback keep generators alive, as a collection that is late would.
            with pytest.raises(Exception) as held:
                await call(app, body, send)
            for _ in range(100):
                await asyncio.sleep(0.02)
                if engine.state().totals.requests == {"cancelled": 1}:
                    break
            else:
                pytest.fail(f"it runs on, after {held.value!r}")

        gc.disable()
        try:
            asyncio.run(give_up())
        finally:
            gc.enable()


def test_the_servers_loop_does_no_long_work(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes time for a long text is not done where all connections are served."""
    model = answering_model()
    served = serve(model)
    at_work: dict[str, list[bool]] = {"decode": [], "render": [], "token_text": []}

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            at_work[name].append(asyncio._get_running_loop() is not None)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(model.tokenizer, "decode")
    watch(model.tokenizer, "token_text")
    watch(model.template, "render")
    answers = [
        served.post("/detokenize", tokens=[5, 6]),
        served.post("/tokenize", content="a b", with_pieces=True),
        served.post("/apply-template", messages=ENDLESS),
        served.chat("a", logprobs=True, top_logprobs=2),
        served.post("/v1/completions", prompt="a", logprobs=2),
    ]
    assert [answer.status_code for answer in answers] == [200] * 5
    assert all(at_work.values()), at_work
    assert not any(any(looped) for looped in at_work.values()), at_work


def test_a_reply_is_found_in_the_audit_log(serve: Callable[..., Any], eventually: Any) -> None:
    ended: list[str] = []
    served = serve(answering_model(), on_finish=lambda request, event: ended.append(request.id))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "n": 2}
    for stream in (False, True):
        ended.clear()
        answer = served.post("/v1/chat/completions", **body, stream=stream)
        lines = answer.text.splitlines()
        first = next(frames(iter(lines))) if stream else answer.json()
        name = answer.headers["x-request-id"]
        assert first["id"] == "chatcmpl-" + name.removeprefix("req-")
        eventually(partial(ended.__contains__, name))
        answer = served.post("/v1/completions", prompt="a", stream=stream)
        name = answer.headers["x-request-id"]
        assert name.replace("req-", "cmpl-") in answer.text
        eventually(partial(ended.__contains__, name))
    failed = served.chat(timeout=1e-6)
    assert failed.status_code == 504
    for answer in (failed, served.post("/completion", prompt="a")):
        name = answer.headers["x-request-id"]
        eventually(partial(ended.__contains__, name))
