"""Bodies: what is bounded before anything of its size is made, and who waits for whom."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from sfumato.api import Model
from sfumato.server.app import ServerSettings
from sfumato.server.dialects.openai_chat import ChatBody
from sfumato.server.dialects.openai_completions import CompletionBody
from sfumato.server.http import admission, request_body
from sfumato.server.http.admission import Budget
from sfumato.server.http.errors import ApiError, in_the_words_of
from sfumato.server.info import DetokenizeBody

MOST = 2**17
SIZE = 8 << 20
USER = b'{"role":"user","content":"Hi"}'
CHAT, TEXT = ChatBody, CompletionBody


def filled(before: bytes, item: bytes, after: bytes, size: int = SIZE) -> bytes:
    return before + item * ((size - len(before) - len(after)) // len(item)) + after


def within(before: bytes, item: bytes, after: bytes) -> bytes:
    """As large as the count of values lets it be."""
    cost = sum(item.count(sign) for sign in b",:[{")
    return before + item * ((MOST - 100) // cost) + after


WORST: dict[str, Callable[[], tuple[type[BaseModel], bytes, str]]] = {
    "messages of numbers": lambda: (CHAT, filled(b'{"messages":[1', b",1", b"]}"), "values"),
    "fewer of them": lambda: (CHAT, within(b'{"messages":[1', b",1", b"]}"), "messages[0]"),
    "empty lists": lambda: (CHAT, filled(b'{"messages":[[]', b",[]", b"]}"), "values"),
    "unknown fields": lambda: (
        CHAT,
        b"{%b}" % b",".join(b'"k%d":1' % i for i in range(800_000)),
        "values",
    ),
    "fewer unknown ones": lambda: (
        CHAT,
        b"{%b}" % b",".join(b'"k%d":1' % i for i in range(MOST // 2 - 10)),
        "and 65,506 more: unknown",
    ),
    "unknown ones inside": lambda: (
        CHAT,
        b'{"messages":[%b],"stream_options":{%b}}'
        % (USER, b",".join(b'"k%d":1' % i for i in range(MOST // 2 - 20))),
        "stream_options.k0",
    ),
    "biases": lambda: (
        CHAT,
        b'{"messages":[%b],"logit_bias":{%b}}'
        % (USER, b",".join(b'"%d":"x"' % i for i in range(MOST // 2 - 20))),
        "logit_bias: at most 1024",
    ),
    "stop texts": lambda: (
        CHAT,
        within(b'{"messages":[%b],"stop":[1' % USER, b",1", b"]}"),
        "stop",
    ),
    "tools": lambda: (
        CHAT,
        within(b'{"messages":[%b],"tools":[1' % USER, b",1", b"]}"),
        "tools[0]",
    ),
    "a prompt of ids": lambda: (TEXT, filled(b'{"prompt":[1', b",1", b"]}"), "values"),
    "ids and a text": lambda: (TEXT, within(b'{"prompt":[1', b",1", b',"x"]}'), "prompt"),
    "lists of texts": lambda: (TEXT, within(b'{"prompt":[["x"]', b',["x"]', b"]}"), "prompt"),
    "tokens": lambda: (DetokenizeBody, within(b'{"tokens":["x"', b',"x"', b"]}"), "tokens[0]"),
    "nesting": lambda: (CHAT, b"[" * SIZE, "nested too deeply"),
    "objects": lambda: (CHAT, b'{"messages":' * (SIZE // 12), "nested too deeply"),
    "digits": lambda: (CHAT, filled(b'{"seed":', b"9", b"}"), "not JSON"),
    "white space": lambda: (CHAT, b" " * SIZE, "not JSON"),
    "quotes": lambda: (CHAT, filled(b'{"messages":', b'""', b"}"), "not JSON"),
    "a name": lambda: (CHAT, filled(b'{"', b"x", b'":1}'), "unknown"),
    "UTF-16": lambda: (
        CHAT,
        ('{"messages":["' + "∀" * 100 + '"]}').encode("utf-16-le"),
        "not JSON",
    ),
}


@pytest.mark.parametrize("name", WORST)
def test_the_worst_bodies_cost_little(name: str) -> None:
    model, body, message = WORST[name]()
    data = bytearray(body)
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught, in_the_words_of({}):
            request_body.decoded(data, model, lenient=False, most_values=MOST)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.status == 400 and message in caught.value.message
    assert len(caught.value.message) < 3000
    assert peak < 60e6, f"{peak:,.0f} bytes of Python's objects"


def test_many_unknown_fields_are_left_out_where_the_server_is_lenient() -> None:
    names = b",".join(b'"k%d":1' % i for i in range(MOST // 2 - 50))
    inner = b'"stream_options":{"include_usage":true,"x":1}'
    body = b'{"messages":[%b],%b,%b}' % (USER, inner, names)
    decoded = request_body.decoded(bytearray(body), CHAT, lenient=True, most_values=MOST)
    assert decoded.stream_options and decoded.stream_options.include_usage
    unknown = decoded.envelope.unknown
    assert (len(unknown.named), unknown.count) == (20, MOST // 2 - 49)


@pytest.mark.parametrize("length", [True, False])
def test_a_large_text_is_read(server: Any, length: bool) -> None:
    text = '😀 "quoted" \\ [1,2,{' + "word, " * 700_000
    body = {"messages": [{"role": "user", "content": "Hi"}], "metadata": {"x": text}, "n": 1}
    data = json.dumps(body, ensure_ascii=length).encode()
    assert len(data) > 4e6
    sent: Any = data if length else (data[i : i + 100_000] for i in range(0, len(data), 100_000))
    answer = server.http.post("/v1/chat/completions", content=sent)
    assert answer.status_code == 200, answer.text
    mark = b"\xef\xbb\xbf" + json.dumps({"content": "Hi"}).encode()
    assert server.http.post("/tokenize", content=mark).status_code == 200


def test_no_large_part_of_a_body_is_kept_while_its_reply_is_written() -> None:
    body = b'{"messages":[%b],"metadata":{"x":1},"model":"%b","n":2,"tool_choice":{"type":"x"}}'
    body = bytearray(body % (USER, b"x" * 2000))
    small = request_body.without_large_fields(
        request_body.decoded(body, CHAT, lenient=False, most_values=MOST)
    )
    assert (small.messages, small.metadata, small.model, small.tool_choice) == (None,) * 4
    assert small.n == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/apply-template"])
@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "😀" + "x" * 3_000_000},
        {"role": "assistant", "content": "<|channel>" + "x" * 3_000_000},
        {"role": "user", "content": "Hi", "name": "x" * 3_000_000},
    ],
)
def test_no_copy_is_made_of_a_text_that_no_context_holds(
    server: Any, monkeypatch: pytest.MonkeyPatch, path: str, message: dict[str, str]
) -> None:
    monkeypatch.setattr("sfumato.text.prompt.check_messages", None)
    monkeypatch.setattr("sfumato.text.template.check_messages", None)
    answer = server.post(path, messages=[message, {"role": "user", "content": "Hi"}])
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_ids_to_text_are_bounded_by_the_context(server: Any, embedded: Model) -> None:
    most = embedded.config.context_length
    assert server.post("/detokenize", tokens=[5] * most).status_code == 200
    answer = server.post("/detokenize", tokens=[5] * (most + 1))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"tokens: are {most + 1:,}, and")


def test_the_count_is_a_setting(serve: Callable[..., Any], embedded: Model) -> None:
    served = serve(embedded, ServerSettings(max_values=50))
    answer = served.post("/detokenize", tokens=[5] * 60)
    assert answer.json()["error"]["code"] == "body_too_complex"
    assert "raise --max-values" in answer.json()["error"]["message"]
    assert served.post("/detokenize", tokens=[5] * 40).status_code == 200


def test_stalled_uploads_hold_up_no_small_body_and_give_way_to_large_ones(
    serve: Callable[..., Any], embedded: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "GRACE_S", 0.3)
    monkeypatch.setattr(admission, "CHECK_S", 0.05)
    served = serve(embedded, ServerSettings(max_body=1 << 20))
    host, port = served.url.removeprefix("http://").split(":")
    stalled = []
    for _ in range(2):
        raw = socket.create_connection((host, int(port)))
        raw.settimeout(20)
        head = f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nContent-Length: {1 << 20}\r\n\r\n"
        raw.sendall(head.encode() + b'{"content": "')
        stalled.append(raw)
    time.sleep(0.2)
    began = time.monotonic()
    assert served.post("/tokenize", content="Hi").status_code == 200
    assert time.monotonic() - began < 5
    large = served.post("/tokenize", content="x" * 900_000)
    assert large.json()["error"]["code"] == "context_length_exceeded"
    answers = [raw.recv(4096) for raw in stalled[:1]]
    assert answers[0].startswith(b"HTTP/1.1 408 ") and b"while others waited" in answers[0]
    for raw in stalled:
        raw.close()


def test_what_there_is_no_room_for_has_its_answer(
    serve: Callable[..., Any], embedded: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "WAIT_S", 0.2)
    monkeypatch.setattr(admission, "CHECK_S", 0.05)
    served = serve(embedded, ServerSettings(max_body=1 << 22))
    # As where others hold all of it.
    monkeypatch.setattr(served.service.admission, "bodies", Budget(0, most_waiting=1))
    answer = served.post("/tokenize", content="x" * 4_000_000)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "bodies_busy"


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


async def busy(bodies: Budget, nbytes: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        async with bodies.hold(nbytes):
            pass
    return caught.value


def test_room_is_given_in_order_and_the_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "WAIT_S", 0.3)
    monkeypatch.setattr(admission, "CHECK_S", 0.05)

    async def body(bodies: Budget, nbytes: int, taken: list[int]) -> None:
        async with bodies.hold(nbytes):
            taken.append(nbytes)

    async def work() -> None:
        bodies, taken = Budget(100, most_waiting=2), list[int]()
        async with bodies.hold(60):
            large = asyncio.create_task(body(bodies, 80, taken))
            await asyncio.sleep(0)
            small = asyncio.create_task(body(bodies, 10, taken))  # it would fit, and waits its turn
            await asyncio.sleep(0)
            third = await busy(bodies, 1)
            assert (third.status, third.code) == (503, "bodies_busy")
            assert third.headers["Retry-After"]
        await asyncio.gather(large, small)
        assert taken == [80, 10]
        async with bodies.hold(100):
            began = time.monotonic()
            assert (await busy(bodies, 1)).status == 503
            assert 0.2 < time.monotonic() - began < 5
            cancelled = asyncio.create_task(body(bodies, 1, taken))
            await asyncio.sleep(0)
            cancelled.cancel()
        async with bodies.hold(100):  # all of it is there again
            pass
        threads = Budget(1)
        async with threads.hold():
            with pytest.raises(ApiError):
                async with threads.hold():
                    pass

    run(work())


def test_what_is_lent_is_others_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "WAIT_S", 0.2)
    monkeypatch.setattr(admission, "CHECK_S", 0.05)

    async def work() -> None:
        threads = Budget(1)
        async with threads.hold():
            async with threads.lend(), threads.hold():
                pass
            assert (await busy(threads, 1)).code == "bodies_busy"
        other = threads.hold()
        with pytest.raises(ApiError):  # it does not come back
            async with threads.hold(), threads.lend():
                await other.__aenter__()
        await other.__aexit__(None, None, None)
        async with threads.hold():  # there is one, as before
            assert (await busy(threads, 1)).code == "bodies_busy"

    run(work())


def test_a_body_that_keeps_its_pace_is_not_hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GRACE_S", 0.0)
    monkeypatch.setattr(admission, "LEAST_PACE", 1000)
    monkeypatch.setattr(admission, "CHECK_S", 0.01)

    @asynccontextmanager
    async def uploading(bodies: Budget, nbytes: int) -> AsyncIterator[None]:
        async with admission.arriving(9.0, bodies) as arrival:
            arrival.nbytes = nbytes
            yield

    async def slow(bodies: Budget) -> None:
        async with bodies.hold(50), uploading(bodies, 0):
            await asyncio.sleep(10)

    async def work() -> None:
        bodies = Budget(100, most_waiting=2)
        async with AsyncExitStack() as held:
            await held.enter_async_context(bodies.hold(50))
            await held.enter_async_context(uploading(bodies, 10**9))
            task = asyncio.create_task(slow(bodies))
            await asyncio.sleep(0.1)
            assert not task.done()  # nothing waits for its bodies
            async with bodies.hold(50):
                with pytest.raises(ApiError, match="while others waited"):
                    await task

    run(work())


def test_health_answers_beside_the_worst_bodies(
    serve: Callable[..., Any], embedded: Model, note: Callable[[str], None]
) -> None:
    """benchmarks/hostile_clients.py measures it; here the limits are several times the figures."""
    served = serve(embedded)
    names = ("empty lists", "fewer unknown ones", "ids and a text", "quotes")
    until = time.monotonic() + 2
    statuses: list[int] = []

    def attack(name: str) -> None:
        model, body, _ = WORST[name]()
        path = "/v1/completions" if model is TEXT else "/v1/chat/completions"
        with httpx.Client(base_url=served.url, timeout=60) as client:
            while time.monotonic() < until:
                statuses.append(client.post(path, content=body).status_code)

    threads = [threading.Thread(target=attack, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    times = []
    while time.monotonic() < until:
        began = time.monotonic()
        assert served.http.get("/health").status_code == 200
        times.append(time.monotonic() - began)
    for thread in threads:
        thread.join(60)
    times.sort()
    note(
        f"/health beside four of the worst bodies: p50 {times[len(times) // 2]:.3f} s, "
        f"max {times[-1]:.3f} s, {len(statuses)} bodies refused"
    )
    assert set(statuses) <= {400, 503} and len(statuses) >= 4
    assert times[len(times) * 99 // 100] < 3
