"""Requests of one HTTP call: more replies than there are slots, their deadlines and their ends."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.answering_model import answering_model, slow_down

from sfumato.engine import Finished

LONG = {"long": "word " * 400 + "<turn|>"}


class Ends:
    """Terminal events by their requests, as on_finish hears of them."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def __call__(self, request: Any, end: Any) -> None:
        kind = end.reply.stop_reason if isinstance(end, Finished) else end.kind
        self.heard.append((request.id, kind))

    def kinds(self) -> Counter[str]:
        """How many ended how; no request twice."""
        assert len({name for name, _ in self.heard}) == len(self.heard)
        return Counter(kind for _, kind in self.heard)


def test_more_replies_than_slots_and_queue_hold(serve: Callable[..., Any], eventually: Any) -> None:
    ends = Ends()
    served = serve(answering_model(), slots=2, queue=3, on_finish=ends)
    most = 0

    def watch() -> None:
        nonlocal most
        state = served.engine.state()
        most = max(most, state.waiting - (2 - len(state.running)))  # for a free slot nothing waits

    slow_down(served.engine.model, watch)
    answer = served.post("/v1/completions", prompt=["a", "b"], n=64, max_tokens=4).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(128))
    assert answer["usage"]["completion_tokens"] == 128 * 4
    assert most <= 2  # as many as there are slots: the others are left a place
    assert len(served.chat(n=20).json()["choices"]) == 20
    lines = served.chat(n=20, stream=True).text.splitlines()
    assert sum('"finish_reason":"stop"' in line for line in lines) == 20
    eventually(lambda: len(ends.heard) == 168)  # of which the client hears first
    assert ends.kinds() == {"eos": 168}


def test_replies_that_wait_share_the_queue_with_others(
    serve: Callable[..., Any], eventually: Any
) -> None:
    model = answering_model(LONG)
    slow_down(model, lambda: time.sleep(0.01))
    served = serve(model, slots=1, queue=2, context=4096)
    messages = [{"role": "user", "content": "long"}]
    thread = threading.Thread(
        target=lambda: served.chat(messages=messages, n=8, max_tokens=64, timeout=20.0)
    )
    thread.start()
    eventually(lambda: served.engine.state().waiting == 1)
    assert served.chat("Hi", max_tokens=4).status_code == 200
    thread.join()


@pytest.mark.parametrize("stream", [False, True])
def test_deadlines_of_replies_that_were_not_begun(
    serve: Callable[..., Any], eventually: Any, stream: bool
) -> None:
    model, ends = answering_model(LONG), Ends()
    slow_down(model, lambda: time.sleep(0.02))
    served = serve(model, slots=1, queue=1, context=4096, on_finish=ends)
    began = time.monotonic()
    answer = served.chat("long", n=12, max_tokens=1000, timeout=0.5, stream=stream)
    assert time.monotonic() - began < 10
    assert answer.status_code == (200 if stream else 504)
    assert answer.text.count('"code":"timeout"') == 1
    eventually(lambda: len(ends.heard) == 12)
    time.sleep(0.1)  # none ends twice
    kinds = ends.kinds()
    assert kinds["timeout"] and kinds["timeout"] + kinds["cancelled"] == 12


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_replies_that_were_not_begun(
    serve: Callable[..., Any], eventually: Any, stream: bool
) -> None:
    model, ends = answering_model(LONG), Ends()
    slow_down(model, lambda: time.sleep(0.02))
    served = serve(model, slots=1, queue=1, context=4096, on_finish=ends)
    body = {"messages": [{"role": "user", "content": "long"}], "n": 12, "max_tokens": 1000}
    with served.client() as client:
        raw = client._client.build_request(
            "POST", f"{served.url}/v1/chat/completions", json=body | {"stream": stream}
        )
        if stream:
            answer = client._client.send(raw, stream=True)
            next(answer.iter_lines())
            answer.close()
        else:
            raw.extensions = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), 0.5)}
            with pytest.raises(Exception, match="timed out"):
                client._client.send(raw)
    eventually(lambda: len(ends.heard) == 12)
    assert ends.kinds() == {"cancelled": 12}
    assert served.chat("Hi").status_code == 200


def test_what_cannot_be_done_is_refused_before_any_reply_begins(server: Any) -> None:
    prompts = ["Hi"] * 100 + ["x " * 9000]
    error = server.post("/v1/completions", prompt=prompts).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_an_engine_that_closes_ends_all_of_them(serve: Callable[..., Any], eventually: Any) -> None:
    model, ends = answering_model(LONG), Ends()
    slow_down(model, lambda: time.sleep(0.02))
    served = serve(model, slots=1, queue=1, context=4096, on_finish=ends)
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(served.chat("long", n=6, max_tokens=1000))
    )
    thread.start()
    eventually(lambda: served.engine.state().waiting == 1)
    served.engine.close()
    thread.join(20)
    assert answers[0].status_code == 503
    eventually(lambda: len(ends.heard) == 6)
    assert ends.kinds().keys() <= {"shutdown", "cancelled"}


def test_an_engine_that_refuses_a_later_one_ends_all_of_them(
    serve: Callable[..., Any], eventually: Any, monkeypatch: Any
) -> None:
    ends = Ends()
    served = serve(answering_model(LONG), slots=2, queue=3, context=4096, on_finish=ends)
    engine, offer, checks = served.engine, served.engine.offer, []
    check = engine.check

    def closing(request: Any, sink: Any) -> Any:
        engine._inbox.close("the engine is shutting down")
        return offer(request, sink)

    monkeypatch.setattr(engine, "offer", closing)
    monkeypatch.setattr(engine, "check", lambda request: (checks.append(request), check(request)))
    answer = served.post("/v1/completions", prompt=["a", "b"], n=4, max_tokens=1000)
    assert answer.status_code == 503
    eventually(lambda: len(ends.heard) == 8)
    time.sleep(0.1)  # none ends twice
    assert sum(ends.kinds().values()) == 8 and ends.kinds()["shutdown"] == 7
    assert len(checks) == 1  # of the second prompt; the first is checked as it is submitted


def test_one_answer_has_a_bounded_number_of_tokens_and_alternatives(server: Any) -> None:
    most = {"n": 128, "max_tokens": 4096}
    for fields in ({"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "top_logprobs": 5}):
        error = server.chat(**most, **fields).json()["error"]
        assert error["message"].startswith("n, max_tokens, top_logprobs: come to")
        assert error["param"] == "n"
    error = server.post("/v1/completions", prompt=["a", "b"], n=64, logprobs=20, max_tokens=4096)
    assert error.json()["error"]["message"].startswith("n, prompt, max_tokens, logprobs: come to")
