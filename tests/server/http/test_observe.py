"""What operators see of HTTP: counts by route and status, times, refusals in the logs, and the
dashboard that shows them."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.test_metrics import finished

from sfumato.api import Model
from sfumato.cli import serve
from sfumato.engine import Engine, EngineConfig, Failed, Request
from sfumato.engine.audit import entry
from sfumato.server import gateways
from sfumato.server.app import ServerSettings, create_app
from sfumato.server.http import logs
from sfumato.server.http.logs import RateLimit
from sfumato.server.http.middleware import Refusals
from sfumato.server.metrics import Metrics
from sfumato.server.models import Models

DOCS = Path(__file__).resolve().parents[3] / "docs"
CHAT = "/v1/chat/completions"


class ServedEngine:
    """An app without a socket, its metrics and the lines for its audit log."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        from fastapi.testclient import TestClient

        self.lines: list[dict[str, Any]] = []
        app = create_app(Models("sfumato", engine), settings, Metrics(engine), self.lines.append)
        self.client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)

    def count(self, name: str, **labels: str) -> float:
        text = self.client.get("/metrics", headers={"Authorization": "Bearer key"}).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        return 0.0


@pytest.fixture
def observed(embedded: Model) -> Iterator[ServedEngine]:
    engine = Engine(embedded, EngineConfig(slots=1, context=256)).start()
    settings = ServerSettings(api_keys=("key",), max_body=2000, hosts=("localhost",))
    yield ServedEngine(engine, settings)
    engine.close()


