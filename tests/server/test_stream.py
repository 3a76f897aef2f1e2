"""Streams on the wire: drafts, settled canvases, keep-alives, errors on the way, disconnects."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.server.scripted import slow_down, teller

from sfumato.server.app import ServerSettings
from sfumato.server.stream import pieces

LONG = {"long": "word " * 400 + "<turn|>"}
ENDLESS = [{"role": "user", "content": "long"}]


def frames(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize(
    "text", ["", "a", " a  b\n\nc ", "x" * 100, "Grüße, 世界! " * 9, "\n" * 60, "a\tb"]
)
def test_pieces_are_the_text(text: str) -> None:
    assert "".join(pieces(text)) == text
    assert all(0 < len(piece) <= 25 for piece in pieces(text))


def test_drafts_come_before_the_text_and_say_all_there_is(server: Any) -> None:
    text = server.chat(seed=3, stream=True, stream_drafts=True).text
    found = list(frames(iter(text.splitlines())))
    kinds = [
        "draft" if "draft" in f else "settled" if "settled" in f else "text"
        for f in found
        if "draft" in f or "settled" in f or f["choices"][0]["delta"].get("content")
    ]
    assert kinds[0] == "draft"
    assert kinds.index("draft") < kinds.index("settled") < kinds.index("text")
    draft = next(f["draft"] for f in found if "draft" in f)
    assert (draft["index"], draft["canvas"], draft["step"], draft["max_steps"]) == (0, 0, 1, 48)
    for name in ("token_ids", "tokens", "entropy", "accepted", "top"):
        assert len(draft[name]) == 32
    assert all(isinstance(flag, bool) for flag in draft["accepted"])
    assert draft["top"][0][0][0] == draft["token_ids"][0]
    last = [f["draft"] for f in found if "draft" in f and f["draft"]["canvas"] == 0][-1]
    settled = next(f["settled"] for f in found if "settled" in f)
    count = len(settled["token_ids"])
    assert settled["token_ids"] == last["token_ids"][:count]
    assert (settled["steps"], settled["convergence"]) == (last["step"], "converged")
    assert settled["tokens"] == last["tokens"][:count]
    assert all(f["object"] == "chat.completion.chunk" for f in found)
    assert all(f["choices"] == [] for f in found if "draft" in f or "settled" in f)


def test_a_plain_client_sees_no_drafts(server: Any) -> None:
    assert '"draft"' not in server.chat(stream=True).text
    asked: Any = {"messages": [{"role": "user", "content": "Who are you?"}], "seed": 3}
    with_drafts = server.client().chat.completions.create(
        model="m", stream=True, extra_body={"stream_drafts": True}, **asked
    )
    text = "".join(c.choices[0].delta.content or "" for c in with_drafts if c.choices)
    assert text == server.chat(seed=3).json()["choices"][0]["message"]["content"]


def test_a_comment_keeps_a_silent_stream_alive(serve: Callable[..., Any]) -> None:
    model = teller()
    slow_down(model, lambda: time.sleep(0.4))
    served = serve(model, ServerSettings(keepalive_s=0.1))
    lines = served.chat(stream=True).text.splitlines()
    first_text = next(i for i, line in enumerate(lines) if "Hello" in line)
    assert lines[:first_text].count(": waiting") >= 3


def test_an_error_on_the_way_ends_a_stream(serve: Callable[..., Any]) -> None:
    model = teller(LONG)
    slow_down(model, lambda: time.sleep(0.02))
    served = serve(model, context=4096)
    text = served.chat("long", stream=True, timeout=0.3, max_tokens=2000).text
    found = list(frames(iter(text.splitlines())))
    assert found[-1]["error"]["code"] == "timeout"
    assert not any(c["finish_reason"] for f in found for c in f.get("choices", []))
    assert text.rstrip().endswith("data: [DONE]")


def test_the_openai_client_raises_an_error_on_the_way(serve: Callable[..., Any]) -> None:
    import openai

    model = teller(LONG)
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
    model = teller(LONG)
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
    began = time.monotonic()
    client.close()
    eventually(lambda: served.engine.state().totals.requests == {"cancelled": 1})
    assert time.monotonic() - began < 1.0
    assert not served.engine.state().running
    assert not any(slot.busy for slot in served.engine.state().slots)


def test_a_client_that_leaves_the_queue(serve: Callable[..., Any], eventually: Any) -> None:
    model = teller(LONG)
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


def test_a_slow_reader_gets_the_text_whole(server: Any) -> None:
    """Drafts may be left out for it, text may not."""
    expected = server.chat(seed=3).json()["choices"][0]["message"]["content"]
    body = {
        "messages": [{"role": "user", "content": "Who are you?"}],
        "seed": 3,
        "stream": True,
        "stream_drafts": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        text = ""
        for frame in frames(response.iter_lines()):
            time.sleep(0.02)
            for choice in frame["choices"]:
                text += choice["delta"].get("content", "")
    assert text == expected
