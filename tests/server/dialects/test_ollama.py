"""Ollama's API on a model that says what it is told to: lines, tools, options, the model's card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.server.conftest import Served, serving
from tests.server.dialects.test_tools import ANSWERS, TOOLS
from tests.support.answering_model import answering_model
from tests.support.fake_engine import FakeEngine

from sfumato.api import Model
from sfumato.diffusion.constraints.hole import Hole
from sfumato.engine import Failed
from sfumato.server.app import ServerSettings, create_app
from sfumato.server.dialects.ollama import conversation
from sfumato.server.models import Models
from sfumato.server.schemas import Unknown
from sfumato.text.messages import check_messages

CHAT, GENERATE = "/api/chat", "/api/generate"
USER = {"role": "user", "content": "Hi"}
DURATIONS = {
    *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
    *("eval_count", "eval_duration"),
}


@pytest.fixture(scope="module")
def answering() -> Iterator[Served]:
    settings = ServerSettings(max_tokens=512, aliases=("m:8b",), keepalive_s=0.001)
    with serving(answering_model(ANSWERS), settings) as served:
        yield served


def ask(server: Served, text: str = "none", **body: Any) -> dict[str, Any]:
    fields = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": False}
    answer: dict[str, Any] = server.post(CHAT, **fields | body).json()
    return answer


def lines(server: Served, path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
    answer = server.post(path, model="m", **body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the lines."""
    unstreamed: dict[str, Any] = {"role": "assistant", "content": ""}
    for part in parts:
        message = part["message"]
        unstreamed["content"] += message["content"]
        if "thinking" in message:
            unstreamed["thinking"] = unstreamed.get("thinking", "") + message["thinking"]
        if "tool_calls" in message:
            unstreamed["tool_calls"] = [*unstreamed.get("tool_calls", ()), *message["tool_calls"]]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    return unstreamed


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        ("none", {}, "stop"),
        ("none", {"options": {"num_predict": 4}}, "length"),
        ("none", {"options": {"stop": "need"}}, "stop"),
        ("both", {"tools": TOOLS}, "stop"),
        ("think", {"think": True}, "stop"),
    ],
)
def test_a_stream_says_what_one_body_says(
    answering: Served, text: str, fields: dict[str, Any], reason: str
) -> None:
    unstreamed = ask(answering, text, **fields)
    assert unstreamed["done"] and unstreamed["done_reason"] == reason
    assert unstreamed.keys() > DURATIONS
    parts = lines(answering, messages=[{"role": "user", "content": text}], **fields)
    assert without_ids(joined(parts)) == without_ids(unstreamed["message"])
    assert parts[-1]["done_reason"] == reason and parts[-1].keys() > DURATIONS
    assert parts[-1]["eval_count"] == unstreamed["eval_count"]


def test_calls_and_thoughts(answering: Served) -> None:
    message = ask(answering, "both", tools=TOOLS)["message"]
    functions = [call["function"] for call in message["tool_calls"]]
    assert [(each["index"], each["arguments"]["city"]) for each in functions] == [
        (0, "Paris"),
        (1, "Rome"),
    ]
    thought = ask(answering, "think", think="low")["message"]
    assert (thought["thinking"], thought["content"]) == ("Hm, a hard one.", "It is 4.")


def test_an_agents_loop(answering: Served) -> None:
    message = joined(lines(answering, messages=[USER | {"content": "both"}], tools=TOOLS))
    messages = [USER | {"content": "both"}, message | {"thinking": "Hm."}]
    messages += [
        {"role": "tool", "content": "sunny", "tool_call_id": call["id"]}
        for call in message["tool_calls"]
    ]
    messages.append(USER | {"content": "none"})
    unstreamed = joined(lines(answering, messages=messages, tools=TOOLS))
    assert unstreamed["content"] == "No tool is needed."


@pytest.mark.parametrize("named", ["tool_name", "name", "tool_call_id", None])
def test_results_say_which_call_they_answer_or_come_in_the_calls_order(named: str | None) -> None:
    calls = [{"id": name, "function": {"name": name, "arguments": {}}} for name in ("a", "b")]
    given = [USER, {"role": "assistant", "tool_calls": calls}]
    for name in ("a", "b"):
        given.append({"role": "tool", "content": "x"} | ({} if named is None else {named: name}))
    checked = check_messages(conversation(given, ServerSettings(), Unknown()))
    assert [message["name"] for message in checked[2:]] == ["a", "b"]


