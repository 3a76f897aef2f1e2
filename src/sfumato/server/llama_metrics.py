"""The engine's state under the names that llama-server's /metrics has, beside our own.

What llama-server counts of speculative decoding has no counterpart here.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from sfumato.engine.stats import EngineState


def families(state: EngineState) -> Iterator[Metric]:
    """Counters since the engine was made, and speeds over the last minute."""
    totals, speeds = state.totals, state.speeds
    busy = sum(slot.busy for slot in state.slots)
    counters = {
        "prompt_tokens_total": (
            "Tokens of prompts that were encoded, of requests that ended.",
            totals.prompt_tokens - totals.cached_tokens,
        ),
        "prompt_tokens_cached_total": (
            "Tokens of prompts that were found in a slot.",
            totals.cached_tokens,
        ),
        "prompt_seconds_total": ("Time spent on prompts and commits.", totals.encode_s),
        "tokens_predicted_total": ("Visible tokens of replies that ended.", totals.output_tokens),
        "tokens_predicted_seconds_total": (
            "Time spent on denoising forwards.",
            totals.denoise_s,
        ),
        "n_decode_total": ("Batched denoising forwards.", totals.forwards),
    }
    gauges = {
        "n_tokens_max": (
            "Most tokens that a slot holds now.",
            max((slot.tokens for slot in state.slots), default=0),
        ),
        "prompt_tokens_seconds": (
            "Prompt tokens a second of encoding, since the engine was made.",
            totals.encoded_tokens / totals.encode_s if totals.encode_s else 0.0,
        ),
        "predicted_tokens_seconds": (
            "Visible tokens a second over the last minute.",
            speeds.output_tokens,
        ),
        "requests_processing": ("Requests that have a slot.", len(state.running)),
        "requests_deferred": ("Requests that wait for a slot.", state.waiting),
        "n_busy_slots_per_decode": (
            "Rows of a forward over the last minute.",
            speeds.rows_per_forward,
        ),
        "kv_cache_usage_ratio": (
            "Share of the slots that are in use.",
            busy / len(state.slots) if state.slots else 0.0,
        ),
    }
    for name, (help, value) in counters.items():
        yield CounterMetricFamily(f"llamacpp:{name}", help, value=value)
    for name, (help, value) in gauges.items():
        yield GaugeMetricFamily(f"llamacpp:{name}", help, value=value)
