"""`python -m sfumato.deploy.check`: against a server of ours, one in vLLM's words, and broken ones.

The answers of vLLM were written by hand after its source; it does not run here."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from tests.server.conftest import serving
from tests.support.answering_model import answering_model, slow_down

from sfumato.deploy import check
from sfumato.deploy.check import CHAT, COMPLETIONS, Server, held

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="27"} 1.0
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 9.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 3.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 9.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 9.0
"""
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
STREAM = 'data: {"choices": [{"delta": {"content": "1"}}]}\n\ndata: [DONE]\n\n'
RENDERED = {"request_id": "chatcmpl-1", "token_ids": [2, 106], "features": None}
ANSWERS: dict[str, Any] = {
    "/health": "",
    "/readyz": "",
    "/livez": "",
    "/metrics": METRICS,
    "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model"}]},
    CHAT: {"choices": [{"message": {"role": "assistant", "content": "1"}}], "usage": USAGE},
    "stream": STREAM,
    COMPLETIONS: {"choices": [{"text": "1"}], "usage": USAGE},
    f"{CHAT}/render": RENDERED | {"sampling_params": {}},
    f"{COMPLETIONS}/render": [RENDERED],
}


def outcomes(answers: dict[str, Any], key: str | None = None) -> tuple[dict[str, str], bool]:
    """What the check says of a server with these answers: what is not ok, by name, and whether the
    server has all that is needed."""

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if (
            path.startswith("/v1")
            and key
            and request.headers.get("authorization") != f"Bearer {key}"
        ):
            return httpx.Response(401)
        assert path.startswith("/v1") or "authorization" not in request.headers
        body = json.loads(request.content) if request.content else {}
        detail = answers.get("stream" if body.get("stream") else path, 404)
        headers = (
            {} if answers.get("mute") else {"X-Request-Id": request.headers.get("x-request-id", "")}
        )
        if isinstance(detail, int):
            return httpx.Response(detail, headers=headers, json={"error": {}})
        content = detail if isinstance(detail, str) else json.dumps(detail)
        return httpx.Response(200, headers=headers, text=content)

    with httpx.Client(base_url="http://s", transport=httpx.MockTransport(answer)) as client:
        table, has_all = held(Server(client, key))
    states, names, _, detail = ([str(cell) for cell in column._cells] for column in table.columns)
    faults = {n: f for s, n, f in zip(states, names, detail, strict=True) if s != "ok"}
    assert has_all == ("fails" not in states)
    return faults, has_all


def test_a_server_in_the_words_of_vllm_has_all() -> None:
    assert outcomes(ANSWERS) == ({}, True)
    assert outcomes(ANSWERS, key="secret") == ({}, True)


def changed(old: str, new: str) -> dict[str, Any]:
    assert old in METRICS
    return {"/metrics": METRICS.replace(old, new)}


@pytest.mark.parametrize(
    ("changes", "name", "detail", "needed"),
    [
        ({"/health": 503}, "GET /health", "status 503", True),
        ({"/livez": 404}, "GET /livez", "status 404", False),
        ({CHAT: {"choices": []}}, f"POST {CHAT}", "IndexError", True),
        ({"stream": STREAM.split("data: [DONE]")[0]}, "… as a stream", "broke off", True),
        ({"stream": 'data: {"error": {}}\n\ndata: [DONE]\n'}, "… as a stream", "error", True),
        ({"stream": "data: [1\n\n"}, "… as a stream", "JSONDecodeError", True),
        ({COMPLETIONS: "x"}, f"POST {COMPLETIONS}", "JSONDecodeError", True),
        ({"mute": True}, "x-request-id", "another, or none", False),
        (changed("vllm:num_requests_waiting{", "x{"), "vllm:num_requests_waiting", "absent", True),
        (changed("} 0.25", "} 25.0"), "vllm:kv_cache_usage_perc", "25 cannot be", True),
        (changed("} 0.25", "} NaN"), "vllm:kv_cache_usage_perc", "nan cannot be", True),
        (
            changed("running gauge", "running untyped"),
            "vllm:num_requests_running",
            "has the type unknown and not gauge",
            True,
        ),
        (changed('"27"', '"None"'), "vllm:cache_config_info", "num_gpu_blocks is 'None'", False),
        (changed("running{engine", "running{{"), "vllm:num_requests_running", "ValueError", True),
        ({"/metrics": 401}, "vllm:num_requests_running", "401 without a key", True),
        (
            changed("} 1.0\n# TYPE vllm:num_requests_w", "} 0.0\n# TYPE vllm:num_requests_w"),
            "… under load",
            "no running",
            False,
        ),
        ({f"{COMPLETIONS}/render": RENDERED}, f"POST {COMPLETIONS}/render", "KeyError", False),
        ({f"{CHAT}/render": RENDERED | {"token_ids": [-1]}}, f"POST {CHAT}/render", "ids", False),
        ({"/metrics": "#" * (check.MOST_BYTES + 1)}, "vllm:prompt_tokens_total", "is over", False),
        (
            {"/v1/models": {"data": [{"id": "a\x1b[2J[red]" + "b" * 500}]}, CHAT: 404},
            f"POST {CHAT}",
            "404",
            True,
        ),
    ],
)
def test_what_is_wrong_is_named(changes: Any, name: str, detail: str, needed: bool) -> None:
    faults, has_all = outcomes(ANSWERS | changes)
    assert detail in faults[name] and faults[name].isprintable() and len(faults[name]) <= 200
    assert has_all or needed or "/metrics" in changes


def test_our_own_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a program, and how it ends; the signal is a call here."""
    model = answering_model({"Count from one to one hundred.": "word " * 200 + "<turn|>"})
    slow_down(model, lambda: time.sleep(0.005))
    with serving(model, context=2048, drain_s=60) as served:
        end = served.listener.handle_exit
        monkeypatch.setattr(check.os, "kill", lambda process, number: end(number, None))
        assert check.main([served.url, "--stop", "12345"]) == 0, capsys.readouterr().out
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "fails" not in out and "lacks" not in out
    assert "SIGTERM" in out and "a new request: 503, Retry-After 2;" in out


def test_what_cannot_be_reached_or_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["http://127.0.0.1:9"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        check.main(["127.0.0.1:8080"])
    assert stop.value.code == 2 and "write http://" in capsys.readouterr().err
