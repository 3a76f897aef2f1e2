"""Refusals: status, OpenAI's error object, the field's name, and what to do."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from tests.support.answering_model import answering_model, slow_down

from sfumato.api import Model
from sfumato.server.app import ServerSettings
from sfumato.server.http import errors, request_body
from sfumato.server.http.errors import CLIENT_GONE
from sfumato.text.tokenizer import Tokenizer

LONG = {"long": "word " * 400 + "<turn|>"}
USER = {"role": "user", "content": "Hi"}


def refused(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    numbers = {"n_prompt_tokens", "n_ctx"} if error["code"] == "context_length_exceeded" else set()
    assert error.keys() == {"message", "type", "param", "code"} | numbers
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": True}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"max_tokens": 4, "n_predict": 5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 300]}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"speed": 1}}, "stream_options.speed"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"sampler": "magic"}, "sampler"),
        ({"sampler": "threshold", "entropy_bound": 0.1}, "entropy_bound"),
        ({"canvas_length": 10_000}, "canvas_length"),
        ({"max_steps": 0}, "max_steps"),
        ({"soft_skip": 1.0}, "soft_skip"),
        ({"soft_top_k": 0}, "soft_top_k"),
        ({"soft_top_k": 257}, "soft_top_k"),
        ({"threshold": 0.5}, "threshold"),
        ({"sampler": "threshold", "threshold": 2}, "threshold"),
        ({"sampler": "threshold", "count": 2}, "count"),
        ({"sampler": "fixed-count", "count": 0}, "count"),
        ({"max_thinking_tokens": -1}, "max_thinking_tokens"),
        ({"timeout": 0}, "timeout"),
        ({"best_of": 2}, "best_of"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [USER | {"weight": 1}]}, "messages[0].weight"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"functions": [{"name": "x"}]}, "functions"),
    ],
)
def test_a_400_names_the_field(server: Any, fields: dict[str, Any], param: str) -> None:
    error = refused(server.post("/v1/chat/completions", **({"messages": [USER]} | fields)))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param.split(".")[0].split("[")[0])


def test_unknown_fields_are_all_named(server: Any) -> None:
    error = refused(server.chat("Hi", tempreature=1, foo=2))
    assert "tempreature" in error["message"] and "foo" in error["message"]
    assert error["code"] == "unknown_field"


def test_unknown_fields_are_ignored_where_the_server_is_lenient(
    serve: Callable[..., Any], embedded: Model
) -> None:
    served = serve(embedded, ServerSettings(lenient=True))
    messages = [USER | {"weight": 1}]
    strange: dict[str, Any] = {"foo": 2, "bar": None, "chat_template_kwargs": {"x": 1}}
    warnings = ["foo, chat_template_kwargs.x, messages[0].weight: unknown, and ignored"]
    assert served.chat(messages=messages, n=2, **strange).json()["warnings"] == warnings
    chunks = events(served.chat(messages=messages, n=2, stream=True, **strange).text)
    assert [chunk["warnings"] for chunk in chunks if "warnings" in chunk] == [warnings]
    for path, length in (("/v1/completions", "max_tokens"), ("/completion", "n_predict")):
        body = {"prompt": "Hi", "foo": 2, length: 4, "max_steps": 2}
        plain = served.post(path, **body).json()
        last = events(served.post(path, **body, stream=True).text)[-1]
        assert plain["warnings"][0] == last["warnings"][0] == "foo: unknown, and ignored"
    many = served.post("/tokenize", content="Hi", **{f"x{i}": 0 for i in range(30)}).json()
    assert many["warnings"][0].endswith("x19 and 10 more: unknown, and ignored")
    assert refused(served.chat("Hi", foo=2, n=0))["param"] == "n"
    assert refused(served.chat("Hi", modalities=["audio"]))


def events(text: str) -> list[dict[str, Any]]:
    """The objects of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_null_means_that_a_field_is_not_there(server: Any) -> None:
    messages = [USER | {"weight": None, "tool_calls": None}]
    kwargs = {"enable_thinking": None, "x": None}
    answer = server.chat(messages=messages, foo=None, chat_template_kwargs=kwargs, max_tokens=4)
    assert answer.status_code == 200 and "warnings" not in answer.json()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b"\xff\xfe", "not JSON"),
        (b'{"messages": NaN}', "NaN"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_body_that_is_no_request(server: Any, body: bytes, message: str) -> None:
    error = refused(server.http.post("/v1/chat/completions", content=body))
    assert message in error["message"]


def test_lone_surrogates_are_refused(server: Any) -> None:
    for body in (
        rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
        rb'{"messages": [{"role": "user", "content": "Hi"}], "stop": "\ud800"}',
        rb'{"messages": [{"role": "user", "content": "Hi"}], "model": "\ud800"}',
        rb'{"messages": [{"role": "user", "content": "Hi"}], "\ud800": 1}',
        rb'{"messages": [{"role": "\ud800", "content": "Hi"}]}',
    ):
        refused(server.http.post("/v1/chat/completions", content=body))


def test_other_statuses(server: Any) -> None:
    assert refused(server.http.get("/nowhere"), 404)["type"] == "not_found_error"
    refused(server.http.get("/v1/chat/completions"), 405)
    refused(server.http.post("/v1/models/gpt-4"), 405)
    refused(server.http.get("/v1/models/gpt-4"), 404)


def test_a_route_that_is_not_there_is_a_404_by_any_method(server: Any) -> None:
    error = refused(server.http.post("/v1/images", json={"prompt": "Hi"}), 404)
    assert error["message"] == "there is no POST /v1/images; /docs lists what there is"


def test_the_openai_client_sees_its_own_exceptions(server: Any) -> None:
    client = server.client().chat.completions
    with pytest.raises(openai.BadRequestError) as caught:
        client.create(model="m", messages=[USER], extra_body={"foo": 1})  # type: ignore[list-item]
    assert (caught.value.param, caught.value.code) == ("foo", "unknown_field")


def test_what_can_never_fit_says_how_much(serve: Callable[..., Any], embedded: Model) -> None:
    served = serve(embedded, slots=1, context=128, strict=True)
    error = refused(served.chat("x" * 200))
    assert error["code"] == "context_length_exceeded"
    assert "128" in error["message"] and "--context" in error["message"]
    assert error["type"] == "exceed_context_size_error"  # which llama-server's clients look for
    assert error["n_ctx"] == 128 and 200 <= error["n_prompt_tokens"] < 300
    beyond = refused(served.chat("Hi", max_tokens=100_000))
    assert "16384" in beyond["message"].replace(",", "")


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/chat/completions", "messages", lambda text: {"messages": [USER | {"content": text}]}),
        ("/v1/completions", "prompt", lambda text: {"prompt": text}),
        ("/completion", "prompt", lambda text: {"prompt": text}),
        ("/tokenize", "content", lambda text: {"content": text}),
    ],
)
def test_text_that_no_context_holds_is_not_tokenized(
    server: Any, monkeypatch: pytest.MonkeyPatch, path: str, field: str, body: Any
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    error = refused(server.post(path, **body("many words " * 40_000)))
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert "440,000 characters" in error["message"] or path == "/v1/chat/completions"


def test_a_full_queue_is_a_503(serve: Callable[..., Any], eventually: Any) -> None:
    model = answering_model(LONG)
    slow_down(model, lambda: time.sleep(0.02))
    served = serve(model, slots=1, queue=2, context=4096)

    def ask() -> None:
        served.chat("long", max_tokens=1000, timeout=1.5)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    threads[0].start()
    eventually(lambda: len(served.engine.state().running) == 1)
    threads[1].start()
    eventually(lambda: served.engine.state().waiting == 1)
    threads[2].start()
    eventually(lambda: served.engine.state().waiting == 2)
    # Of n requests none runs where there is no room for the first.
    refused(served.chat("Hi", n=2), 503)
    answer = served.chat("Hi")
    assert refused(answer, 503)["code"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1
    for thread in threads:
        thread.join()
    assert served.engine.state().waiting == 0


def test_a_deadline_is_a_504(serve: Callable[..., Any]) -> None:
    model = answering_model(LONG)
    slow_down(model, lambda: time.sleep(0.02))
    served = serve(model, context=4096, request_timeout_s=0.3)
    answer = served.chat("long", max_tokens=1000)
    assert refused(answer, 504)["code"] == "timeout"
    assert answer.headers["x-should-retry"] == "false"  # OpenAI's client would wait as long again
    began = time.monotonic()
    refused(served.chat("long", max_tokens=1000, timeout=60.0), 504)  # the operator's is the limit
    assert time.monotonic() - began < 15


def test_an_engine_that_was_closed_is_a_503(serve: Callable[..., Any], embedded: Model) -> None:
    served = serve(embedded)
    served.engine.close()
    assert refused(served.chat("Hi"), 503)["type"] == "service_unavailable_error"
    assert served.http.get("/livez").status_code == 200, "it was asked to end: no restart"
    health = served.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "error")
    assert health.json()["error"]["message"]


def test_a_dead_engine_tells_everybody(serve: Callable[..., Any], eventually: Any) -> None:
    model = answering_model(LONG)
    slow_down(model, lambda: time.sleep(0.02))
    served = serve(model, context=4096)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(served.chat("long", max_tokens=999)))
    thread.start()
    eventually(lambda: len(served.engine.state().running) == 1)

    def die() -> None:
        raise SystemExit("the thread is gone")

    slow_down(model, die)
    thread.join(20)
    refused(answers[0], 500)
    assert answers[0].headers["x-should-retry"] == "false"
    assert served.http.get("/health").status_code == 503
    live = served.http.get("/livez")
    assert live.status_code == 503 and "SystemExit" in live.json()["reason"]
    refused(served.chat("Hi"), 503)