def test_ids_of_results_say_nothing_where_calls_have_none() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b")]
    results = [{"role": "tool", "content": "x", "tool_call_id": str(i)} for i in (5, 6)]
    given = [USER, {"role": "assistant", "tool_calls": calls}, *results]
    checked = check_messages(conversation(given, ServerSettings(), Unknown()))
    assert [message["name"] for message in checked[2:]] == ["a", "b"]


def test_the_same_seed_gives_chats_text(server: Served, embedded: Model) -> None:
    how: dict[str, Any] = {"seed": 5, "temperature": 1.5, "max_steps": 2}
    chat = server.chat("Who are you?", **how, max_tokens=8).json()["choices"][0]["message"]
    options = how | {"num_predict": 8}
    answer = ask(server, "Who are you?", options=options)
    assert answer["message"]["content"] == chat["content"]
    body = {"prompt": "Who are you?", "options": options, "stream": False}
    assert server.post(GENERATE, **body).json()["response"] == chat["content"]


def test_generate(answering: Served) -> None:
    parts = lines(answering, GENERATE, prompt="none")
    assert "".join(part["response"] for part in parts) == "No tool is needed."
    unstreamed = answering.post(GENERATE, prompt="think", think=True, stream=False).json()
    assert (unstreamed["thinking"], unstreamed["response"]) == ("Hm, a hard one.", "It is 4.")
    raw = "<bos><|turn>user\nnone<turn|>\n<|turn>model"
    answer = answering.post(GENERATE, prompt=raw, raw=True, stream=False).json()
    assert answer["response"] == "No tool is needed."


def test_text_before_a_suffix() -> None:
    engine = FakeEngine()
    http = TestClient(create_app(Models("sfumato", engine), ServerSettings()))
    body = {"prompt": "a", "suffix": "b", "stream": False, "options": {"num_predict": 2}}
    assert http.post(GENERATE, json=body).json()["done"]
    assert engine.requests[0].parts == (Hole(at_most=2), "b")
    for wrong in ({"system": "x"}, {"format": "json"}, {"logprobs": True}, {"think": True}):
        assert "error" in http.post(GENERATE, json=body | wrong).json(), wrong


def test_nothing_to_generate(answering: Served) -> None:
    """Clients load and unload the model so."""
    for path, field in ((CHAT, "message"), (GENERATE, "response")):
        (line,) = lines(answering, path)
        assert (line["done"], line["done_reason"]) == (True, "load") and field in line
        answer = answering.post(path, model="m", stream=False, keep_alive=0).json()
        assert answer["done_reason"] == "unload"


def test_log_probabilities(answering: Served) -> None:
    unstreamed = ask(answering, logprobs=True, top_logprobs=2)
    assert "".join(entry["token"] for entry in unstreamed["logprobs"]) == "No tool is needed."
    assert len(unstreamed["logprobs"][0]["top_logprobs"]) == 2
    parts = lines(answering, messages=[USER | {"content": "none"}], logprobs=True)
    tokens = [entry for part in parts for entry in part.get("logprobs", ())]
    assert [entry["token"] for entry in tokens] == [
        each["token"] for each in unstreamed["logprobs"]
    ]


def test_options_and_formats_reach_the_engine() -> None:
    engine = FakeEngine()
    http = TestClient(create_app(Models("sfumato", engine), ServerSettings()))
    options = {"seed": 3, "temperature": 0.5, "num_predict": 9, "max_steps": 4, "num_ctx": 10}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for given, held in (("json", {"type": "object"}), (schema, schema), ("", None), (None, None)):
        body = {"messages": [USER], "options": options, "format": given, "keep_alive": "5m"}
        assert http.post(CHAT, json=body).status_code == 200
        request: Any = engine.requests[-1]
        assert (request.seed, request.max_tokens) == (3, 9)
        assert (request.sampler.temperature, request.sampler.max_steps) == (0.5, 4)
        assert held == (None if request.grammar is None else json.loads(request.grammar.text))
    thinking = (True, "low", "medium", False, None)
    for think, budget in zip(thinking, (None, 512, 2048, None, None), strict=True):
        http.post(CHAT, json={"messages": [USER], "think": think})
        request = engine.requests[-1]
        assert (request.thinking, request.max_thinking_tokens) == (bool(think), budget)
    http.post(CHAT, json={"messages": [USER], "stream_drafts": True})
    assert engine.requests[-1].drafts


def test_an_error_on_the_way_is_a_line() -> None:
    http = TestClient(
        create_app(Models("sfumato", FakeEngine(Failed("timeout", "too late"))), ServerSettings())
    )
    last = http.post(CHAT, json={"messages": [USER]}).text.splitlines()[-1]
    assert json.loads(last) == {"error": "too late"}


