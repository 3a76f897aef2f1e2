"""Every number that a client may send, driven far beyond any real need: a 400 that names the
field, or an answer, and soon; and the server goes on serving."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.answering_model import answering_model

from sfumato.options.limits import MOST_STEPS
from sfumato.server.app import ServerSettings

HUGE = (2**63, -(2**63), 10**15, -(10**15), 1e308, -1e308)
CPU_S = 5.0  # of this process, in which the server runs
LIMIT_S = 30.0  # by the clock: a test machine may be busy

USER = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"messages": [USER]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/completion": {"prompt": "Hi"},
    "/tokenize": {"content": "Hi"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": CHAT,
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": CHAT | {"max_tokens": 8},
    "/v1/messages/count_tokens": CHAT,
    "/v1/embeddings": {"input": "Hi"},
    "/embeddings": {"input": "Hi"},
    "/api/embed": {"input": "Hi"},
    "/api/embeddings": {"prompt": "Hi"},
    "/api/chat": CHAT | {"stream": False},
    "/api/generate": {"prompt": "Hi", "stream": False},
    "/api/show": {},
    "/v1/chat/completions/input_tokens": CHAT,
}
FILLS: dict[str, dict[str, Any]] = {
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 4, "max_steps": 2},
    "/v1/fill": {"parts": ["a", {"tokens": 2}], "max_steps": 2},
}
DECISIONS: dict[str, dict[str, Any]] = {
    "/v1/systemone": {"state": "Hi", "questions": {"a": {"type": "noul", "instructions": "?"}}},
    "/v1/decisions": {"input": "Hi", "questions": [{"type": "predicate", "instructions": "?"}]},
}
BESIDE: dict[str, dict[str, Any]] = {
    "count": {"sampler": "fixed-count"},
    "threshold": {"sampler": "threshold"},
    "margin": {"sampler": "threshold"},
    "top_logprobs": {"logprobs": True},
    "seed": {"n": 2},
}
"""What a field needs beside it to count."""


def numbers(schema: Any, parts: dict[str, Any]) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Of a body's schema: the name of each field that takes numbers, and what a value of it looks
    like with a number in it."""
    for name, field in schema["properties"].items():
        for shape in _shapes(field, parts):
            yield name, shape


def _shapes(schema: dict[str, Any], parts: dict[str, Any]) -> Iterator[Callable[[Any], Any]]:
    if "$ref" in schema:
        target = parts[schema["$ref"].rpartition("/")[2]]
        for name, shape in numbers(target, parts):
            yield lambda value, name=name, shape=shape: {name: shape(value)}
    for option in schema.get("anyOf", ()):
        yield from _shapes(option, parts)
    if schema.get("type") in ("integer", "number"):
        yield lambda value: value
    if isinstance(schema.get("items"), dict):
        for shape in _shapes(schema["items"], parts):
            yield lambda value, shape=shape: [shape(value)]
    if isinstance(schema.get("additionalProperties"), dict):
        for shape in _shapes(schema["additionalProperties"], parts):
            yield lambda value, shape=shape: {"5": shape(value)}


def test_no_number_does_harm(serve: Callable[..., Any]) -> None:
    served = serve(answering_model(), ServerSettings(max_tokens=16))
    paths = served.http.get("/openapi.json").json()["paths"]
    routes = {path for path, how in paths.items() if "requestBody" in how.get("post", {})}
    without_numbers = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/batches"}
    # Parsed as the bodies of the routes whose prompts they render.
    rendered = {"/v1/chat/completions/render", "/v1/completions/render"}
    assert routes == {*BODIES, *FILLS, *DECISIONS, *without_numbers, *rendered}
    driven = drive(served, BODIES)
    chat = {field for path, field in driven if path == "/v1/chat/completions"}
    assert chat >= {"max_steps", "stability", "top_k", "t_max", "seed", "n", "timeout"}
    assert ("/detokenize", "tokens") in driven and ("/v1/completions", "prompt") in driven
    assert served.http.get("/health").status_code == 200
    assert served.chat("Hi").json()["choices"][0]["message"]["content"] == "Hello."