def test_refusals_are_counted_by_status_and_route(
    observed: ServedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    ask, key = observed.client, {"Authorization": "Bearer key"}
    assert ask.post(CHAT, content=b"{}").status_code == 401
    assert ask.get("/v1/models/x", headers=key | {"Host": "evil.example"}).status_code == 403
    assert ask.post(CHAT, content=b"x" * 3000, headers=key).status_code == 413
    assert ask.post("/tokenize", content=b"[", headers=key).status_code == 400
    assert ask.get("/nowhere/" + "x" * 50, headers=key).status_code == 404
    assert ask.get(CHAT, headers=key).status_code == 405
    assert ask.get("/", headers=key).status_code == 200
    assert ask.get("/v1/models/sfumato", headers=key).status_code == 200
    counts = {
        (CHAT, "401"),
        ("/v1/models/{model:path}", "403"),
        (CHAT, "413"),
        ("/tokenize", "400"),
        ("other", "404"),
        (CHAT, "405"),
        ("page", "200"),
        ("/v1/models/{model:path}", "200"),
    }
    for route, status in counts:
        assert observed.count("sfumato_http_requests_total", route=route, status=status) == 1
        classes = {"route": route, "status_class": f"{status[0]}xx"}
        assert observed.count("sfumato_http_request_seconds_count", **classes) >= 1
    lines = [(line["endpoint"], line["status"], line["error"]) for line in observed.lines]
    assert lines == [
        (CHAT, 401, "invalid_api_key"),
        ("/v1/models/{model:path}", 403, "host_refused"),
        (CHAT, 413, "body_too_large"),
        ("/tokenize", 400, None),
        ("other", 404, None),
        (CHAT, 405, None),
    ]
    assert {line["event"] for line in observed.lines} == {"refused"}
    logged = [r.getMessage() for r in caplog.records if r.name == "sfumato.server.http.middleware"]
    assert len(logged) == 6
    assert logged[0].startswith(f"refused: POST {CHAT}, status 401, invalid_api_key, client ")


@pytest.mark.parametrize("path", ["/chat/completions", f"{CHAT}/", "/chat/completions/"])
def test_other_spellings_of_a_path_are_the_same_route(observed: ServedEngine, path: str) -> None:
    assert observed.client.post(path, content=b"{}").status_code == 401
    assert observed.count("sfumato_http_requests_total", route=CHAT, status="401") == 1
    assert observed.lines[0]["endpoint"] == CHAT


def test_what_the_engine_has_told_of_is_not_audited_twice(observed: ServedEngine) -> None:
    key = {"Authorization": "Bearer key"}
    body = {"prompt": "x" * 1500, "max_tokens": 16_000}
    assert observed.client.post("/v1/completions", json=body, headers=key).status_code == 400
    assert observed.lines == []
    route = {"route": "/v1/completions", "status": "400"}
    assert observed.count("sfumato_http_requests_total", **route) == 1


def test_headers_of_routers_reach_the_logs_and_no_answer(
    observed: ServedEngine,
    caplog: pytest.LogCaptureFixture,
    eventually: Callable[[Callable[[], bool]], None],
) -> None:
    """The exchange of a router, written by hand after llm-d-router's source: it sets or passes
    these headers, and reads the request id."""
    ended: list[Any] = []
    engine = observed.client.app.state.service.engine  # type: ignore[attr-defined]
    engine._outputs._on_finish = lambda request, event: ended.append(request)
    key = {"Authorization": "Bearer key"}
    body = {"prompt": "Hi", "max_tokens": 1, "seed": 1, "max_steps": 2}
    plain = observed.client.post("/v1/completions", json=body, headers=key)
    named = {name: f"{at}-of/router=" for at, name in enumerate(gateways.HEADERS)}
    answer = observed.client.post("/v1/completions", json=body, headers=key | named)
    assert answer.json()["choices"] == plain.json()["choices"]
    assert answer.headers.get_list("x-request-id") == [named["x-request-id"]]
    own = answer.json()["id"].replace("cmpl-", "req-")
    eventually(lambda: len(ended) == 2)  # what counts ends may come to know after the client
    line = entry(ended[1], finished(), {})
    assert (line["request_id"], line["headers"]) == (own, named)
    assert plain.headers["x-request-id"] == ended[0].id
    assert "headers" not in entry(ended[0], finished(), {})
    # What is refused has them too: before the engine, and by it.
    assert (
        observed.client.get("/nowhere", headers=key | named).headers["x-request-id"].startswith("0")
    )
    assert observed.lines[-1]["headers"] == named
    assert "x-session-token 2-of/router=" in caplog.records[-1].getMessage()
    long = {"prompt": "x" * 1500, "max_tokens": 16_000}
    assert observed.client.post("/v1/completions", json=long, headers=key | named).is_client_error
    eventually(lambda: ended[-1].call == named)
    # A value that could forge a line, or is too long, counts as absent.
    for bad in ("a b", "x" * 129, "ä".encode("latin-1"), "a\tb"):
        wrong = observed.client.post(
            "/v1/completions", json=body, headers=key | {"x-request-id": bad}
        )
        own = wrong.headers["x-request-id"]
        eventually(lambda own=own: ended[-1].id == own)  # type: ignore[misc]
        assert wrong.status_code == 200 and not ended[-1].call


def test_a_flood_of_refusals_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    lines: list[dict[str, Any]] = []
    refusals = Refusals(lines.append, RateLimit(burst=10, every_s=10.0, clock=lambda: now[0]))
    scope = {"method": "POST", "client": ("192.0.2.1", 5)}
    for _ in range(900):
        now[0] += 0.01
        refusals.add(scope, CHAT, 401)
    refusals.add(scope, CHAT, 413)  # another status has a count of its own
    assert [line["status"] for line in lines] == [401] * 10 + [413]
    now[0] += 10
    refusals.add(scope, CHAT, 401)
    assert [line["held_back"] for line in lines] == [0] * 11 + [890]
    assert len(caplog.records) == len(lines)
    assert "more with this status" in caplog.records[-1].getMessage()


def test_a_flood_of_what_the_engine_refuses_fills_no_audit_log(observed: ServedEngine) -> None:
    lines: list[Any] = []
    log: Any = SimpleNamespace(record=lambda request, event, facts, held: lines.append(event.kind))
    record = serve._recorder(log, observed.client.app.state.service.engine, "name")  # type: ignore
    for _ in range(500):
        record(Request(""), Failed("queue_full", ""))
    record(Request(""), Failed("too_large", ""))
    failed = Failed("timeout", "", finished().account)  # it had a slot, and that is its line
    for _ in range(50):
        record(Request(""), failed)
    assert lines == ["queue_full"] * 10 + ["too_large"] + ["timeout"] * 50


@pytest.fixture
def configured() -> Iterator[Callable[[str], io.StringIO]]:
    """The root logger as `serve` configures it, and as it was again afterwards."""
    root = logging.getLogger()
    before = root.handlers[:], root.level

    def configure(form: str) -> io.StringIO:
        stream = io.StringIO()
        root.handlers[:] = []  # pytest's own, which must not be closed
        logs.configure(form, stream=stream)
        return stream

    yield configure
    root.handlers[:], root.level = before
    for name in logs.REPEATED:
        logging.getLogger(name).filters.clear()


def _fail(log: logging.Logger, text: str) -> None:
    try:
        raise RuntimeError(text)
    except RuntimeError:
        log.error("failed", exc_info=True)


def test_lines_of_the_log_have_time_and_level(configured: Callable[[str], io.StringIO]) -> None:
    log = logging.getLogger("sfumato.test")
    text = configured("text")
    log.warning("line\nbreak %s", "100%")
    log.info("left out")
    assert re.fullmatch(
        r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING sfumato\.test: line\\x0abreak 100%\n",
        text.getvalue(),
    )
    text = configured("text")
    _fail(log, "a\x1b[2J\r\n2026-01-01T00:00:00.000Z ERROR forged: b")
    first, *trace = text.getvalue().splitlines()
    assert first.endswith("sfumato.test: failed")
    assert all(line.startswith("  ") and line.isprintable() for line in trace)
    assert trace[-2].endswith("a\\x1b[2J\\x0d") and trace[-1].endswith("forged: b")
    text = configured("json")
    _fail(log, "a\nb")
    line = json.loads(text.getvalue())
    assert text.getvalue().count("\n") == 1
    assert (line["level"], line["logger"], line["message"]) == ("error", "sfumato.test", "failed")
    assert line["time"].endswith("Z") and "RuntimeError" in line["exception"]


def test_what_clients_make_it_say_over_and_over_is_held_back(
    configured: Callable[[str], io.StringIO],
) -> None:
    text = configured("text")
    for _ in range(1000):
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    assert text.getvalue().count("\n") == 10
    for number in range(100):
        logging.getLogger("sfumato.engine").warning("request %d", number)
    assert text.getvalue().count("\n") == 110


EXPRESSION = re.compile(r"\b(?:sfumato_|process_|vllm:)\w+")


@pytest.mark.parametrize("board", ["dashboard", "replicas"])
def test_the_boards_and_the_scrape_configuration_name_what_there_is(
    observed: ServedEngine, board: str
) -> None:
    observed.client.get("/health")
    watched = Metrics(Engine(observed.client.app.state.service.engine.model, EngineConfig(1, 256)))  # type: ignore
    watched.observe(Request("", endpoint=CHAT), finished())
    watched.observe(Request("", endpoint=CHAT), Failed("queue_full", ""))
    watched.answered(CHAT, 200, 0.1)
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(watched.text().decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    dashboard = json.loads((DOCS / f"grafana-{board}.json").read_text())
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    assert len(expressions) > 10
    for expression in expressions:
        names = EXPRESSION.findall(expression)
        assert names, expression
        assert set(names) <= labels.keys(), expression
        known_labels = set().union(*(labels[name] for name in names)) | {"job", "instance"}
        for group in re.findall(r"\bby \(([^)]*)\)", expression):
            assert {part.strip() for part in group.split(",")} <= known_labels, expression
        for group in re.findall(r"\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)\s*[=!]~?", group)) <= known_labels, expression
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    scrape = (DOCS / "prometheus.yml").read_text()
    assert "metrics_path: /metrics" in scrape and "127.0.0.1:8080" in scrape
