"""Schemas and grammars over every wire that has them, on a random model that writes nonsense."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel
from tests.server.conftest import Served, serving
from tests.support.random_model import random_model

from sfumato.server.http import inflight
from sfumato.server.settings import ServerSettings

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAMED = {"name": "trip", "schema": SCHEMA, "strict": True}
GRAMMAR = 'root ::= "a" [bc]{2} | "<" [0-9] ">"'


class Trip(BaseModel):
    city: str
    days: int


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(random_model(), ServerSettings(max_tokens=96)) as served:
        yield served


def is_trip(text: str) -> bool:
    trip = json.loads(text)
    return trip["city"] in ("Rome", "Paris") and trip["days"] <= 9 and len(trip) == 2


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


MANY = [f"c{number}" for number in range(1000)]
CASES: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, is_trip),
    ({"response_format": {"type": "json_object"}}, is_object),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_trip),
    ({"structured_outputs": {"json": SCHEMA}}, is_trip),
    ({"structured_outputs": {"json_object": True}}, is_object),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no").__contains__),
    ({"structured_outputs": {"grammar": GRAMMAR}}, re.compile("a[bc]{2}|<[0-9]>").fullmatch),
    ({"guided_json": json.dumps(SCHEMA)}, is_trip),
    ({"guided_regex": "^[ab]{3}$"}, re.compile("[ab]{3}").fullmatch),
    ({"guided_choice": ["Rome"]}, ("Rome",).__contains__),
    ({"guided_choice": MANY}, MANY.__contains__),
    ({"guided_grammar": 'start: "x" /[yz]+/ "."'}, re.compile(r"x[yz]+\.").fullmatch),
    ({"json_schema": SCHEMA}, is_trip),
    ({"grammar": GRAMMAR}, re.compile("a[bc]{2}|<[0-9]>").fullmatch),
]


@pytest.mark.parametrize(
    ("fields", "holds"), CASES, ids=lambda each: getattr(each, "__name__", str(each)[:40])
)
def test_every_wire_holds_it(server: Served, fields: dict[str, Any], holds: Any) -> None:
    path, take = {
        0: ("/v1/chat/completions", lambda body: body["choices"][0]["message"]["content"]),
        1: ("/v1/completions", lambda body: body["choices"][0]["text"]),
        2: ("/completion", lambda body: body["content"]),
    }[[case[0] for case in CASES].index(fields) % 3]
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    answer = server.post(path, **prompt, **fields, seed=1)
    body = answer.json()
    assert answer.status_code == 200, body
    assert holds(take(body)), body
    report = body["timings"]["diffusion"]["constraint"]
    assert report.keys() == {"steps", "repairs", "causal_tokens", "closing_tokens"}
    assert body.get("stop_type", "eos") == "eos"
    assert body.get("choices", [{"finish_reason": "stop"}])[0]["finish_reason"] == "stop"


def test_a_stream_and_log_probabilities(server: Served) -> None:
    how: Any = {"response_format": {"type": "json_schema", "json_schema": NAMED}, "seed": 2}
    messages: Any = [{"role": "user", "content": "x"}]
    chunks = server.client().chat.completions.create(
        model="m", messages=messages, stream=True, logprobs=True, top_logprobs=3, **how
    )
    text, tokens = "", []
    for chunk in chunks:
        text += chunk.choices[0].delta.content or ""
        tokens += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert is_trip(text) and "".join(token.token for token in tokens) == text
    assert all(token.logprob <= 0 for token in tokens), "that of a pinned one may not be known"
    plain = server.chat("x", **how).json()["choices"][0]["message"]["content"]
    assert plain == text


def test_the_openai_client_parses(server: Served) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    parsed = server.client().chat.completions.parse(
        model="m", messages=messages, response_format=Trip, seed=3
    )
    assert isinstance(parsed.choices[0].message.parsed, Trip)


def test_a_thought_may_come_before_it(server: Served) -> None:
    body = server.chat("x", json_schema=SCHEMA, reasoning_effort="low").json()
    assert is_trip(body["choices"][0]["message"]["content"])


def test_too_few_tokens_say_length(server: Served) -> None:
    choice = server.chat("x", json_schema=SCHEMA, max_tokens=8).json()["choices"][0]
    assert choice["finish_reason"] == "length"


NUL = "\x00"
TOO_MUCH = {"enum": [f"{i:>60}" for i in range(5_000)]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"json_schema": {"not": {}}}, "json_schema"),
        ({"json_schema": {"type": "object", "dependentSchemas": {}}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
         "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "(?=x)"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": MANY * 5}, "guided_choice"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"grammar": 'root ::= <[7]> "x"'}, "grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"json_schema": TOO_MUCH}, "json_schema"),
        ({"grammar": 'root ::= "' + "x" * 2**20 + '"'}, "grammar"),
        ({"json_schema": SCHEMA, "grammar": 'root ::= "x"'}, "json_schema"),
        ({"json_schema": SCHEMA, "stop": "x"}, "stop"),
        ({"json_schema": SCHEMA, "ignore_eos": True}, "ignore_eos"),
        ({"json_schema": SCHEMA, "mode": "causal"}, "mode"),
        ({"json_schema": SCHEMA, "prediction": {"type": "content", "content": "x"}}, "prediction"),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_a_400_names_the_field_within_a_second(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    began = time.perf_counter()
    answer = server.chat("x", **fields)
    seconds = time.perf_counter() - began
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error
    assert error["message"].startswith(param) and "\n" not in error["message"]
    assert len(error["message"]) < 500 and seconds < 3  # on a machine that does nothing else: 1


def test_bad_grammars_hold_up_no_stream(server: Served) -> None:
    """They come several at once while a neighbour streams its drafts."""
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_drafts": True}
    bad: list[dict[str, Any]] = [
        {"json_schema": TOO_MUCH},
        {"guided_regex": "(a{1,9999}){1,9999}b{9999}", "max_tokens": 8},  # fits the limits, or not
        {"json_schema": {"not": {}}},
        {"json_schema": {"type": "integer", "multipleOf": 999_983}},
        {"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(4_000)}}},
    ]
    done, statuses = threading.Event(), []

    def send() -> None:
        with ThreadPoolExecutor(12) as pool:
            sent = pool.map(lambda fields: server.chat("x", **fields).status_code, bad * 4)
            statuses.extend(sent)
        done.set()

    client, frames, gap = threading.Thread(target=send), 0, 0.0
    client.start()
    while not done.is_set():  # one stream after another, until all are answered
        last = time.perf_counter()
        seeded = body | {"seed": frames}
        with server.http.stream("POST", "/v1/chat/completions", json=seeded) as got:
            for _ in got.iter_lines():
                now = time.perf_counter()
                frames, gap, last = frames + 1, max(gap, now - last), now
    client.join()
    kinds = [set(statuses[n :: len(bad)]) for n in range(len(bad))]
    assert kinds[1] <= {200, 400} and all(kind == {400} for n, kind in enumerate(kinds) if n != 1)
    assert frames and gap < 3  # on a machine that does nothing else: some tenths


def test_too_many_that_wait_to_be_compiled_are_a_503(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflight, "MOST_WAITING", 0)
    answer = server.chat("x", json_schema=SCHEMA)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "queue_full"
    assert "Retry-After" in answer.headers
    assert server.chat("x", max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/v1/completions", {"prompt": "x", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "x", "echo": True, "max_tokens": 0}, "echo"),
        ("/infill", {"input_prefix": "x", "input_suffix": "y"}, "input_suffix"),
        ("/v1/fill", {"parts": ["x", {"tokens": 2}]}, "grammar"),
    ],
)
def test_what_goes_with_no_grammar(
    server: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = server.post(path, **fields, grammar=GRAMMAR)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(f"{param}: "), error


def test_a_text_that_nothing_follows_holds_a_grammar(server: Served) -> None:
    body = server.post("/infill", input_prefix="x", grammar=GRAMMAR, seed=1).json()
    assert re.fullmatch("a[bc]{2}|<[0-9]>", body["content"]), body


def tool(name: str, parameters: dict[str, Any], strict: bool = True) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": parameters, "strict": strict},
    }


def test_strict_tools(server: Served) -> None:
    tools = [tool("trip", SCHEMA), tool("stop", {})]
    choice = {"type": "function", "function": {"name": "trip"}}
    for chosen in (choice, "required"):
        body = server.chat("x", tools=tools, tool_choice=chosen, seed=4, max_tokens=90).json()
        reply = body["choices"][0]
        assert reply["finish_reason"] == "tool_calls" and not body.get("warnings"), body
        for call in reply["message"]["tool_calls"]:
            arguments = call["function"]["arguments"]
            assert is_trip(arguments) if call["function"]["name"] == "trip" else arguments == "{}"
    body = server.chat(
        "x", tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=90
    ).json()
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1


NAMED_TOOL = {"type": "function", "function": {"name": "trip"}}


@pytest.mark.parametrize("choice", [NAMED_TOOL, "required"], ids=["named", "required"])
def test_a_tool_that_has_to_be_called_is_held(server: Served, choice: Any) -> None:
    """As instructor, LangChain and pydantic-ai send their classes: not strict."""
    tools = [tool("trip", SCHEMA, False)]
    body = server.chat("x", tools=tools, tool_choice=choice, seed=6, max_tokens=90).json()
    (reply,) = body["choices"]
    assert reply["finish_reason"] == "tool_calls" and not body.get("warnings"), body
    calls = reply["message"]["tool_calls"]
    assert all(is_trip(call["function"]["arguments"]) for call in calls)


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"properties": {"a": {"not": {}}}}, ".a: not is not supported"),
        ({"properties": {"a": {"type": "string", "pattern": r"(a)\1"}}}, "backreferences"),
        ({}, None),
    ],
    ids=["keyword", "regex", "none"],
)
def test_a_tool_that_is_not_strict_is_free_where_it_cannot_be_held(
    server: Served, parameters: dict[str, Any], why: str | None
) -> None:
    tools = [tool("trip", parameters, False)]
    body = server.chat("x", tools=tools, tool_choice=NAMED_TOOL, max_tokens=40).json()
    notes = [text for text in body.get("warnings", ()) if text.startswith("tools[0].function")]
    assert len(notes) == (why is not None) and (why or "") in "".join(notes), body
    assert all("'trip' are not held to the schema" in note for note in notes)


LEFT_OUT = "uniqueItems is not held: items may repeat"
PETS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "pet": {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "discriminator": {"propertyName": "kind"},
        },
        "colors": {"type": "array", "items": {"enum": ["red", "blue"]}, "uniqueItems": True},
        "days": {
            "type": "array",
            "items": {"type": "integer", "maximum": 9, "minimum": 0},
            "maxItems": 2,
            "uniqueItems": True,
        },
        "stays": {
            "type": "object",
            "propertyNames": {"enum": ["rome", "oslo"]},
            "additionalProperties": {"type": "boolean"},
        },
        "secret": {"type": "string", "format": "password", "maxLength": 2},
    },
    "required": ["pet", "colors", "days", "stays", "secret"],
    "additionalProperties": False,
    "$defs": {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name}},
            "required": ["kind"],
            "additionalProperties": False,
        }
        for name in ("cat", "dog")
    },
}


def is_pets(text: str) -> bool:
    pets = json.loads(text)
    assert pets.keys() == PETS["properties"].keys()
    assert len(set(pets["colors"])) == len(pets["colors"]) and len(pets["days"]) <= 2
    assert pets["stays"].keys() <= {"rome", "oslo"} and len(pets["secret"]) <= 2
    return pets["pet"] in ({"kind": "cat"}, {"kind": "dog"})


DAYS = {
    "type": "object",
    "required": ["days"],
    "additionalProperties": False,
    "properties": {"days": PETS["properties"]["days"]},
}


def is_days(text: str) -> bool:
    days = json.loads(text)
    return days.keys() == {"days"} and len(days["days"]) <= 2


WIRES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions",
     {"response_format": {"type": "json_schema", "json_schema": {"name": "pets", "schema": PETS}}},
     "response_format.json_schema.schema"),
    ("/v1/chat/completions", {"guided_json": DAYS}, "guided_json"),
    ("/v1/completions", {"structured_outputs": {"json": DAYS}}, "structured_outputs.json"),
    ("/v1/completions", {"grammar": f"start: %json {json.dumps(DAYS)}"}, "grammar"),
    ("/completion", {"json_schema": DAYS}, "json_schema"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "days", "schema": DAYS}}},
     "text.format.schema"),
    ("/api/chat", {"format": DAYS}, "format"),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": DAYS}}},
     "output_config.format.schema"),
]  # fmt: skip


def text_of(body: dict[str, Any]) -> str:
    """The answer of any dialect."""
    if "choices" in body:
        (choice,) = body["choices"]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    if "output" in body:
        return body["output"][-1]["content"][0]["text"]
    content = body["message"]["content"] if "message" in body else body["content"]
    return content[-1]["text"] if isinstance(content, list) else content


@pytest.mark.parametrize(("path", "fields", "field"), WIRES, ids=lambda value: str(value)[:40])
def test_what_a_schema_does_not_hold_stands_in_the_warnings(
    server: Served, path: str, fields: dict[str, Any], field: str
) -> None:
    is_chat = "chat" in path or path == "/v1/messages"
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    prompt = prompt if is_chat else {"input" if "responses" in path else "prompt": "x"}
    holds, most = (is_pets, 400) if "pets" in str(fields) else (is_days, 60)
    bounds = {"max_output_tokens": most} if "responses" in path else {"max_tokens": most}
    bounds = {"options": {"num_predict": most}, "stream": False} if "api" in path else bounds
    bounds = {"n_predict": most} if path == "/completion" else bounds
    answer = server.http.post(path, json=prompt | bounds | fields)
    body = answer.json()
    assert answer.status_code == 200 and holds(text_of(body)), body
    assert f"{field}: {LEFT_OUT}" in body["warnings"]


def test_what_a_stream_does_not_hold_stands_in_its_last_frame(server: Served) -> None:
    answer = server.chat("x", guided_json=DAYS, max_tokens=40, stream=True)
    frames = [line[6:] for line in answer.text.splitlines() if line.startswith('data: {"')]
    notes = [note for frame in frames for note in json.loads(frame).get("warnings", ())]
    assert f"guided_json: {LEFT_OUT}" in notes


@pytest.mark.parametrize("strict", [True, False])
def test_what_a_tool_does_not_hold_stands_in_the_warnings(server: Served, strict: bool) -> None:
    tools = [tool("trip", DAYS, strict)]
    body = server.chat("x", tools=tools, tool_choice=NAMED_TOOL, max_tokens=96).json()
    calls = body["choices"][0]["message"]["tool_calls"]
    assert all(is_days(call["function"]["arguments"]) for call in calls) and calls
    assert f"tools[0].function.parameters: {LEFT_OUT}" in body["warnings"]


def test_a_stop_leaves_the_call_free(server: Served) -> None:
    """Nothing that goes with a call becomes a 400 because the call could be held."""
    tools = [tool("trip", SCHEMA, False)]
    how: dict[str, Any] = {"tools": tools, "tool_choice": NAMED_TOOL, "max_tokens": 40}
    for given in ({"stop": "zq"}, {"ignore_eos": True}):
        body = server.chat("x", **how, **given).json()
        assert body["timings"]["diffusion"].get("constraint") is None, body


def test_a_schema_beside_tools_holds_what_is_no_call(server: Served) -> None:
    """Calls stay possible, and free where they are not strict."""
    body = server.chat("x", tools=[tool("trip", {}, False)], json_schema=SCHEMA, seed=5).json()
    message = body["choices"][0]["message"]
    assert message.get("tool_calls") or is_trip(message["content"])


@pytest.mark.parametrize(
    ("parameters", "word"),
    [({"not": {}}, "not"), ({"properties": {"a": {"type": "strin"}}}, "strin")],
)
def test_a_strict_tool_that_is_not_supported(
    server: Served, parameters: dict[str, Any], word: str
) -> None:
    error = server.chat("x", tools=[tool("f", parameters)]).json()["error"]
    assert error["message"].startswith("tools[0].function.parameters") and word in error["message"]
