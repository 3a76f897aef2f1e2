"""Whatever the API description allows, and what it does not, is answered: no 500, no trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import sfumato
from sfumato.engine import Engine, EngineConfig
from sfumato.server.app import ServerSettings, create_app

schemathesis = pytest.importorskip("schemathesis")

ROUTES = {
    "POST": (
        "/v1/chat/completions",
        "/v1/completions",
        "/completion",
        "/tokenize",
        "/detokenize",
        "/apply-template",
    ),
    "GET": (
        "/v1/models",
        "/v1/models/{model}",
        "/health",
        "/livez",
        "/readyz",
        "/props",
        "/slots",
        "/memory",
        "/metrics",
    ),
}
EXAMPLES = {"POST": 15, "GET": 2}  # of each route and mode

PLAIN = [(method, path, "POSITIVE") for method, paths in ROUTES.items() for path in paths]
WRONG = [("POST", path, "NEGATIVE") for path in ROUTES["POST"]]


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
    found = {(op.ok().method.upper(), op.ok().path) for op in description.get_all_operations()}
    assert found == {(method, path) for method, path, _ in PLAIN}


@pytest.mark.parametrize(("method", "path", "mode"), [*PLAIN, *WRONG])
def test_no_route_fails(description: Any, method: str, path: str, mode: str) -> None:
    answers: list[int] = []

    @given(case=description[path][method].as_strategy(schemathesis.GenerationMode[mode]))
    @settings(
        max_examples=EXAMPLES[method],
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def call(case: Any) -> None:
        response = case.call()
        answers.append(response.status_code)
        if method == "GET":
            assert response.status_code in (200, 404), response.text
        else:
            assert response.status_code < 500 or response.status_code == 504, response.text
        assert "Traceback" not in response.text

    call()
    assert answers