@pytest.mark.parametrize(
    ("path", "fields", "beginning"),
    [
        (CHAT, {"messages": [{"role": "robot"}]}, "messages[0].role: "),
        (CHAT, {"messages": [USER | {"images": ["aGk="]}]}, "messages[0].images[0]: this"),
        (CHAT, {"messages": [USER | {"odd": 1}]}, "messages[0].odd: unknown"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: a tool's"),
        (CHAT, {"options": {"temperature": -1}}, "options.temperature: must be"),
        (CHAT, {"options": {"seed": "x"}}, "options.seed: "),
        (CHAT, {"options": {"repeat_penalty": 1.3}}, "options.repeat_penalty: penalties"),
        (CHAT, {"options": {"odd": 1}}, "options.odd: unknown"),
        (CHAT, {"options": {"stop": ["x"] * 17}}, "options.stop: at most"),
        (CHAT, {"think": "deeply"}, "think: must be"),
        (CHAT, {"format": "xml"}, "format: must be"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs: needs"),
        (CHAT, {"tools": [{"type": "web"}]}, "tools[0].type: "),
        (GENERATE, {"prompt": "x", "context": [1]}, "context: is not supported"),
        (GENERATE, {"prompt": "x", "images": ["aGk="]}, "images[0]: this model reads no pictures"),
        (GENERATE, {"prompt": "x", "template": "{{x}}"}, "template: cannot be set"),
        (GENERATE, {"prompt": "x " * 4000}, "prompt: the prompt is 8"),
        ("/api/show", {}, "model: is missing"),
    ],
)
def test_what_is_refused(
    answering: Served, path: str, fields: dict[str, Any], beginning: str
) -> None:
    base = {"messages": [USER]} if path == CHAT else {}
    answer = answering.post(path, **base | fields)
    assert answer.status_code == 400 and answer.json().keys() == {"error"}
    assert answer.json()["error"].startswith(beginning), answer.text


def test_errors_before_a_body_is_read(answering: Served) -> None:
    for method, path, status in (
        ("POST", "/api/pull", 404),
        ("PUT", CHAT, 405),
        ("POST", CHAT, 400),
        ("GET", "/api", 404),
    ):
        answer = answering.http.request(method, path, content="[")
        assert answer.status_code == status and isinstance(answer.json()["error"], str)


def test_the_models_card(answering: Served) -> None:
    listed = answering.http.get("/api/tags").json()["models"]
    assert [model["name"] for model in listed] == ["sfumato:latest", "m:8b"]
    (running,) = answering.http.get("/api/ps").json()["models"]
    assert running["context_length"] == 512 and running["expires_at"] > "2300"
    for name in ("sfumato", "sfumato:latest", "m:8b"):
        shown = answering.post("/api/show", model=name).json()
        assert shown["model_info"]["diffusiongemma.context_length"] == 4096
        assert set(shown["capabilities"]) == {"completion", "insert", "tools", "thinking"}
    other = answering.post("/api/show", name="other")
    assert other.status_code == 404
    assert other.json() == {"error": "model 'other' not found; there are 'sfumato', 'm:8b'"}
    assert answering.http.get("/api/version").json()["version"].count(".") == 2
    assert answering.http.head("/api/tags").status_code == 200


def test_sizes_are_those_of_the_files() -> None:
    engine = FakeEngine(name="x.gguf", nbytes=12)
    http = TestClient(create_app(Models("sfumato", engine), ServerSettings()))
    (model,) = http.get("/api/tags").json()["models"]
    assert (model["size"], model["details"]["format"]) == (12, "gguf")
    digest = model["digest"]
    engine.served = replace(engine.served, nbytes=13)
    assert http.get("/api/tags").json()["models"][0]["digest"] != digest


def test_ollamas_own_client(answering: Served) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=answering.url)
    messages: list[Any] = [{"role": "user", "content": "both"}]
    calls = [
        call
        for part in client.chat(model="m", messages=messages, tools=TOOLS, stream=True)
        for call in part.message.tool_calls or ()
    ]
    assert [call.function.arguments["city"] for call in calls] == ["Paris", "Rome"]
    messages.append({"role": "assistant", "tool_calls": calls})
    messages += [{"role": "tool", "tool_name": "weather", "content": "sunny"} for _ in calls]
    messages.append({"role": "user", "content": "none"})
    assert client.chat(model="m", messages=messages).message.content == "No tool is needed."
    assert client.show(client.list().models[0].model).capabilities[0] == "completion"
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.show("other")
