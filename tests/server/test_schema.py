"""What the API description allows is accepted, but for listed rules; whatever it does not allow is
answered: no 500, no trace, and no answer that the description does not have.

The same with every check of schemathesis, against a server that runs:

    sfumato serve --max-tokens 16 --request-timeout 4 &
    PYTHONPATH=. schemathesis --config-file tests/server/schemathesis.toml run \\
        http://127.0.0.1:8080/openapi.json --checks all --max-time 300
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from starlette.testclient import TestClient
from tests.server.wrong_values import ODD, Fields
from tests.support.rules import error_of, is_of_a_rule

import sfumato
from sfumato.engine import Engine, EngineConfig
from sfumato.server.app import ServerSettings, create_app
from sfumato.server.models import Models

schemathesis = pytest.importorskip("schemathesis")
jsonschema_rs = pytest.importorskip("jsonschema_rs")  # which schemathesis needs
if TYPE_CHECKING:
    from schemathesis.specs.openapi import checks
else:
    checks = pytest.importorskip("schemathesis.specs.openapi.checks")

AS_DESCRIBED = (
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
)

ROUTES = {
    "POST": (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/{response_id}/cancel",
        "/v1/files",
        "/v1/batches",
        "/v1/batches/{batch_id}/cancel",
        "/v1/embeddings",
        "/embeddings",
        "/api/embed",
        "/api/embeddings",
        "/v1/chat/completions/input_tokens",
        "/v1/chat/completions/render",
        "/v1/completions/render",
        "/completion",
        "/infill",
        "/v1/fill",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/api/chat",
        "/api/generate",
        "/api/show",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/v1/systemone",
        "/v1/decisions",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ),
    "GET": (
        "/v1/models",
        "/v1/models/{model}",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/v1/files",
        "/v1/files/{item_id}",
        "/v1/files/{file_id}/content",
        "/v1/batches",
        "/v1/batches/{item_id}",
        "/health",
        "/livez",
        "/readyz",
        "/props",
        "/slots",
        "/state",
        "/memory",
        "/metrics",
        "/tokenizer_info",
        "/lora-adapters",
        "/api/tags",
        "/api/ps",
        "/api/version",
    ),
    "DELETE": ("/v1/responses/{response_id}", "/v1/files/{file_id}"),
}
REFUSED = (400, 413, 422)
EXAMPLES = {"POSITIVE": 6, "NEGATIVE": 4}  # of each route with a body
FEWER = {  # of routes whose bodies hold what another one's hold, or little
    **dict.fromkeys(("/v1/chat/completions/input_tokens", "/apply-template"), 2),
    **dict.fromkeys(("/v1/messages/count_tokens", "/v1/decisions"), 2),
    **dict.fromkeys(("/embeddings", "/api/embed", "/api/embeddings", "/api/generate"), 2),
    **dict.fromkeys(("/tokenize", "/detokenize", "/api/show"), 2),
    **dict.fromkeys(("/completion", "/infill", "/v1/completions", "/v1/responses"), 3),
    **dict.fromkeys(("/v1/responses/{response_id}/cancel", "/reset_prefix_cache"), 2),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), 2),
    **dict.fromkeys(("/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel"), 2),
    **dict.fromkeys(("/v1/chat/completions/render", "/v1/completions/render"), 2),
}
MORE = 40  # by `make test-slow`

PLAIN = [(method, path, "POSITIVE") for method, paths in ROUTES.items() for path in paths]
WRONG = [
    ("POST", path, "NEGATIVE")
    for path in ROUTES["POST"]
    # These are off here.
    if not path.endswith(("cache", "cancel", "lora_adapter", "/files", "/batches"))
]


USER = [{"role": "user", "content": "Hi"}]
DECISIONS: dict[str, Any] = {
    "system one": {"state": "a", "questions": {"q": {"type": "noul", "instructions": "Urgent?"}}},
    "openai": {"input": "a", "questions": [{"type": "predicate", "instructions": "Urgent?"}]},
}
RIGHT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/embeddings", {"input": "Hi"}),
    ("/embeddings", {"content": "Hi"}),
    ("/api/embed", {"input": "Hi"}),
    ("/api/embeddings", {}),
    ("/v1/chat/completions/input_tokens", {"messages": USER}),
    ("/v1/chat/completions/render", {"messages": USER}),
    ("/v1/completions/render", {"prompt": "Hi"}),
    ("/completion", {"prompt": "Hi"}),
    ("/completion", {"prompt": "Hi", "n_predict": 0}),
    ("/infill", {"input_prefix": "Hi", "n_predict": 0}),
    ("/v1/fill", {"parts": ["a", {"tokens": 1}], "messages": USER}),
    ("/v1/messages", {"messages": USER, "max_tokens": 0}),
    ("/v1/messages/count_tokens", {"messages": USER}),
    ("/api/chat", {"messages": USER}),
    ("/api/chat", {}),
    ("/api/generate", {"prompt": "Hi"}),
    ("/api/generate", {}),
    ("/api/show", {"model": "x"}),
    ("/tokenize", {"content": "Hi"}),
    ("/detokenize", {"tokens": [1]}),
    ("/apply-template", {"messages": USER}),
    ("/v1/systemone", {"model": "jev-latest", **DECISIONS["system one"]}),
    ("/v1/decisions", DECISIONS["openai"]),
)
"""Bodies that are right but for one field, which is then wrong; those that ask for nothing too."""


@pytest.fixture(scope="module")
def description() -> Iterator[Any]:
    """The app's own, of a small engine whose replies are short."""
    config = EngineConfig(slots=4, context=256, strict=True, request_timeout_s=2.0)
    engine = Engine(sfumato.load(), config).start()
    app = create_app(
        Models("sfumato", engine), ServerSettings(max_tokens=16, max_choices=2, page=False)
    )
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    assert engine.health().ok
    engine.close()


