"""Metrics for Prometheus: counters and histograms of requests, and the engine's state as gauges.

Names and units follow Prometheus' conventions: base units, `_total` for what only grows, and the
values of a label never overlap, so that `sum()` is right. What `rate()` computes (tokens a second,
seconds a step) has no gauge. The engine's state also stands under the names of llama-server, and
under those that gateways read (`gateways`); what llama-server counts of speculative decoding has no
counterpart here. Each app has a registry of its own."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sfumato import __version__
from sfumato.engine.any_engine import AnyEngine
from sfumato.engine.audit import AuditWriter
from sfumato.engine.events import Terminal
from sfumato.engine.memory.guard import MemoryView
from sfumato.engine.request import AnyRequest
from sfumato.engine.stats import EngineState, Phase
from sfumato.server import gateways

PHASES: tuple[Phase, ...] = ("prefill", "denoise", "causal", "commit", "read")
MINUTES = (60, 120, 300, 900, 3600, 21600)  # in seconds; a request may take six hours
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, *MINUTES)
HTTP_SECONDS = (0.001, *SECONDS)
STEPS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)


class Metrics:
    """The metrics of requests, and of the engine that answers them now: where another model is
    loaded, `engine` is set. `observe` and `text` may be called from any thread."""

    def __init__(self, engine: AnyEngine, audit: AuditWriter | None = None) -> None:
        """audit: what writes the audit log, where there is one."""
        self.engine: AnyEngine | None = engine
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "sfumato_requests",
            "Requests that ended, by how: a stop reason, or a kind of failure.",
            ("endpoint", "outcome"),
            registry=registry,
        )
        self._canvases = Counter(
            "sfumato_canvases",
            "Canvases of requests that ended, by whether they converged or met the step cap.",
            ("convergence",),
            registry=registry,
        )
        times = {
            "queue_s": ("queue", "From submission to a slot."),
            "prefill_s": ("prefill", "Encoding the prompt."),
            "first_draft_s": ("first_draft", "From submission to the first draft."),
            "first_commit_s": ("first_commit", "From submission to the first settled canvas."),
            "total_s": ("request", "From submission to the terminal event."),
        }
        self._seconds = {
            key: Histogram(
                f"sfumato_{name}_seconds", help, ("outcome",), buckets=SECONDS, registry=registry
            )
            for key, (name, help) in times.items()
        }
        self._steps = Histogram(
            "sfumato_canvas_steps",
            "Denoising steps of a canvas.",
            buckets=STEPS,
            registry=registry,
        )
        self._answers = Counter(
            "sfumato_http_requests",
            "HTTP requests by the template of their route and the status of the answer, refusals "
            "among them. 499: the client left before it.",
            ("route", "status"),
            registry=registry,
        )
        self._answer_seconds = Histogram(
            "sfumato_http_request_seconds",
            "From the head of an HTTP request to the end of its answer, streams too.",
            ("route", "status_class"),
            buckets=HTTP_SECONDS,
            registry=registry,
        )
        self._pictures = Histogram(
            "sfumato_picture_seconds",
            "Decoding and cutting a picture of a request, by how that ended: read, refused.",
            ("outcome",),
            buckets=HTTP_SECONDS,
            registry=registry,
        )
        registry.register(_Scraped(lambda: _engine(self.engine)))
        if audit is not None:
            registry.register(_Scraped(partial(_audit, audit)))
        ProcessCollector(registry=registry)

    def observe(self, request: AnyRequest, event: Terminal) -> None:
        """Counts a request by its terminal event; one that was refused has no account."""
        outcome = event.outcome
        self._requests.labels(request.endpoint, outcome).inc()
        account = event.account
        if account is None:
            return
        for key, histogram in self._seconds.items():
            seconds = getattr(account, key)
            if seconds is not None:
                histogram.labels(outcome).observe(seconds)
        for steps, convergence in zip(account.steps, account.convergence, strict=False):
            self._canvases.labels(convergence).inc()
            self._steps.observe(steps)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Counts an HTTP request. route: of a bounded set of names."""
        self._answers.labels(route, str(status)).inc()
        self._answer_seconds.labels(route, f"{status // 100}xx").observe(seconds)

    def picture(self, seconds: float, is_read: bool) -> None:
        """Counts a picture of a request."""
        self._pictures.labels("read" if is_read else "refused").observe(seconds)

    def text(self) -> bytes:
        """The answer to a scrape, of the type CONTENT_TYPE_LATEST."""
        return generate_latest(self._registry)


