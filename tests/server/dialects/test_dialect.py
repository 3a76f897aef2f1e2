"""A dialect is one file: a toy with a body, lines and errors of its own, in a few lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.support.fake_engine import FakeEngine

from sfumato.engine import Failed, Finished, Request, Settled
from sfumato.refused import Refused
from sfumato.server import dialects as error_forms
from sfumato.server.app import create_app
from sfumato.server.chat.sampling import request_fields
from sfumato.server.dialects import DIALECTS
from sfumato.server.http.errors import OPENAI_ERRORS, ApiError, ErrorForm
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.route import Dialect, Frame, Renderer, Wire
from sfumato.server.models import Models
from sfumato.server.schemas import Sampling
from sfumato.server.service import Service
from sfumato.server.settings import ServerSettings

# The toy: newline-delimited JSON, streams unless told not to, errors as one word and a text.


class ToyBody(Sampling):
    ask: str


def parse(service: Service, body: ToyBody) -> list[Request]:
    ids = service.raw_prompt(body.ask, "/toy")
    return [Request(ids=ids, **request_fields(body, service.model, "/toy"))]


class ToyRenderer(Renderer):
    def __init__(self, service: Service, body: ToyBody, requests: Sequence[Request]) -> None:
        self._model = service.name

    def body(self, replies: Sequence[CollectedReply]) -> Frame:
        return {"model": self._model, "say": replies[0].finished.reply.text}

    def settled(self, number: int, settled: Settled) -> Iterable[Frame]:
        yield {"type": "part", "say": settled.text}

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        yield {"type": "end", "tokens": end.account.output_tokens}


TOY = Dialect(
    name="toy",
    path="/toy",
    tag="toy",
    help="A toy.",
    body_type=ToyBody,
    parse=parse,
    renderer=ToyRenderer,
    streams=lambda body: body.stream is not False,
    wire=Wire("application/x-ndjson", lambda frame: json.dumps(frame) + "\n"),
    errors=ErrorForm(lambda error: {"type": "oops", "oops": error.message, "of": error.param}),
    wording={"max_tokens": "most"},
)

NAMED = replace(  # server-sent events with names
    TOY,
    wire=Wire(
        "text/event-stream",
        lambda frame: f"event: {frame['type']}\ndata: {json.dumps(frame)}\n\n",
        keepalive="event: ping\ndata: {}\n\n",
        end="event: bye\ndata: {}\n\n",
    ),
)


def client(dialect: Dialect[Any] = TOY, failure: Failed | None = None, **settings: Any) -> Any:
    fixed = ServerSettings(**settings)
    return TestClient(
        create_app(Models("m", FakeEngine(failure)), fixed, dialects=(*DIALECTS, dialect))
    )


def test_plain_and_streamed() -> None:
    http = client()
    answer = http.post("/toy", json={"ask": "Hi", "stream": False})
    assert answer.json() == {"model": "m", "say": "Hello there."}
    assert answer.headers["x-request-id"]
    answer = http.post("/toy", json={"ask": "Hi"})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    parts = [json.loads(line) for line in answer.text.splitlines()]
    assert parts[:2] == [{"type": "part", "say": "Hello "}, {"type": "part", "say": "there."}]
    assert parts[2:] == [{"type": "end", "tokens": 2}]


def test_named_events() -> None:
    text = client(NAMED).post("/toy", json={"ask": "Hi"}).text
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert names == ["part", "part", "end", "bye"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"ask": 5}, 400),
        ({"ask": "Hi", "nonsense": 1}, 400),
        ({}, 400),
        ({"ask": "Hi", "temperature": -1}, 400),
    ],
)
def test_errors_have_the_dialects_form(body: dict[str, Any], status: int) -> None:
    answer = client().post("/toy", json=body)
    assert answer.status_code == status and answer.json().keys() == {"type", "oops", "of"}


def test_errors_have_the_bodys_words() -> None:
    error = ApiError.of(Refused("max_tokens", "too many"))
    error.rename(TOY.wording)
    assert (error.message, error.param) == ("most: too many", "most")
    other = ApiError.of(Refused("max_tokens_of", "too many"))
    other.rename(TOY.wording)
    assert other.param == "max_tokens_of"
    answer = client().post("/toy", json={"ask": "Hi", "max_steps": 0})
    assert answer.json()["of"] == "max_steps"


def test_paths_below_a_route_and_of_a_prefix_have_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    by_header = {"/toys": lambda headers: TOY.errors if "x-toy" in headers else OPENAI_ERRORS}
    monkeypatch.setattr(error_forms, "PREFIXES", by_header)
    http = client()
    assert http.get("/toy/nowhere").json()["type"] == "oops"
    assert "error" in http.get("/toys/nowhere").json() and "error" in http.get("/toyland").json()
    assert http.get("/toys/nowhere", headers={"x-toy": "1"}).json()["type"] == "oops"


def test_errors_of_the_gate_and_of_other_methods_have_it_too() -> None:
    http = client(api_keys=("k",), max_body=1000)
    assert http.post("/toy/", json={"ask": "Hi"}).json()["type"] == "oops"  # 401
    assert http.post("/completion", json={}).json()["error"]["code"] == "invalid_api_key"
    http.headers["x-api-key"] = "k"
    large = http.post("/toy", json={"ask": "x" * 2000})
    assert (large.status_code, large.json()["type"]) == (413, "oops")
    assert http.put("/toy").json()["type"] == "oops"  # 405
    assert "error" in http.post("/nowhere").json()


def test_a_reply_that_fails() -> None:
    failure = Failed("timeout", "too late")
    answer = client(failure=failure).post("/toy", json={"ask": "Hi", "stream": False})
    assert (answer.status_code, answer.json()["oops"]) == (504, "too late")
    lines = client(failure=failure).post("/toy", json={"ask": "Hi"}).text.splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["part", "oops"]
    assert client(NAMED, failure).post("/toy", json={"ask": "Hi"}).text.count("event: oops") == 1


def test_a_renderer_that_fails_is_an_error_in_the_dialects_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ToyRenderer, "finished", lambda *_: 1 / 0)
    lines = client().post("/toy", json={"ask": "Hi"}).text.splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["part", "part", "oops"]


def test_the_api_description_has_it() -> None:
    description = client().get("/openapi.json").json()
    route = description["paths"]["/toy"]["post"]
    assert route["description"] == "A toy."
    assert "application/x-ndjson" in route["responses"]["200"]["content"]
    assert "ask" in description["components"]["schemas"]["ToyBody"]["properties"]
