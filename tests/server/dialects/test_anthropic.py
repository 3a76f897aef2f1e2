"""Anthropic's messages on a model that says what it is told to: blocks, streams, tools, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.server.conftest import Served, serving
from tests.server.dialects.test_tools import ANSWERS
from tests.support.answering_model import answering_model
from tests.support.fake_engine import FakeEngine

from sfumato.api import Model
from sfumato.server.app import ServerSettings, create_app
from sfumato.server.models import Models

PATH = "/v1/messages"
LONG = "long " * 90
SETTINGS = ServerSettings(max_tokens=512)
TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": "The weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    }
    for name in ("weather", "time")
]


@pytest.fixture(scope="module")
def answering() -> Iterator[Served]:
    with serving(answering_model(ANSWERS | {LONG: "word " * 40}), SETTINGS) as served:
        yield served


def ask(server: Served, text: str = "none", **body: Any) -> dict[str, Any]:
    fields = {"max_tokens": 200, "messages": [{"role": "user", "content": text}]} | body
    answer: dict[str, Any] = server.post(PATH, **fields).json()
    return answer


def events(server: Served, text: str = "none", **body: Any) -> list[dict[str, Any]]:
    """The frames of a stream, whose names are their types."""
    fields = {"max_tokens": 200, "messages": [{"role": "user", "content": text}]} | body
    answer = server.post(PATH, **fields, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = []
    for event in answer.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        frames.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {frames[-1]['type']}"
    return frames


def joined(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a client makes of the frames; a block begins where the last has ended."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for frame in frames:
        if frame["type"] == "content_block_start":
            assert not is_open and frame["index"] == len(blocks)
            blocks.append(dict(frame["content_block"], json=""))
            is_open = True
        elif frame["type"] == "content_block_delta":
            assert is_open and frame["index"] == len(blocks) - 1
            delta = frame["delta"]
            field = {"input_json_delta": "json", "text_delta": "text"}.get(
                delta["type"], delta["type"].removesuffix("_delta")
            )
            blocks[-1][field] += delta.get(field, delta.get("partial_json"))
        elif frame["type"] == "content_block_stop":
            is_open = False
            arguments = blocks[-1].pop("json")
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(arguments)
    assert not is_open
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: item for name, item in block.items() if name != "id"} for block in blocks]


@pytest.mark.parametrize(
    ("text", "fields", "kinds", "reason"),
    [
        ("none", {}, ["text"], "end_turn"),
        ("both", {"tools": TOOLS}, ["text", "tool_use", "tool_use"], "tool_use"),
        ("one", {"tools": TOOLS, "tool_choice": {"type": "any"}}, ["tool_use"], "tool_use"),
        (
            "both",
            {
                "tools": TOOLS,
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
            ["text", "tool_use"],
            "tool_use",
        ),
        (
            "think",
            {"thinking": {"type": "enabled", "budget_tokens": 100}},
            ["thinking", "text"],
            "end_turn",
        ),
        (
            "think",
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
            ["thinking", "text"],
            "end_turn",
        ),
        ("none", {"stop_sequences": ["x", "need"]}, ["text"], "stop_sequence"),
        ("none", {"max_tokens": 4}, ["text"], "max_tokens"),
        ("none", {"max_tokens": 0}, [], "max_tokens"),
    ],
)
def test_a_stream_says_what_one_body_says(
    answering: Served, text: str, fields: dict[str, Any], kinds: list[str], reason: str
) -> None:
    unstreamed = ask(answering, text, **fields)
    assert [block["type"] for block in unstreamed["content"]] == kinds
    assert unstreamed["stop_reason"] == reason and unstreamed["id"].startswith("msg_")
    assert unstreamed["stop_sequence"] == ("need" if reason == "stop_sequence" else None)
    frames = events(answering, text, **fields)
    assert [frame["type"] for frame in frames[:2]] == ["message_start", "ping"]
    assert [frame["type"] for frame in frames[-2:]] == ["message_delta", "message_stop"]
    assert without_ids(joined(frames)) == without_ids(unstreamed["content"])
    delta = frames[-2]
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": unstreamed["stop_sequence"]}
    usage, first = delta["usage"], frames[0]["message"]["usage"]
    assert usage["output_tokens"] == unstreamed["usage"]["output_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == first["input_tokens"]
    assert frames[0]["message"]["content"] == [] and frames[0]["message"]["stop_reason"] is None


def test_thoughts_have_a_signature_and_may_be_hidden(answering: Served) -> None:
    shown, text = ask(answering, "think", thinking={"type": "adaptive"})["content"]
    assert (shown["thinking"], text["text"]) == ("Hm, a hard one.", "It is 4.")
    thinking = {"type": "adaptive", "display": "omitted"}
    hidden, text = joined(events(answering, "think", thinking=thinking))
    assert hidden == {"type": "thinking", "thinking": "", "signature": shown["signature"]}
    assert text["text"] == "It is 4."


def test_an_agents_loop(answering: Served) -> None:
    """A call, its result, and the answer; the thoughts and calls come back as they were sent."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "both"}]
    blocks = joined(events(answering, messages=messages, tools=TOOLS))
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny", "is_error": False}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    results[0]["content"] = [{"type": "text", "text": "rain"}]
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "foreign"}
    messages += [
        {"role": "assistant", "content": [thought, *blocks]},
        # Anthropic asks for the results first; the other order is read all the same.
        {"role": "user", "content": [{"type": "text", "text": "none"}, *results]},
    ]
    answer = ask(answering, messages=messages, tools=TOOLS)
    assert answer["content"] == [{"type": "text", "text": "No tool is needed."}]
    counted = answering.post(f"{PATH}/count_tokens", model="m", messages=messages, tools=TOOLS)
    usage = answer["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json() == {"input_tokens": prompt}


def prompt_of(server: Served, monkeypatch: Any, path: str, **body: Any) -> list[int]:
    """The tokens of the prompt that a body becomes."""
    seen: list[Any] = []
    submit = server.engine.submit
    with monkeypatch.context() as patch:
        patch.setattr(
            server.engine,
            "submit",
            lambda request, sink: seen.append(request) or submit(request, sink),
        )
        assert server.post(path, **body, max_tokens=8).status_code == 200
    ids: list[int] = seen[0].made.ids
    return ids


def test_turns_become_the_prompt_of_chat(answering: Served, monkeypatch: Any) -> None:
    text = {"type": "text", "text": "a"}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc=1"}
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    block = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c"}
    for system, ours, theirs in (
        (None, [{"role": "user", "content": [text]}], [{"role": "user", "content": "a"}]),
        (
            [billing, text, text],
            [{"role": "user", "content": "b"}, {"role": "assistant", "content": "go on"}],
            [
                {"role": "system", "content": "a\n\na"},
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "go on"},
            ],
        ),
        (
            "s",
            [
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "x"},
                {"role": "assistant", "content": [block]},
                {"role": "user", "content": [result]},
                {"role": "user", "content": "c"},
            ],
            [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "x", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": ""},
                {"role": "user", "content": "c"},
            ],
        ),
    ):
        ids = prompt_of(answering, monkeypatch, PATH, messages=ours, system=system)
        assert ids == prompt_of(answering, monkeypatch, "/v1/chat/completions", messages=theirs)