class _Scraped(Collector):
    """Metrics that are read at each scrape."""

    def __init__(self, read: Callable[[], Iterator[Metric]]) -> None:
        self._read = read

    def describe(self) -> Iterator[Metric]:
        """Empty: registering must not read the state yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        return self._read()


Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
Values = float | tuple[str, Mapping[str, float]] | None
"""One value; a label, and a value for each of its values; or None: there is none."""
Rows = dict[str, tuple[str, Values]]
"""Metrics by name: the help, and the values."""


def _families(kind: Kind, rows: Rows) -> Iterator[Metric]:
    for name, (help, values) in rows.items():
        if isinstance(values, tuple):
            family = kind(name, help, labels=values[:1])
            for value, number in values[1].items():
                family.add_metric((value,), number)
            yield family
        elif values is not None:
            yield kind(name, help, value=values)


def _engine(engine: AnyEngine | None) -> Iterator[Metric]:
    """The engine's state; nothing while a model is being loaded."""
    if engine is None:
        return
    state, health = engine.state(), engine.health()
    about = {
        "version": __version__,
        "model": engine.served.name,
        "device": engine.served.device,
    }
    yield InfoMetricFamily("sfumato_build", "Version, model and device.", about)
    gauges: Rows = {
        "sfumato_healthy": ("1 while the engine takes requests.", float(health.ok)),
        "sfumato_circuit_open": (
            "1 while the engine's own probe fails and no request runs.",
            float(state.circuit_open),
        ),
        "sfumato_uptime_seconds": ("Since the engine was made.", health.uptime_s),
        "sfumato_queue_depth": ("Requests that wait for a slot.", state.waiting),
        "sfumato_adapters": ("Adapters that are loaded.", len(engine.adapters)),
    }
    yield from _families(GaugeMetricFamily, gauges)
    yield from _counters(state)
    yield from _gauges(state)
    yield from _llama_families(state)
    yield from _gateway_families(engine, state)
    yield from _memory(engine.used_memory(), state.memory)


def _audit(audit: AuditWriter) -> Iterator[Metric]:
    """The counts of the audit log's writer."""
    counts = audit.counts
    lost = {"queue": counts.overflowed, "file": counts.unwritten, "error": counts.errors}
    help = (
        "Lines that are not in the audit log: too many waited, the file could not be written, "
        "or an exception that the log reports."
    )
    rows: Rows = {
        "sfumato_audit_lines_waiting": ("Lines to be written.", counts.waiting),
        "sfumato_audit_waiting_bytes": ("Bytes of lines to be written.", counts.waiting_bytes),
        "sfumato_audit_writer_alive": ("1 while the thread that writes runs.", counts.alive),
    }
    yield from _families(
        CounterMetricFamily, {"sfumato_audit_lines_lost": (help, ("reason", lost))}
    )
    yield from _families(GaugeMetricFamily, rows)


def _counters(state: EngineState) -> Iterator[Metric]:
    totals = state.totals
    cached = {"true": totals.cached_tokens, "false": totals.prompt_tokens - totals.cached_tokens}
    parts = {
        "thought": totals.thought_tokens,
        "answer": totals.output_tokens - totals.thought_tokens,
    }
    rows: Rows = {
        "sfumato_prompt_tokens": (
            "Of requests that ended; cached: found in a slot.",
            ("cached", cached),
        ),
        "sfumato_output_tokens": ("Visible tokens of replies that ended.", ("part", parts)),
        "sfumato_encoded_tokens": ("Tokens of prompts and commits.", totals.encoded_tokens),
        "sfumato_canvas_tokens": ("Positions of settled canvases.", totals.canvas_tokens),
        "sfumato_steps": ("Denoising steps of rows: a forward of 3 rows is 3.", totals.steps),
        "sfumato_forwards": ("Batched denoising forwards.", totals.forwards),
        "sfumato_retries": ("Canvases drawn again after an empty answer.", totals.retries),
        "sfumato_encode_seconds": ("Time spent on prompts and commits.", totals.encode_s),
        "sfumato_denoise_seconds": ("Time spent on denoising forwards.", totals.denoise_s),
        "sfumato_decisions": ("Decisions that have answers.", totals.decisions),
        "sfumato_questions": ("Questions of decisions that have answers.", totals.questions),
        "sfumato_reads": ("Canvases that were read, of decisions that ended.", totals.reads),
        "sfumato_read_tokens": ("Tokens of questions and of their canvases.", totals.read_tokens),
        "sfumato_read_seconds": ("Time spent on reads.", totals.read_s),
    }
    return _families(CounterMetricFamily, rows)


def _gauges(state: EngineState) -> Iterator[Metric]:
    phases = Tally(row.phase for row in state.running)
    busy = sum(slot.busy for slot in state.slots)
    slots = {"busy": busy, "idle": len(state.slots) - busy}
    held = sum(slot.tokens for slot in state.slots)
    rows: Rows = {
        "sfumato_rows": ("Requests that run.", ("phase", {p: phases[p] for p in PHASES})),
        "sfumato_slots": ("Cache slots.", ("state", slots)),
        "sfumato_slot_tokens": ("Tokens that all slots hold.", held),
        "sfumato_snapshot_bytes": ("Memory of snapshots.", state.snapshot_bytes),
        "sfumato_larger_slot_bytes": ("Memory of larger slots.", state.larger_bytes),
    }
    return _families(GaugeMetricFamily, rows)


