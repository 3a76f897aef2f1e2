"""The routes about responses that are kept, with the real `openai` client where it has them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient
from tests.support.answering_model import answering_model, slow_down
from tests.support.fake_engine import FakeEngine

from sfumato.api import Model
from sfumato.server.app import ServerSettings, create_app
from sfumato.server.models import Models


@pytest.fixture
def http() -> TestClient:
    return TestClient(create_app(Models("m", FakeEngine()), ServerSettings(page=False)))


@pytest.fixture
def client(http: TestClient) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="k", http_client=http)


def test_a_response_is_read_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="Hi")
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    assert client.responses.cancel(made.id).status == "completed"
    client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_to_be_kept_is_not(http: TestClient, stream: bool) -> None:
    answer = http.post("/v1/responses", json={"input": "Hi", "store": False, "stream": stream})
    lines = [line for line in answer.text.splitlines() if "resp_" in line]
    body = json.loads(lines[-1].removeprefix("data: "))
    body = body["response"] if stream else body
    assert body["store"] is False
    assert http.get(f"/v1/responses/{body['id']}").status_code == 404


def test_nothing_is_kept_without_room(http: TestClient) -> None:
    for nbytes, note in ((0, None), (100, "--response-store")):
        app = create_app(
            Models("sfumato", FakeEngine()), ServerSettings(response_store=nbytes, page=False)
        )
        client = TestClient(app)
        body = client.post("/v1/responses", json={"input": "Hi"}).json()
        assert body["store"] is False and (note is None or note in body["warnings"][0])
        text = client.post("/v1/responses", json={"input": "Hi", "stream": True}).text
        assert '"store":true' not in text and (note is None or note in text)


def test_the_items_of_the_input(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input=[{"role": "user", "content": "One"}])
    then = client.responses.create(model="m", input="Two", previous_response_id=first.id)
    listed: Any = list(client.responses.input_items.list(then.id, order="asc", limit=1))
    assert [(item.role, item.content[0].text) for item in listed] == [
        ("user", "One"),
        ("assistant", "Hello there."),
        ("user", "Two"),
    ]
    newest: Any = client.responses.input_items.list(then.id).data[0]
    assert newest.content[0].text == "Two"


def test_the_items_behind_a_response_that_was_deleted(client: openai.OpenAI) -> None:
    names: list[str] = []
    for text in ("One", "Two", "Three"):
        before = {"previous_response_id": names[-1]} if names else {}
        made = client.responses.create(model="m", input=text, **before)  # type: ignore[call-overload]
        names.append(made.id)
    client.responses.delete(names[0])
    listed: Any = list(client.responses.input_items.list(names[2], order="asc"))
    assert [item.content[0].text for item in listed] == ["Two", "Hello there.", "Three"]


@pytest.mark.parametrize("name", ["input_tokens", "compact"])
def test_routes_of_openai_that_are_not_here(http: TestClient, name: str) -> None:
    answer = http.post(f"/v1/responses/{name}", json={"input": "Hi"})
    assert answer.status_code == 404 and f"no POST /v1/responses/{name}" in answer.text


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=msg_x"])
def test_wrong_queries_are_named(http: TestClient, query: str) -> None:
    made = http.post("/v1/responses", json={"input": "Hi"}).json()["id"]
    answer = http.get(f"/v1/responses/{made}/input_items?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == query.split("=")[0]
    for wrong in ("stream=perhaps", "starting_after=-1"):
        assert http.get(f"/v1/responses/{made}?{wrong}").status_code == 400


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("x?starting_after=-1", "starting_after: must be a whole number from 0 to 999,999,999"),
        ("x?starting_after=a", "starting_after: must be a whole number from 0 to 999,999,999"),
        ("x/input_items?limit=101", "limit: must be a whole number from 1 to 100"),
        ("x/input_items?limit=1.5", "limit: must be a whole number from 1 to 100"),
    ],
)
def test_a_wrong_number_of_a_query_is_told_its_range(
    http: TestClient, query: str, words: str
) -> None:
    answer = http.get(f"/v1/responses/{query}")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, words)


def test_a_kept_response_as_a_stream_is_its_last_event(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="Hi")
    for how, number in (({}, 0), ({"starting_after": 7}, 8)):
        live: Any = client.responses.retrieve(made.id, stream=True, **how)
        (event,) = live
        assert (event.type, event.sequence_number) == ("response.completed", number)
        assert event.response.output_text == made.output_text


def test_a_reference_becomes_its_item(http: TestClient) -> None:
    made = http.post("/v1/responses", json={"input": "Hi"}).json()
    given = [
        {"role": "user", "content": "Hi"},
        {"type": "item_reference", "id": made["output"][0]["id"]},
        {"role": "user", "content": "And?"},
    ]
    answer = http.post("/v1/responses", json={"input": given})
    assert answer.status_code == 200
    listed = http.get(f"/v1/responses/{answer.json()['id']}/input_items?order=asc").json()["data"]
    assert listed[1]["content"][0]["text"] == "Hello there."


def test_what_is_referred_to_is_bounded_as_a_body_is() -> None:
    """A reference takes few bytes, and may stand there many times."""
    http = TestClient(
        create_app(Models("sfumato", FakeEngine()), ServerSettings(max_body=4000, page=False))
    )
    made = http.post("/v1/responses", json={"input": "x" * 1000}).json()
    (item,) = http.get(f"/v1/responses/{made['id']}/input_items?order=asc").json()["data"]
    reference = {"type": "item_reference", "id": item["id"]}
    for body in (
        {"input": [reference] * 5},
        {"input": [reference] * 3, "previous_response_id": made["id"]},
    ):
        answer = http.post("/v1/responses", json=body)
        assert answer.json()["error"]["code"] == "input_too_large"
    assert http.post("/v1/responses", json={"input": [reference] * 3}).status_code == 200


def test_only_the_key_that_made_a_response_finds_it() -> None:
    settings = ServerSettings(api_keys=("k",), page=False)
    app = create_app(Models("sfumato", FakeEngine()), settings)
    http = TestClient(app, headers={"x-api-key": "k"})
    made = http.post("/v1/responses", json={"input": "Hi"}).json()["id"]
    store = app.state.service.responses
    assert http.get(f"/v1/responses/{made}").status_code == 200
    entry = store._entries.pop(made)
    store._entries[made] = type(entry)(**vars(entry) | {"owner": "another"})
    assert http.get(f"/v1/responses/{made}").status_code == 404
    body = {"input": "Hi", "previous_response_id": made}
    refused = http.post("/v1/responses", json=body)
    assert refused.json()["error"]["code"] == "previous_response_not_found"


def test_a_conversation_is_at_most_as_long_as_a_list(client: openai.OpenAI) -> None:
    app = create_app(Models("sfumato", FakeEngine()), ServerSettings(max_messages=4, page=False))
    http = TestClient(app)
    previous = None
    for status in (200, 200, 400):
        answer = http.post("/v1/responses", json={"input": "Hi", "previous_response_id": previous})
        assert answer.status_code == status
        previous = answer.json().get("id")
    assert "--max-messages" in answer.json()["error"]["message"]


@pytest.mark.parametrize("by_cancel", [True, False])
def test_a_stream_is_cancelled_from_elsewhere(
    serve: Callable[..., Any], eventually: Callable[..., None], by_cancel: bool
) -> None:
    model: Model = answering_model({"long": "word " * 400 + "<turn|>"})
    slow_down(model, lambda: time.sleep(0.02))
    served = serve(model, context=4096)
    with served.http.stream(
        "POST", "/v1/responses", json={"input": "long", "stream": True}
    ) as live:
        lines = live.iter_lines()
        name = next(
            json.loads(line[6:])["response"]["id"] for line in lines if line.startswith("data: ")
        )
        path = f"/v1/responses/{name}"
        read = served.client().responses
        assert read.retrieve(name).status == "in_progress"
        body = {"input": "Hi", "previous_response_id": name}
        assert served.post("/v1/responses", **body).status_code == 400
        if by_cancel:
            assert served.post(f"{path}/cancel").json()["status"] == "cancelled"
            last = [json.loads(line[6:]) for line in lines if line.startswith("data: ")][-1]
            assert last["type"] == "response.incomplete"
            assert last["response"]["status"] == "cancelled"
    eventually(lambda: read.retrieve(name).status == "cancelled")
    followed: Any = read.retrieve(name, stream=True)
    (event,) = followed
    assert (event.type, event.response.status) == ("response.incomplete", "cancelled")
    assert served.post("/v1/responses", **body).status_code == 200
    eventually(lambda: served.engine.health().running == 0)
