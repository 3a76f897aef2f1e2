"""OpenAI's responses with the real `openai` client, on models that say what they are told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
    ResponseStreamEvent,
)
from pydantic import BaseModel
from starlette.testclient import TestClient
from tests.support.answering_model import Answer, answering_model
from tests.support.fake_engine import FakeEngine

from sfumato.api import Model
from sfumato.engine import Engine, EngineConfig, Failed
from sfumato.server.app import ServerSettings, create_app
from sfumato.server.dialects.responses.body import ResponsesBody
from sfumato.server.dialects.responses.renderer import ResponsesRenderer, parse
from sfumato.server.models import Models
from sfumato.server.service import Service

QUOTE = '<|"|>'
CALL = f"<|tool_call>call:weather{{city:{QUOTE}Paris{QUOTE}}}<tool_call|>"
ANSWERS: dict[str, Answer] = {
    "call": f"{CALL}<turn|>",
    "both": f"Let me see.{CALL}{CALL}\n<turn|>",
    "think": "<|channel>thought\nHm, a hard one.<channel|>It is 4.<turn|>",
    "sunny": "It is sunny.<turn|>",
    "call<turn|>\n<|turn>assistant\n<turn|>\n<|turn>tool\nsunny": "It is sunny in Paris.<turn|>",
    "long": "word " * 100 + "<turn|>",
    "json": '{"n": 4}<turn|>',
}
EVENTS: tuple[type[BaseModel], ...] = get_args(get_args(ResponseStreamEvent)[0])
ITEMS = {
    "message": ResponseOutputMessage,
    "function_call": ResponseFunctionToolCall,
    "reasoning": ResponseReasoningItem,
}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def http() -> Iterator[TestClient]:
    """A scripted model's, in this process."""
    engine = Engine(answering_model(ANSWERS), EngineConfig(slots=2, context=512)).start()
    with TestClient(create_app(Models("m", engine), ServerSettings(page=False))) as client:
        yield client
    engine.close()


@pytest.fixture
def client(http: TestClient) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{http.base_url}/v1", api_key="k", http_client=http, max_retries=0
    )


def post(http: TestClient, given: Any, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/responses", json={"input": given, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def events(http: TestClient, given: Any, **fields: Any) -> list[dict[str, Any]]:
    answer = http.post("/v1/responses", json={"input": given, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return parsed(answer.text)


def parsed(text: str) -> list[dict[str, Any]]:
    blocks = [block.split("\n") for block in text.split("\n\n") if block.startswith("event: ")]
    made = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    for (name, _), event in zip(blocks, made, strict=True):
        assert name == f"event: {event['type']}"
    return made


# What classes of older versions of the package require, as those of 2.54 and 3.3.
OLDER_FIELDS = {"response.function_call_arguments.done": {"name"}}


def fields_of(kind: type[BaseModel], required: bool = False) -> set[str]:
    """The names that a class of the `openai` package has, or those that it has to have."""
    return {
        name for name, field in kind.model_fields.items() if field.is_required() or not required
    }


def check_event(event: dict[str, Any]) -> None:
    """All fields of the event's class are there, and no others; building the classes' validators
    would take seconds."""
    (kind,) = (k for k in EVENTS if event["type"] in get_args(k.model_fields["type"].annotation))
    more = OLDER_FIELDS.get(event["type"], set())
    assert fields_of(kind, required=True) <= event.keys() <= fields_of(kind) | more
    if "response" in event:
        assert fields_of(Response, required=True) <= event["response"].keys()
    if "item" in event:
        assert fields_of(ITEMS[event["item"]["type"]], required=True) <= event["item"].keys()


def refused(http: TestClient, given: Any = "Hi", **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/responses", json={"input": given, **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_a_response_of_the_real_client(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="m", input="sunny", instructions="Be brief.", metadata={"a": "b"}
    )
    assert (made.output_text, made.status, made.object) == ("It is sunny.", "completed", "response")
    assert made.id.startswith("resp_") and made.output[0].id.startswith("msg_")
    assert (made.instructions, made.metadata) == ("Be brief.", {"a": "b"})
    assert made.usage and made.usage.total_tokens == made.usage.input_tokens + 12
    assert fields_of(Response) >= made.to_dict().keys() - {"timings", "warnings", "store"}


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": "sunny"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "sunny"}]}],
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "id": "rs_foreign", "summary": [], "encrypted_content": "x"},
            {"type": "item_reference", "id": "rs_of_no_response"},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Hello.", "annotations": []}],
            },
            {"role": "user", "content": [{"type": "input_text", "text": "sunny"}]},
        ],
    ],
)
def test_forms_of_the_input(http: TestClient, given: Any) -> None:
    assert post(http, given)["output"][0]["content"][0]["text"] == "It is sunny."


