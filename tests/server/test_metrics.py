"""Metrics as a scraper reads them: of scripted events, of a scripted state, and of an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

import sfumato
from sfumato.api import Reply
from sfumato.diffusion.limits import Stats
from sfumato.engine.audit import AuditLog, AuditWriter
from sfumato.engine.engine import Engine, EngineConfig
from sfumato.engine.events import Account, Failed, Finished
from sfumato.engine.memory.device_memory import Budget
from sfumato.engine.memory.estimate import Prediction
from sfumato.engine.memory.guard import MemoryView
from sfumato.engine.queue.slots import SlotState
from sfumato.engine.request import Request
from sfumato.engine.stats import EngineState, Health, History, RowState, Speeds, Totals
from sfumato.server import gateways
from sfumato.server.metrics import Metrics

CHAT = "/v1/chat/completions"

Read = Callable[..., float | None]


def account(**changes: Any) -> Account:
    fields: dict[str, Any] = {
        "request_id": "req-1",
        "endpoint": CHAT,
        "seed": 7,
        "prompt_tokens": 30,
        "cached_tokens": 20,
        "requested_tokens": 100,
        "output_tokens": 96,
        "thought_tokens": 6,
        "canvas_tokens": 128,
        "steps": (10, 6),
        "convergence": ("converged", "step_cap"),
        "retries": 1,
        "queue_s": 0.5,
        "slot_wait_s": 0.25,
        "prefill_s": 0.125,
        "denoise_s": 2.0,
        "commit_s": 0.0625,
        "first_draft_s": 1.0,
        "first_commit_s": 2.0,
        "total_s": 3.0,
        "slot": 2,
        "context": 8192,
        "allocated": True,
    }
    return Account(**(fields | changes))


def finished(reason: Any = "eos", **changes: Any) -> Finished:
    return Finished(Reply("", None, (), [], reason, Stats(30)), account(**changes))


MEMORY = MemoryView(Prediction(100, 50, 20, 8, 9, 3, 4), Budget(4000, "a test"), 700)

# Prompts' tokens, cached, encoded, output, thought, of canvases; the rest.
TOTALS = Totals(Counter(), 22, 12, 13, 35, 15, 16, 17, 18, 19, 20, 21.5, 22.5)

HISTORY = History(5.0, (1.0, 2.0), (1, 2))


def scripted() -> Engine:
    """What metrics ask of an engine, with every number another."""
    running = tuple(
        RowState(**vars(account(endpoint=CHAT)), phase=phase, encoded_tokens=3)
        for phase in ("denoise", "denoise", "prefill")
    )
    slots = tuple(SlotState(i, 512, i < 3, 10 * i, False, None) for i in range(5))
    speeds = Speeds(31.0, 32.0, 33.0, 340.0, 3.5)
    full = EngineState(23, running, slots, TOTALS, speeds, HISTORY, 24, 25, MEMORY, True)
    state = SimpleNamespace(**vars(full))
    engine = SimpleNamespace(
        served=SimpleNamespace(name="small.gguf", device="cpu"),
        adapters={},
        used_memory=lambda: 7_000,
        state=lambda: state,
        health=lambda: Health(False, "its thread has ended", 26.5, 23, 3),
    )
    return cast("Engine", engine)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(scripted())


def reader(metrics: Metrics) -> Read:
    """Reads one sample of a scrape: name, labels."""
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }
    return lambda name, **labels: samples.get((name, frozenset(labels.items())))


def test_requests_are_counted_by_endpoint_and_outcome(metrics: Metrics) -> None:
    request = Request("", endpoint=CHAT)
    metrics.observe(request, finished())
    metrics.observe(request, finished())
    metrics.observe(request, finished("cancelled"))
    metrics.observe(Request("", endpoint="/completion"), Failed("timeout", "", account()))
    metrics.observe(request, Failed("queue_full", ""))
    read = reader(metrics)
    assert read("sfumato_requests_total", endpoint=CHAT, outcome="eos") == 2
    assert read("sfumato_requests_total", endpoint=CHAT, outcome="cancelled") == 1
    assert read("sfumato_requests_total", endpoint=CHAT, outcome="queue_full") == 1
    assert read("sfumato_requests_total", endpoint="/completion", outcome="timeout") == 1
    outcomes = {"eos": 2, "cancelled": 1, "timeout": 1, "queue_full": None}  # it took no time
    for outcome, count in outcomes.items():
        assert read("sfumato_request_seconds_count", outcome=outcome) == count


def test_histograms_of_times_and_steps(metrics: Metrics) -> None:
    metrics.observe(Request(""), finished())
    metrics.observe(Request(""), finished(first_draft_s=None, first_commit_s=None))
    read = reader(metrics)
    assert read("sfumato_queue_seconds_sum", outcome="eos") == 1.0
    assert read("sfumato_prefill_seconds_bucket", le="0.1", outcome="eos") == 0
    assert read("sfumato_prefill_seconds_bucket", le="0.25", outcome="eos") == 2
    assert read("sfumato_first_draft_seconds_count", outcome="eos") == 1
    assert read("sfumato_first_commit_seconds_sum", outcome="eos") == 2.0
    assert read("sfumato_canvas_steps_sum") == 32
    assert read("sfumato_canvas_steps_bucket", le="6.0") == 2
    assert read("sfumato_canvases_total", convergence="converged") == 2
    assert read("sfumato_canvases_total", convergence="step_cap") == 2


def test_the_engine_is_read_at_the_scrape(metrics: Metrics) -> None:
    read = reader(metrics)
    assert read("sfumato_prompt_tokens_total", cached="true") == TOTALS.cached_tokens
    assert read("sfumato_prompt_tokens_total", cached="false") == 10
    assert read("sfumato_output_tokens_total", part="thought") == TOTALS.thought_tokens
    assert read("sfumato_output_tokens_total", part="answer") == 20
    assert read("sfumato_encoded_tokens_total") == TOTALS.encoded_tokens
    assert read("sfumato_canvas_tokens_total") == TOTALS.canvas_tokens
    assert read("sfumato_retries_total") == 18
    assert read("sfumato_forwards_total") == 19
    assert read("sfumato_steps_total") == 20
    assert read("sfumato_encode_seconds_total") == 21.5
    assert read("sfumato_denoise_seconds_total") == 22.5
    assert read("sfumato_queue_depth") == 23
    assert read("sfumato_snapshot_bytes") == 24
    assert read("sfumato_larger_slot_bytes") == 25
    phases = ("prefill", "denoise", "commit")
    assert [read("sfumato_rows", phase=phase) for phase in phases] == [1, 2, 0]
    assert [read("sfumato_slots", state=state) for state in ("busy", "idle")] == [3, 2]
    assert read("sfumato_slot_tokens") == 100
    assert read("sfumato_healthy") == 0
    assert read("sfumato_uptime_seconds") == 26.5
    used = read("sfumato_memory_used_bytes")
    assert used == 7_000
    assert read("sfumato_memory_predicted_bytes") == MEMORY.prediction.total == 136
    assert read("sfumato_memory_budget_bytes") == 4000
    assert read("sfumato_memory_spare_bytes") == 700
    about = {"version": sfumato.__version__, "model": "small.gguf", "device": "cpu"}
    assert read("sfumato_build_info", **about) == 1


def test_what_gateways_read_of_a_replica() -> None:
    """The types too: a router reads gauges and counters, and numbers in labels."""
    engine = scripted()
    read = reader(Metrics(engine))
    of = {"model_name": "small.gguf"}
    assert read("vllm:num_requests_waiting", **of) == 23
    assert read("vllm:num_requests_running", **of) == 3
    # Three of five slots of 512 positions are leased, however few they hold.
    assert read("vllm:kv_cache_usage_perc", **of) == 0.6
    assert read("vllm:gpu_cache_usage_perc", **of) == 0.6
    assert read("vllm:cache_config_info", block_size="64", num_gpu_blocks="40") == 1
    assert read("vllm:prefix_cache_queries_total", **of) == TOTALS.prompt_tokens
    assert read("vllm:gpu_prefix_cache_hits_total", **of) == TOTALS.cached_tokens
    assert read("vllm:generation_tokens_total", **of) == TOTALS.output_tokens
    text = Metrics(engine).text().decode()
    assert "vllm:lora_requests_info" not in text
    cast("Any", engine).adapters = {"b": None, "a": None}
    large = SlotState(5, 9999, True, 1, True, None)  # made for one request: the labels stay
    cast("Any", engine).state().slots = (*engine.state().slots, large)
    text = Metrics(engine).text().decode()
    labels = 'max_lora="2",running_lora_adapters="a,b",waiting_lora_adapters=""'
    assert float(text.split(f"vllm:lora_requests_info{{{labels}}} ")[1].split()[0]) > 1.7e9
    assert 'num_gpu_blocks="40"' in text
    for metric in gateways.METRICS:
        for name in metric.names:
            assert f"# TYPE {name} {metric.kind}\n" in text


def test_names_follow_the_conventions(metrics: Metrics) -> None:
    metrics.observe(Request(""), finished())
    families = list(text_string_to_metric_families(metrics.text().decode()))
    assert CONTENT_TYPE_LATEST.startswith("text/plain; version=")
    for family in families:
        assert family.name.startswith(("sfumato_", "process_", "llamacpp:", "vllm:"))
        assert family.documentation and family.type != "unknown"
        assert not family.name.endswith(("_ms", "_s", "_mb", "_per_second"))
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        # Of one metric the values of these may overlap: a cached token is a prompt's, too.
        assert not labels & {"kind", "type"}
        if family.name.endswith("_seconds") and family.type == "histogram":
            assert labels <= {"outcome", "route", "status_class"}


def test_each_app_has_its_own_registry() -> None:
    first, second = Metrics(scripted()), Metrics(scripted())
    first.observe(Request("", endpoint=CHAT), finished())
    assert reader(first)("sfumato_requests_total", endpoint=CHAT, outcome="eos") == 1
    assert reader(second)("sfumato_requests_total", endpoint=CHAT, outcome="eos") is None


def test_a_real_engine() -> None:
    observed: list[Metrics] = []
    engine = Engine(
        sfumato.load(),
        EngineConfig(slots=2, context=512),
        on_finish=lambda request, event: observed[0].observe(request, event),
    )
    metrics = Metrics(engine)
    observed.append(metrics)
    reply = engine.generate(Request("Who are you?", seed=1, max_tokens=64, endpoint="api"))
    read = reader(metrics)
    assert read("sfumato_requests_total", endpoint="api", outcome=reply.stop_reason) == 1
    tokens = [read("sfumato_output_tokens_total", part=part) for part in ("answer", "thought")]
    assert tokens == [len(reply.token_ids), 0]
    assert read("sfumato_canvas_steps_sum") == sum(reply.stats.steps)
    assert read("sfumato_steps_total") == sum(reply.stats.steps)
    assert read("sfumato_slots", state="idle") == 2
    assert read("sfumato_healthy") == 1
    engine.close()
    assert reader(metrics)("sfumato_healthy") == 0


def test_an_audit_that_fails_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    writer = AuditWriter(log)
    append = log.append

    def sometimes(data: bytes) -> None:
        if b"true" in data:
            raise ValueError("no line")
        append(data)

    monkeypatch.setattr(log, "append", sometimes)
    for bad in (True, False, True):
        writer.write({"bad": bad})
    writer.close()
    read = reader(Metrics(scripted(), writer))
    assert read("sfumato_audit_lines_lost_total", reason="error") == 2
    assert read("sfumato_audit_lines_lost_total", reason="queue") == 0
    assert read("sfumato_audit_lines_lost_total", reason="file") == 0
    assert read("sfumato_audit_waiting_bytes") == 0
    assert read("sfumato_audit_writer_alive") == 0, "it has been closed"
    assert reader(Metrics(scripted()))("sfumato_audit_writer_alive") is None


def test_an_open_circuit_shows(metrics: Metrics) -> None:
    assert reader(metrics)("sfumato_circuit_open") == 1