def test_failures_that_last_make_it_unready_for_a_while(
    serve: Callable[..., Any], eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sfumato.engine.circuit.WAITS_S", (0.2,) * 1000)
    model = answering_model()
    served = serve(model)

    def fail() -> None:
        raise RuntimeError("/dev/thing is lost")

    slow_down(model, fail)
    for _ in range(3):
        refused(served.chat("Hi"), 500)
    eventually(lambda: served.http.get("/readyz").status_code == 503)
    answer = served.chat("Hi")
    error = refused(answer, 503)
    assert error["code"] == "not_ready" and int(answer.headers["retry-after"]) >= 1
    assert "not ready" in error["message"] and "/dev" not in error["message"]
    assert "RuntimeError" in served.http.get("/health").json()["reason"]
    assert served.http.get("/livez").status_code == 200
    assert "sfumato_circuit_open 1.0" in served.http.get("/metrics").text
    slow_down(model, lambda: None)
    eventually(lambda: served.http.get("/readyz").status_code == 200)
    assert served.chat("Hi").status_code == 200
    assert "sfumato_circuit_open 0.0" in served.http.get("/metrics").text


def test_the_queue_is_for_those_without_a_slot(serve: Callable[..., Any]) -> None:
    served = serve(answering_model(), slots=4, queue=1)
    assert len(served.chat("Hi", n=5).json()["choices"]) == 5


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": [999_999]}, "prompt"),
        ("/completion", {"prompt": [-1]}, "prompt"),
        ("/v1/chat/completions", {"messages": [USER | {"content": "x" * 400_000}]}, "messages"),
        ("/v1/chat/completions", {"messages": [USER | {"content": "x " * 8000}]}, "messages"),
    ],
)
def test_the_prompt_is_named_as_the_body_has_it(
    serve: Callable[..., Any], embedded: Model, path: str, fields: Any, param: str
) -> None:
    served = serve(embedded, slots=1, context=512, strict=True)
    error = refused(served.post(path, **fields))
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_a_bias_that_bans_everything_is_named(serve: Callable[..., Any]) -> None:
    model = answering_model()
    bias = {str(token): -100 for token in range(model.config.vocab_size)}
    served = serve(model)
    assert refused(served.chat("Hi", logit_bias=bias))["param"] == "logit_bias"