def test_all_routes_are_here(description: Any) -> None:
    described = {(op.ok().method.upper(), op.ok().path) for op in description.get_all_operations()}
    assert described == {(method, path) for method, path, _ in PLAIN}


def test_a_rule_is_about_its_own_messages_alone() -> None:
    others = (
        "prompt: input should be a valid string",
        "tokens: input should be a valid list",
        "logit_bias: 101 is not from -100 to 100",
        "n: input should be a valid integer",
        "t_min: must be a number from 0 to 1000000, got -1.0",
    )
    for message in others:
        assert not is_of_a_rule({"message": message}), message


def test_whole_numbers_with_a_decimal_point_are_refused_in_words(description: Any) -> None:
    for path, field, value in (
        ("/v1/chat/completions", "n", 2.0),
        ("/v1/completions", "prompt", [[1], [2.0]]),
        ("/detokenize", "tokens", [2.0]),
    ):
        body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
        body = {k: v for k, v in body.items() if (k == "messages") == ("chat" in path)}
        if path == "/detokenize":
            body = {}
        response = description[path]["POST"].Case(body=body | {field: value}).call()
        error = response.json()["error"]
        assert response.status_code == 400 and error["message"].startswith(field)
        assert "without a decimal point, and not as 2.0" in error["message"]


@pytest.mark.parametrize(("method", "path", "mode"), [*PLAIN, *WRONG])
def test_no_route_fails(description: Any, method: str, path: str, mode: str) -> None:
    examples = FEWER.get(path, EXAMPLES[mode]) if method == "POST" else 2
    answer_all(description, method, path, mode, examples)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "mode"), [*PLAIN, *WRONG])
def test_no_route_fails_for_long(description: Any, method: str, path: str, mode: str) -> None:
    answer_all(description, method, path, mode, MORE)


