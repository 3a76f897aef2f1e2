"""Typed decisions at the gate: keys, sizes of bodies and names of the model, in every form."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest
from tests.server.dialects.decisions.test_decisions import (
    ANY,
    GEMINI,
    GOOGLE,
    ONE,
    OPENAI,
    SYSTEM_ONE,
    Client,
)
from tests.support.answering_model import answering_model

from sfumato.engine import ServedModel
from sfumato.text.template import ChatTemplate
from sfumato.text_side import TextSide


@pytest.fixture
def client() -> Client:
    return Client()


def test_keys() -> None:
    client = Client(api_keys=("secret",))
    forms = [(ONE, SYSTEM_ONE, {}), (ANY, OPENAI, {}), (ANY, GEMINI, GOOGLE)]
    wrong = [client.post(path, body, authorization="Bearer no", **h) for path, body, h in forms]
    assert [answer.status_code for answer in wrong] == [401, 401, 401]
    missing = client.post(ONE, SYSTEM_ONE)
    assert missing.status_code == 403
    for answer in (wrong[0], missing):
        assert answer.json()["detail"]["error_type"] == "authentication_error"
    assert wrong[1].json()["error"]["code"] == "invalid_api_key"
    assert wrong[2].json()["error"]["status"] == "UNAUTHENTICATED"
    good = {"x_goog_api_key": "secret"}
    assert client.post(ANY, GEMINI, **good).status_code == 200
    assert client.post(ONE, SYSTEM_ONE, authorization="Bearer secret").status_code == 200


def test_a_body_over_the_limit() -> None:
    client = Client(max_body=1000)
    for path, headers in ((ONE, {}), (ANY, {}), (ANY, GOOGLE)):
        assert client.post(path, {"state": "x" * 2000}, **headers).status_code == 413
    large = client.post(ONE, {"state": "x" * 2000}).json()
    assert large["detail"]["error_type"] == "request_too_large_error"
    assert client.http.get(ONE).json()["detail"]["error_type"] == "method_not_allowed_error"


def test_refusals_before_the_engine_have_a_request_id() -> None:
    client = Client(api_keys=("k",), max_body=1000)
    key = {"authorization": "Bearer k"}
    answers = [
        client.post(ONE, SYSTEM_ONE, authorization="Bearer no"),
        client.post(ONE, SYSTEM_ONE),
        client.post(ONE, {"state": "x" * 2000}, **key),
        client.http.post(ONE, content=b"{", headers=key),
        client.post(ONE, SYSTEM_ONE | {"questions": 5}, **key),
        client.post(ANY, SYSTEM_ONE | {"questions": {}}, **key),
        client.post(ONE, SYSTEM_ONE | {"model": "gpt-4"}, **key),
        client.http.get(ONE, headers=key),
    ]
    assert [a.status_code for a in answers] == [401, 403, 413, 422, 422, 422, 400, 405]
    names = [answer.headers["x-typesafe-request-id"] for answer in answers]
    assert names == [answer.headers["x-request-id"] for answer in answers]
    assert len(set(names)) == len(names) and not client.engine.decisions
    others = [
        client.post(ANY, OPENAI, authorization="Bearer no"),
        client.post(ANY, GEMINI, x_goog_api_key="no"),
        client.post(ANY, OPENAI | {"questions": []}, **key),
        client.post(ANY, {}, **key),  # of no form
        client.http.post("/v1/chat/completions", json={}, headers=key),
    ]
    assert [answer.status_code for answer in others] == [401, 401, 400, 400, 400]
    assert all(answer.headers["x-request-id"].startswith("req-") for answer in others)
    assert not any("x-typesafe-request-id" in answer.headers for answer in others)


def test_names_of_the_model() -> None:
    client = Client(aliases=("other",))
    for name in ("jev-latest", "jev-1.14", "m", "other", None):
        assert client.post(ONE, SYSTEM_ONE | {"model": name}).json()["model"] == "m"
    answer = client.post(ONE, SYSTEM_ONE | {"model": "gpt-4"})
    assert (answer.status_code, answer.json()["detail"]["error_type"]) == (400, "api_usage_error")
    assert client.post(ANY, SYSTEM_ONE | {"model": "sonar"}).status_code == 200
    assert client.post(ANY, OPENAI | {"model": "gpt-6-luna"}).json()["model"] == "m"
    assert Client(lenient=True).post(ONE, SYSTEM_ONE | {"model": "gpt-4"}).status_code == 200


def test_models(client: Client) -> None:
    models = client.http.get("/v1/models").json()
    (named,) = models["models"]
    assert named.keys() == {"name", "description", "release_date", "capabilities"}
    assert named["name"] == "m"
    written = client.engine.served.written
    assert written is None and date.fromisoformat(named["release_date"])
    client.engine.served = replace(client.engine.served, written=86_400.0)
    (named,) = client.http.get("/v1/models").json()["models"]
    assert named["release_date"] == "1970-01-02"
    assert "decisions" in models["data"][0]["architecture"]["output_modalities"]


def test_a_model_that_cannot_decide(client: Client) -> None:
    why = "tokenizer: has no token '<x>', see /srv/a/tokenizer.json"
    client.engine.served = replace(client.engine.served, undecided=why)
    (card,) = client.http.get("/v1/models").json()["data"]
    assert card["architecture"]["output_modalities"] == ["text"]
    assert client.http.get("/props").json()["decisions"] is None
    for path, body, headers in ((ONE, SYSTEM_ONE, {}), (ANY, OPENAI, {}), (ANY, GEMINI, GOOGLE)):
        answer = client.post(path, body, **headers)
        assert answer.status_code == 400 and "'m' cannot decide: tokenizer" in answer.text
        assert "/srv" not in answer.text
    assert not client.engine.decisions


def test_whether_a_model_decides_is_found_out_when_it_is_served() -> None:
    model = answering_model()
    assert ServedModel.of(model).undecided is None
    model = answering_model()
    model.text = TextSide(model.tokenizer, ChatTemplate("no message is shown"))
    assert "gives the same prompt" in str(ServedModel.of(model).undecided)
