"""What the API description allows is accepted, but for listed rules; whatever it does not allow is
answered: no 500, no trace, and no answer that the description does not have.

The same with every check of schemathesis, against a server that runs:

    sfumato serve --max-tokens 16 --request-timeout 4 &
    PYTHONPATH=. schemathesis --config-file tests/server/schemas/schemathesis.toml run \\
        http://127.0.0.1:8080/openapi.json --checks all --max-time 300
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import sfumato
from sfumato.engine import Engine, EngineConfig
from sfumato.server.app import ServerSettings, create_app
from sfumato.server.schemas.rules import RULES, error_of

schemathesis = pytest.importorskip("schemathesis")
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
        "/v1/embeddings",
        "/embeddings",
        "/api/embed",
        "/api/embeddings",
        "/v1/chat/completions/input_tokens",
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
    ),
    "GET": (
        "/v1/models",
        "/v1/models/{model}",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/health",
        "/livez",
        "/readyz",
        "/props",
        "/slots",
        "/state",
        "/memory",
        "/metrics",
        "/tokenizer_info",
        "/api/tags",
        "/api/ps",
        "/api/version",
    ),
    "DELETE": ("/v1/responses/{response_id}",),
}
REFUSED = (400, 413, 422)
EXAMPLES = {"POSITIVE": 12, "NEGATIVE": 6}  # of each route with a body
FEWER = {  # of routes whose bodies hold what another one's hold, or little
    **dict.fromkeys(("/v1/chat/completions/input_tokens", "/apply-template"), 4),
    **dict.fromkeys(("/v1/messages/count_tokens", "/v1/decisions"), 4),
    **dict.fromkeys(("/embeddings", "/api/embed", "/api/embeddings", "/api/generate"), 4),
    **dict.fromkeys(("/tokenize", "/detokenize", "/api/show"), 4),
    **dict.fromkeys(("/v1/responses/{response_id}/cancel", "/reset_prefix_cache"), 2),
}
MORE = 40  # by `make test-slow`

PLAIN = [(method, path, "POSITIVE") for method, paths in ROUTES.items() for path in paths]
WRONG = [
    ("POST", path, "NEGATIVE") for path in ROUTES["POST"] if not path.endswith(("cache", "cancel"))
]


@pytest.fixture(scope="module")
def description() -> Iterator[Any]:
    """The app's own, of a small engine whose replies are short."""
    config = EngineConfig(slots=4, context=256, strict=True, request_timeout_s=2.0)
    engine = Engine(sfumato.load(), config).start()
    app = create_app(engine, ServerSettings(max_tokens=16, max_choices=2, page=False))
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
        "t_min: must be from 0 to 1e+06, got -1.0",
    )
    for message in others:
        assert not any(rule.broken({"message": message}) for rule in RULES), message


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
            assert any(rule.broken(error) for rule in RULES), error
        else:  # 404: a model's name; 504: the request's own timeout
            assert response.status_code in (200, *REFUSED, 404, 504), response.text

    call()
    assert answers