def test_the_same_seed_gives_chats_text(server: Served, embedded: Model) -> None:
    how: dict[str, Any] = {"seed": 5, "temperature": 1.5, "max_tokens": 8, "max_steps": 2}
    chat = server.chat("Who are you?", **how).json()["choices"][0]["message"]["content"]
    answer = ask(server, "Who are you?", **how)
    assert answer["content"][0]["text"] == chat


def test_a_schema() -> None:
    engine = FakeEngine()
    http = TestClient(create_app(Models("sfumato", engine), SETTINGS))
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}}
    form = {"type": "json_schema", "schema": schema}
    body = {"max_tokens": 8, "messages": [USER], "output_config": {"format": form}}
    assert http.post(PATH, json=body).json()["content"][0]["text"] == "Hello there."
    grammar: Any = engine.requests[0].grammar
    assert json.loads(grammar.text) == schema and grammar.field == "output_config.format.schema"
    both = http.post(PATH, json=body | {"guided_regex": "a"}).json()["error"]["message"]
    assert both.startswith("output_config.format.schema, guided_regex: give at most one")


def test_a_limit_that_is_over_the_context_is_cut(answering: Served) -> None:
    answer = ask(answering, LONG, max_tokens=32_000)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    usage = answer["usage"]
    assert sum(usage[f"{name}_tokens"] for name in ("input", "output", "cache_read_input")) == 513


def test_the_same_where_a_slot_is_all_of_the_models_context() -> None:
    model = answering_model(ANSWERS)
    with serving(model, SETTINGS, slots=1, context=model.config.context_length) as served:
        for text in ("none", "none.", "none, none"):  # canvases end at different places
            assert ask(served, text, max_tokens=32_000)["stop_reason"] == "end_turn"


USER = {"role": "user", "content": "Hi"}
NESTED: dict[str, Any] = {}
for _ in range(70):
    NESTED = {"a": NESTED}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": NESTED}
DEEP = {"role": "assistant", "content": [CALL]}
ASSISTANT = {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}