def test_the_events_of_a_stream(http: TestClient) -> None:
    made = events(http, "think", reasoning={"effort": "high"})
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    for event in made:
        check_event(event)
    kinds = [event["type"].removeprefix("response.") for event in made]
    shown = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]
    assert shown == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    last = made[-1]["response"]
    thought, message = last["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "Hm, a hard one."}]
    assert message["content"][0]["text"] == "It is 4."
    assert last["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    plain = post(http, "think", reasoning={"effort": "high"})
    assert [shape(item) for item in plain["output"]] == [shape(item) for item in last["output"]]


def shape(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_text_and_calls_are_items(http: TestClient) -> None:
    made = events(http, "both", tools=[WEATHER])
    for event in made:
        check_event(event)
    output = made[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    assert json.loads(output[1]["arguments"]) == {"city": "Paris"}
    assert output[1]["id"].startswith("fc_") and output[1]["call_id"] != output[2]["call_id"]
    deltas = [e for e in made if e["type"] == "response.function_call_arguments.delta"]
    joined = "".join(e["delta"] for e in deltas if e["item_id"] == output[1]["id"])
    assert joined == output[1]["arguments"]
    assert [shape(i) for i in post(http, "both", tools=[WEATHER])["output"]] == [
        shape(i) for i in output
    ]
    (only,) = post(http, "call", tools=[WEATHER], parallel_tool_calls=False)["output"]
    assert only["type"] == "function_call"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_a_loop_with_a_tool(client: openai.OpenAI, stream: bool, by_id: bool) -> None:
    """A call, its result, and the answer; the conversation is sent again, or named."""
    tools: Any = [WEATHER]

    def ask(**fields: Any) -> Any:
        if not stream:
            return client.responses.create(model="m", tools=tools, **fields)
        with client.responses.stream(model="m", tools=tools, **fields) as live:
            assert {event.type for event in live} >= {"response.created", "response.completed"}
            return live.get_final_response()

    first = ask(input=[{"role": "user", "content": "call"}], store=by_id)
    (call,) = first.output
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    if by_id:
        second = ask(input=[result], previous_response_id=first.id)
    else:
        second = ask(input=[{"role": "user", "content": "call"}, call.to_dict(), result])
    assert second.output_text == "It is sunny in Paris."


def test_the_end_of_arguments_names_the_call(http: TestClient) -> None:
    kind = "response.function_call_arguments.done"
    (done,) = (e for e in events(http, "call", tools=[WEATHER]) if e["type"] == kind)
    assert done["name"] == "weather"


def test_the_text_has_a_schema(client: openai.OpenAI) -> None:
    class Number(BaseModel):
        n: int

    made = client.responses.parse(model="m", input="json", text_format=Number)
    assert made.output_parsed == Number(n=4)


def test_the_same_text_as_a_chats(server: Any) -> None:
    for fields in ({}, {"temperature": 0.7}):
        sampling = {"seed": 3, "max_steps": 8, **fields}
        chat = server.chat("Who are you?", **sampling).json()["choices"][0]["message"]["content"]
        plain = server.post("/v1/responses", input="Who are you?", **sampling).json()
        assert plain["output"][0]["content"][0]["text"] == chat
        streamed = parsed(
            server.post("/v1/responses", input="Who are you?", stream=True, **sampling).text
        )
        deltas = [e["delta"] for e in streamed if e["type"].endswith("text.delta")]
        assert "".join(deltas) == chat


def test_logprobs_are_those_of_the_text(server: Any) -> None:
    body = {"input": "Who are you?", "seed": 3, "include": ["message.output_text.logprobs"]}
    for entries in (
        server.post("/v1/responses", **body, top_logprobs=2).json()["output"][0]["content"][0],
        parsed(server.post("/v1/responses", **body, top_logprobs=2, stream=True).text)[-1][
            "response"
        ]["output"][0]["content"][0],
    ):
        assert "".join(entry["token"] for entry in entries["logprobs"]) == entries["text"]
        assert {len(entry["top_logprobs"]) for entry in entries["logprobs"]} == {2}


def test_a_response_at_its_limit(http: TestClient) -> None:
    made = events(http, "long", max_output_tokens=8)
    assert made[-1]["type"] == "response.incomplete"
    assert made[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert made[-1]["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_fails(stream: bool) -> None:
    app = create_app(
        Models("sfumato", FakeEngine(Failed("memory", "no room"))), ServerSettings(page=False)
    )
    answer = TestClient(app).post("/v1/responses", json={"input": "Hi", "stream": stream})
    if not stream:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "memory")
        return
    made = parsed(answer.text)
    assert [e["type"] for e in made if e["type"] in ("response.failed", "response.completed")] == [
        "response.failed"
    ]
    failed = made[-1]["response"]
    assert (failed["status"], failed["error"]["message"]) == ("failed", "no room")
    kept = TestClient(app).get(f"/v1/responses/{failed['id']}").json()
    assert kept["status"] == "failed"


def test_drafts_are_events_of_our_own(http: TestClient) -> None:
    kinds = {event["type"] for event in events(http, "sunny", stream_drafts=True)}
    assert {"sfumato:draft", "sfumato:settled", "response.completed"} <= kinds
    assert not any(e["type"].startswith("sfumato") for e in events(http, "sunny"))


@pytest.mark.parametrize(
    ("given", "fields", "param"),
    [
        ([], {}, "input"),
        ([{"role": "king", "content": "x"}], {}, "input[0].role"),
        (
            [{"role": "user", "content": [{"type": "input_image"}]}],
            {},
            "input[0].content[0].image_url",
        ),
        ([{"role": "user", "content": 5}], {}, "input[0].content"),
        ([{"role": "user", "content": "x", "weight": 1}], {}, "input[0].weight"),
        ([{"type": "web_search_call", "id": "ws_1"}], {}, "input[0].type"),
        ([{"type": "item_reference", "id": "msg_of_no_response"}], {}, "input[0].id"),
        (
            [{"type": "function_call_output", "call_id": "c", "output": "x"}],
            {},
            "input[0].call_id",
        ),
        ([{"type": "reasoning"}], {}, "input"),
        (
            [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            {},
            "input[0].arguments",
        ),
        (
            [
                {"type": "reasoning"},
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "y"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            {"instructions": "Be brief."},
            "input[3].arguments",
        ),
        ("Hi", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("Hi", {"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ("Hi", {"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ("Hi", {"tool_choice": "required"}, "tool_choice"),
        ("Hi", {"background": True}, "background"),
        ("Hi", {"conversation": "c"}, "conversation"),
        ("Hi", {"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ("Hi", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("Hi", {"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ("Hi", {"include": ["everything"]}, "include[0]"),
        ("Hi", {"metadata": {"x": "y" * 513}}, "metadata.x"),
        ("Hi", {"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ("Hi", {"previous_response_id": "resp_x"}, "previous_response_id"),
        ("Hi", {"max_output_tokens": 0}, "max_output_tokens"),
        ("Hi", {"nonsense": 1}, "nonsense"),
        ("x" * 9000, {}, "input"),
    ],
)
def test_a_400_names_the_field(http: TestClient, given: Any, fields: Any, param: str) -> None:
    error = refused(http, given, **fields)
    assert error["param"] == param
    assert error["message"].startswith(param.split(".")[0].split("[")[0])


def test_the_oldest_turns_are_left_out_where_asked(http: TestClient) -> None:
    turn = [{"role": "user", "content": "x" * 150}, {"role": "assistant", "content": "y" * 40}]
    given = [{"role": "system", "content": "Be brief."}, *turn, *turn, *turn]
    given.append({"role": "user", "content": "sunny"})
    made = post(http, given, truncation="auto", max_output_tokens=64)
    assert made["usage"]["input_tokens"] + 64 <= 512
    assert "are left out" in made["warnings"][0]


def test_a_response_repeats_known_fields_alone(http: TestClient) -> None:
    long = "x" * 2**19
    tool = {**WEATHER, "description": None, "output_schema": {"description": long}}
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    made = post(
        http,
        "json",
        tools=[tool],
        tool_choice="none",
        text={"format": schema | {"description": long}},
    )
    assert made["tools"] == [{**WEATHER, "description": None, "strict": False}]
    assert made["text"]["format"] == schema and made["tool_choice"] == "none"
    tool["parameters"] = {"type": "object", "description": long}
    made = post(http, "sunny", tools=[tool], tool_choice="none")
    assert made["tools"] == [] and "too long" in made["warnings"][0]
    choice = {"type": "function", "name": "weather", "more": long}
    made = post(http, "sunny", tools=[WEATHER], tool_choice=choice)
    assert made["tool_choice"] == {"type": "function", "name": "weather"}


def test_the_input_of_a_stream_is_let_go(http: TestClient) -> None:
    service: Service = http.app.state.service  # type: ignore[attr-defined]
    body = ResponsesBody(input="sunny", stream=True, store=True)
    renderer = ResponsesRenderer(service, body, parse(service, body))
    assert len(renderer._inputs) == 1 and not body.envelope.echo.items
    created = next(iter(renderer.begin(0)))["response"]
    assert created["store"] and not renderer._inputs


def test_errors_before_routing(embedded: Model) -> None:
    app = create_app(Models("sfumato", FakeEngine()), ServerSettings(api_keys=("k",), page=False))
    http = TestClient(app)
    for path in ("/v1/responses", "/v1/responses/resp_1", "/responses/nowhere/at/all"):
        assert http.post(path, json={}).json()["error"]["code"] == "invalid_api_key"
    http.headers["authorization"] = "Bearer k"
    assert http.post("/v1/responses", content=b"{").json()["error"]["type"] == (
        "invalid_request_error"
    )
    assert http.get("/v1/responses/a/b/c").json()["error"]["type"] == "not_found_error"