def test_a_top_k_beyond_the_vocabulary_is_all_of_it(serve: Callable[..., Any]) -> None:
    model = answering_model()
    assert model.config.vocab_size < 1024
    served = serve(model)
    every = served.chat(seed=3, max_tokens=32).json()["choices"]
    assert served.chat(seed=3, max_tokens=32, top_k=1024).json()["choices"] == every
    refused(served.chat(seed=3, max_tokens=32, top_k=1025))  # whatever the vocabulary


def test_a_client_that_leaves_while_it_uploads_is_no_failure(
    server: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    statuses: list[int] = []
    with caplog.at_level("ERROR"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            errors.ApiError, "response", with_statuses(errors.ApiError.response, statuses)
        )
        with upload(server.url):
            time.sleep(0.2)
        eventually(lambda: bool(statuses))
        time.sleep(0.1)
    assert statuses == [CLIENT_GONE]
    assert caplog.records == []


def test_a_body_has_its_time(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_S", 0.2)
    with upload(server.url) as raw:
        raw.settimeout(10)
        answer = b""
        while data := raw.recv(4096):  # until the server hangs up
            answer += data
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"body_timeout"' in answer


def upload(url: str) -> socket.socket:
    """A connection whose body never comes to its end."""
    host, port = url.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000\r\n\r\n"
    raw.sendall(head.encode() + b'{"messages": [')
    return raw


def with_statuses(response: Callable[..., Any], statuses: list[int]) -> Callable[..., Any]:
    def call(error: Any, scope: Any) -> Any:
        statuses.append(error.status)
        return response(error, scope)

    return call