CALLS: list[dict[str, Any]] = [
    {"id": True, "function": {"name": "f"}},
    {"type": "AAA", "function": {"name": "f"}},
    {"function": {"name": "f", "arguments": []}},
]
FUNCTIONS: list[dict[str, Any]] = [{"strict": "yes"}, {"description": []}, {"parameters": []}]
DEEP = (
    *(
        (path, {"tools": [{"type": "function", "function": {"name": "f"} | odd}]})
        for path in ("/v1/chat/completions", "/api/chat", "/apply-template")
        for odd in FUNCTIONS
    ),
    *(("/v1/responses", {"tools": [{"type": "function", "name": "f"} | odd]}) for odd in FUNCTIONS),
    *(
        (path, {"tools": [{"name": "f", "input_schema": {}} | odd]})
        for path in ("/v1/messages", "/v1/messages/count_tokens")
        for odd in FUNCTIONS[:2]
    ),
    *(
        ("/v1/chat/completions", {"messages": [*USER, {"role": "assistant"} | odd, *USER]})
        for odd in (
            *({"tool_calls": [call]} for call in CALLS),
            {"tool_calls": {}},
            {"refusal": []},
        )
    ),
    ("/v1/responses", {"input": [{"type": None, "role": "user", "content": "a"}]}),
    ("/v1/decisions", {"input": [{"type": None, "role": "user", "content": "a"}]}),
    ("/v1/decisions", {"input": [{"role": "user", "content": []}]}),
    ("/api/chat", {"messages": [{"role": "user", "content": []}]}),
    ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": {}}]}),
    *(("/api/chat", {"messages": [], "options": odd}) for odd in ({"t_min": -7}, {"mode": "AAA"})),
)
"""Parts of bodies that are wrong within a field."""


@pytest.fixture(scope="module")
def client(description: Any) -> TestClient:
    return TestClient(description.app)


@pytest.mark.parametrize(("path", "wrong"), DEEP)
def test_what_is_wrong_within_a_field_is_refused(
    client: TestClient, path: str, wrong: dict[str, Any]
) -> None:
    right = next(body for other, body in RIGHT if other == path)
    answer = client.post(path, json=right | wrong)
    assert answer.status_code == 400, answer.text
    assert next(iter(wrong)) in answer.text or "options" in wrong


def test_a_wrong_value_is_refused_whatever_the_field(client: TestClient) -> None:
    assert list(accepted(client, ODD[:3], 0, one_each=True)) == []


@pytest.mark.slow
def test_a_wrong_value_is_refused_however_deep(client: TestClient) -> None:
    assert list(accepted(client, ODD, 6)) == []


def accepted(
    client: TestClient, odd: Sequence[Any], deepest: int, one_each: bool = False
) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Bodies that the description does not allow, and that are not refused by the field's name.
    one_each: a field gets one wrong value, and the next field another one."""
    turn = 0
    described = client.get("/openapi.json").json()
    parts = {"components": described["components"]}
    fields = Fields(described["components"]["schemas"], odd, deepest)
    assert {path for path, _ in RIGHT} == {path for _, path, _ in WRONG}
    for path, right in RIGHT:
        operation = described["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        allows = jsonschema_rs.Draft202012Validator(schema | parts).is_valid
        assert allows(right), path
        model = fields.resolved(schema.get("anyOf", [schema])[0])
        for name, field in model["properties"].items():
            bodies = (right | {name: value} for value in fields.values(field))
            wrongs = [body for body in bodies if not allows(body)]
            if one_each and wrongs:
                turn += 1
                wrongs = [wrongs[turn % len(wrongs)]]
            for wrong in wrongs:
                answer = client.post(path, json=wrong)
                if answer.status_code not in (400, 422) or name not in answer.text:
                    yield path, wrong, answer.status_code


def answer_all(description: Any, method: str, path: str, mode: str, examples: int) -> None:
    """Asks so many times what the description allows, or does not."""
    answers: list[int] = []

    @given(case=description[path][method].as_strategy(schemathesis.GenerationMode[mode]))
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def call(case: Any) -> None:
        response = case.call()
        answers.append(response.status_code)
        assert "Traceback" not in response.text
        case.validate_response(response, checks=AS_DESCRIBED)
        if response.status_code in REFUSED and mode == "POSITIVE":
            error = error_of(response.json())
            assert is_of_a_rule(error), error
        else:  # 404: a model's name; 504: the request's own timeout
            assert response.status_code in (200, *REFUSED, 404, 504), response.text

    call()
    assert answers