@pytest.mark.parametrize(
    ("fields", "beginning"),
    [
        ({"messages": []}, "messages: "),
        ({"max_tokens": -1}, "max_tokens: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: "),
        ({"messages": [USER | {"name": "x"}]}, "messages[0].name: unknown"),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "image"}]}]},
            "messages[1].content[0].source.type: must be base64 or url",
        ),
        ({"messages": [USER, ASSISTANT]}, "messages[1].content[0].name: must be text"),
        (
            {"messages": [USER | {"content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "messages[0].content[0]: a tool's message must follow",
        ),
        ({"messages": [USER], "system": [{"type": "image"}]}, "system[0].type: must be text"),
        ({"system": [{"type": "text", "text": 1}]}, "system[0].text: must be text"),
        ({"system": "s", "messages": [USER, DEEP, USER]}, "messages[1].content.tool_calls[0]"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema: must be"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: must be"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: only"),
        ({"tools": [TOOLS[0] | {"odd": 1}]}, "tools[0].odd: unknown"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name: is missing"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: 'x' is not"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: is missing"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 200}},
            "thinking.budget_tokens: must be less",
        ),
        (
            {
                "thinking": {"type": "adaptive"},
                "messages": [USER, {"role": "assistant", "content": "x"}],
            },
            "thinking: an answer that is continued",
        ),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences: at most"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: nothing runs here"),
        ({"thread": {"type": "create"}}, "thread: no conversation is stored here"),
        ({"odd": 1}, "odd: unknown"),
    ],
)
def test_what_is_refused(answering: Served, fields: dict[str, Any], beginning: str) -> None:
    body = {"max_tokens": 200, "messages": [USER]} | fields
    answer = answering.http.post(PATH, content=json.dumps(body))
    error = answer.json()
    assert answer.status_code == 400, error
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith(beginning)
    assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_a_prompt_that_is_too_long_is_told_in_anthropics_words(answering: Served) -> None:
    body = {"messages": [USER | {"content": "x " * 4000}]}
    (count,) = answering.post(f"{PATH}/count_tokens", **body).json().values()
    long = answering.post(PATH, max_tokens=8, **body)
    message = long.json()["error"]["message"]
    assert long.status_code == 400
    assert message.startswith(f"prompt is too long: {count} tokens > 4096 maximum")


def test_errors_before_a_body_is_read(answering: Served) -> None:
    for method, path, status, kind in (
        ("PUT", PATH, 405, "invalid_request_error"),
        ("GET", f"{PATH}/batches", 404, "not_found_error"),
        ("POST", PATH, 400, "invalid_request_error"),
    ):
        answer = answering.http.request(method, path, content="[")
        assert answer.status_code == status and answer.json()["error"]["type"] == kind
    own = {"anthropic-version": "2023-06-01"}
    other = answering.http.get("/v1/models/x", headers=own)
    assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
    assert answering.http.get("/v1/models/x").json()["error"]["code"] is None


def test_fields_that_a_lenient_server_ignores_are_told() -> None:
    settings = ServerSettings(lenient=True)
    with serving(answering_model(ANSWERS), settings) as lenient:
        odd = USER | {"odd": 1, "content": [{"type": "text", "text": "none", "more": 2}]}
        answer = ask(lenient, messages=[odd], tools=[TOOLS[0] | {"new": 3}])
    names = "messages[0].odd, messages[0].content[0].more, tools[0].new"
    assert answer["warnings"] == [f"{names}: unknown, and ignored"]


@pytest.mark.parametrize("lenient", [False, True])
def test_a_thread_is_refused_in_the_words_that_let_a_client_go_on(lenient: bool) -> None:
    """A tool runner that sends one then sends the whole conversation without it."""
    continued = {"type": "continue", "previous_message_id": "msg_1"}
    with serving(answering_model(ANSWERS), ServerSettings(lenient=lenient)) as served:
        for path in (PATH, f"{PATH}/count_tokens"):
            for thread, messages in (({"type": "create"}, [USER]), (continued, [])):
                body = {"messages": messages, "max_tokens": 8, "thread": thread}
                answer = served.post(path, **body)
                details = answer.json()["error"]["details"]
                assert answer.status_code == 400
                assert details["error_code"] == "thread_unsupported_request"
                assert details["unsupported"] == ["thread"]
            assert served.post(path, messages=[USER], max_tokens=8, thread=None).is_success
        other = served.post(PATH, max_tokens=8, messages=[]).json()
        assert "details" not in other["error"]


def test_anthropics_own_client(answering: Served) -> None:
    sdk = pytest.importorskip("anthropic")
    client = sdk.Anthropic(base_url=answering.url, api_key="any", max_retries=0)
    how: dict[str, Any] = {"model": "m", "max_tokens": 300}
    messages: list[Any] = [{"role": "user", "content": "both"}]
    with client.messages.stream(**how, messages=messages, tools=TOOLS) as stream:
        message = stream.get_final_message()
    assert [call.input["city"] for call in message.content[1:]] == ["Paris", "Rome"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        for call in message.content[1:]
    ]
    messages += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "none"}]},
    ]
    answer = client.messages.create(**how, messages=messages, tools=TOOLS)
    assert answer.content[0].text == "No tool is needed." and answer._request_id
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).capabilities.structured_outputs.supported
    with pytest.raises(sdk.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(sdk.BadRequestError, match="prompt is too long"):
        client.messages.create(**how, messages=[{"role": "user", "content": "x " * 4000}])