def test_no_number_of_a_decision_does_harm(server: Any) -> None:
    fields = {"x_samples", "x_orders", "x_steps", "x_seed", "x_timeout"}
    assert drive(server, DECISIONS) == {(path, name) for path in DECISIONS for name in fields}
    assert server.http.get("/health").status_code == 200


def test_no_number_of_a_fill_does_harm(server: Any) -> None:
    assert {path for path, _ in drive(server, FILLS)} == {*FILLS}
    assert server.http.get("/health").status_code == 200


def drive(served: Any, bodies: dict[str, dict[str, Any]]) -> set[tuple[str, str]]:
    """Sends each number far too large and far too small, and of a field that other routes had
    before one of each sort; gives the routes and fields that have numbers."""
    description = served.http.get("/openapi.json").json()
    parts = description["components"]["schemas"]
    driven = set()
    for path, body in bodies.items():
        content = description["paths"][path]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"]
        name = schema.get("anyOf", [schema])[0]["$ref"].rpartition("/")[2]
        for field, shape in numbers(parts[name], parts):
            known = any(path != other and field == name for other, name in driven)
            driven.add((path, field))
            for value in (2**63, -1e308) if known else HUGE:
                _drive(served, path, field, body | _beside(path, field) | {field: shape(value)})
    return driven


def _beside(path: str, field: str) -> dict[str, Any]:
    is_openai = path in ("/v1/chat/completions", "/v1/completions")
    return BESIDE.get(field, {}) if is_openai or field not in ("seed", "top_logprobs") else {}


def _drive(served: Any, path: str, field: str, body: dict[str, Any]) -> None:
    began, used = time.monotonic(), time.process_time()
    answer = served.post(path, **body)
    what = f"{path} {json.dumps(body)[:200]} -> {answer.status_code} {answer.text[:200]}"
    assert time.process_time() - used < CPU_S, what
    assert time.monotonic() - began < LIMIT_S, what
    if answer.status_code == 422:
        (detail,) = answer.json()["detail"]
        assert field in detail["loc"] and detail["msg"], what
    elif answer.status_code != 200:
        assert answer.status_code == 400, what
        error = answer.json()["error"]  # of Ollama's routes a text, of Anthropic's without `param`
        error = {"message": error} if isinstance(error, str) else error
        names = error["message"].partition(": ")[0]
        assert field in names and (error.get("param") or field) in names, what


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_steps": 257}, "max_steps"),
        ({"stability": 65}, "stability"),
        ({"t_max": 1e300}, "t_max"),
        ({"t_max": 1e-300, "t_min": 0}, "t_max"),
        ({"top_k": 1025}, "top_k"),
        ({"confidence": 1e300}, "confidence"),
        ({"timeout": 1e300}, "timeout"),
    ],
)
def test_bounds_have_a_last_value(server: Any, fields: dict[str, Any], param: str) -> None:
    answer = server.chat("Hi", max_tokens=8, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_bounds_themselves_are_allowed(server: Any) -> None:
    limits = server.http.get("/props").json()["limits"]
    fields = {name: limits[name] for name in ("max_steps", "stability", "top_k")}
    assert fields == {"max_steps": 256, "stability": 64, "top_k": 1024}
    assert server.chat("Hi", max_tokens=8, **fields).status_code == 200


def test_the_operator_chooses_the_bound_of_steps(serve: Callable[..., Any]) -> None:
    served = serve(answering_model(), max_steps=4)
    error = served.chat("Hi", max_steps=5).json()["error"]
    assert error["param"] == "max_steps" and "--max-steps" in error["message"]
    assert served.http.get("/props").json()["sampler"]["max_steps"] == 4
    steps = served.chat("Hi", stability=9).json()["timings"]["diffusion"]["steps"]
    assert steps == 4  # of the checkpoint's 48
    assert (
        serve(answering_model(), max_steps=MOST_STEPS).chat("Hi", max_steps=MOST_STEPS).is_success
    )