def _memory(used: int | None, view: MemoryView) -> Iterator[Metric]:
    budget = None if view.budget is None else view.budget.nbytes
    rows: Rows = {
        "sfumato_memory_used_bytes": ("Held by this process on the model's device.", used),
        "sfumato_memory_predicted_bytes": (
            "The most that the engine takes.",
            view.prediction.total,
        ),
        "sfumato_memory_budget_bytes": ("Free when the engine started.", budget),
        "sfumato_memory_spare_bytes": ("Left for larger slots.", view.spare),
    }
    return _families(GaugeMetricFamily, rows)


def _llama_families(state: EngineState) -> Iterator[Metric]:
    """Counters since the engine was made, and speeds over the last minute."""
    totals, speeds = state.totals, state.speeds
    busy = sum(slot.busy for slot in state.slots)
    counters: Rows = {
        "llamacpp:prompt_tokens_total": (
            "Tokens of prompts that were encoded, of requests that ended.",
            totals.prompt_tokens - totals.cached_tokens,
        ),
        "llamacpp:prompt_tokens_cached_total": (
            "Tokens of prompts that were found in a slot.",
            totals.cached_tokens,
        ),
        "llamacpp:prompt_seconds_total": ("Time spent on prompts and commits.", totals.encode_s),
        "llamacpp:tokens_predicted_total": (
            "Visible tokens of replies that ended.",
            totals.output_tokens,
        ),
        "llamacpp:tokens_predicted_seconds_total": (
            "Time spent on denoising forwards.",
            totals.denoise_s,
        ),
        "llamacpp:n_decode_total": ("Batched denoising forwards.", totals.forwards),
    }
    gauges: Rows = {
        "llamacpp:n_tokens_max": (
            "Most tokens that a slot holds now.",
            max((slot.tokens for slot in state.slots), default=0),
        ),
        "llamacpp:prompt_tokens_seconds": (
            "Prompt tokens a second of encoding, since the engine was made.",
            totals.encoded_tokens / totals.encode_s if totals.encode_s else 0.0,
        ),
        "llamacpp:predicted_tokens_seconds": (
            "Visible tokens a second over the last minute.",
            speeds.output_tokens,
        ),
        "llamacpp:requests_processing": ("Requests that have a slot.", len(state.running)),
        "llamacpp:requests_deferred": ("Requests that wait for a slot.", state.waiting),
        "llamacpp:n_busy_slots_per_decode": (
            "Rows of a forward over the last minute.",
            speeds.rows_per_forward,
        ),
        "llamacpp:kv_cache_usage_ratio": (
            "Share of the slots that are in use.",
            busy / len(state.slots) if state.slots else 0.0,
        ),
    }
    yield from _families(CounterMetricFamily, counters)
    yield from _families(GaugeMetricFamily, gauges)


def _gateway_families(engine: AnyEngine, state: EngineState) -> Iterator[Metric]:
    """What gateways read; see `gateways.METRICS`."""
    totals, model = state.totals, engine.served.name
    positions = sum(slot.context for slot in state.slots)
    leased = sum(slot.context for slot in state.slots if slot.busy)
    # Without the slots made for long requests: a label must not change from scrape to scrape.
    blocks = sum(slot.context for slot in state.slots if not slot.larger) // gateways.PREFIX_BLOCK
    adapters = sorted(engine.adapters)
    numbers: dict[str, float] = {
        "vllm:num_requests_waiting": state.waiting,
        "vllm:num_requests_running": len(state.running),
        "vllm:kv_cache_usage_perc": leased / positions if positions else 0.0,
        "vllm:prefix_cache_queries_total": totals.prompt_tokens,
        "vllm:prefix_cache_hits_total": totals.cached_tokens,
        "vllm:prompt_tokens_total": totals.prompt_tokens,
        "vllm:generation_tokens_total": totals.output_tokens,
        "vllm:cache_config_info": 1.0,
    }
    labels: dict[str, tuple[str, ...]] = {
        "vllm:cache_config_info": (str(gateways.PREFIX_BLOCK), str(blocks)),
    }
    if adapters:
        numbers["vllm:lora_requests_info"] = time.time()
        labels["vllm:lora_requests_info"] = (str(len(adapters)), ",".join(adapters), "")
    for metric in gateways.METRICS:
        if metric.name not in numbers:
            continue
        kind: Kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
        for name in metric.names:
            family = kind(name, metric.help, labels=metric.labels)
            family.add_metric(labels.get(metric.name, (model,)), numbers[metric.name])
            yield family
