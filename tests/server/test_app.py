"""The application talks to an `Engine` and to nothing behind it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.support.fake_engine import FakeEngine

from sfumato.engine import Engine, Failed
from sfumato.server.app import create_app
from sfumato.server.models import Models
from sfumato.server.settings import ServerSettings

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def client(engine: Engine) -> TestClient:
    return TestClient(create_app(Models("fake", engine), ServerSettings()))


def frames(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_an_engine_without_a_network_is_served() -> None:
    engine = FakeEngine()
    http = client(engine)
    chat = http.post("/v1/chat/completions", json=CHAT | {"seed": 7, "max_tokens": 9}).json()
    assert chat["choices"][0]["message"]["content"] == "Hello there."
    assert chat["usage"]["completion_tokens"] == 2 and "warnings" not in chat
    (request,) = engine.requests
    assert (request.seed, request.max_tokens) == (7, 9)
    assert request.made and request.made.ids == [5, 6, 7]
    text = http.post("/v1/completions", json={"prompt": "Hi", "n": 2}).json()
    assert [choice["text"] for choice in text["choices"]] == ["Hello there."] * 2
    assert http.post("/completion", json={"prompt": "Hi"}).json()["content"] == "Hello there."
    chunks = frames(http.post("/v1/chat/completions", json=CHAT | {"stream": True}).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello there."


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/health", "status", "ok"),
        ("/livez", "status", "ok"),
        ("/props", "total_slots", 2),
        ("/state", "waiting", 0),
        ("/memory", "used", 123),
        ("/v1/models", "object", "list"),
    ],
)
def test_what_it_says_of_itself(path: str, field: str, value: Any) -> None:
    assert client(FakeEngine()).get(path).json()[field] == value


def test_metrics_and_the_prefix_cache() -> None:
    http = client(FakeEngine())
    assert 'model="fake"' in http.get("/metrics").text
    assert http.post("/reset_prefix_cache").json() == {"emptied_slots": 2}
    assert http.post("/tokenize", json={"content": "a"}).json()["count"] == 1


def test_a_dead_engine_and_a_request_that_fails() -> None:
    engine = FakeEngine(Failed("memory", "no memory"))
    http = client(engine)
    answer = http.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "memory"
    last = frames(http.post("/v1/chat/completions", json=CHAT | {"stream": True}).text)[-1]
    assert last["error"]["message"] == "no memory"
    engine.death = "it has stopped"
    assert http.get("/health").status_code == http.get("/livez").status_code == 503
