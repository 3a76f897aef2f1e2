"""What gateways expect of a model server, as names: of metrics, and of headers.

The names are vLLM's, which all of these read: llm-d's router and the Gateway API inference
extension (its model server protocol), vLLM's production-stack, and KServe's autoscaling. Loads
nothing, so that a check of a server anywhere is light."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

PREFIX_BLOCK = 64
"""Positions of a block in `vllm:cache_config_info`. Slots have no blocks: a prefix is found to the
token. It is the least that llm-d's approximate prefix routing counts in; with a smaller one the
router would take a cache for larger than it is."""


@dataclass(frozen=True)
class GatewayMetric:
    """A metric that gateways read of every replica."""

    name: str
    help: str
    readers: str  # which gateways read it, and what for
    needed: bool = False  # whether a router balances nothing without it
    older: str | None = None  # its name before vLLM renamed it, which some still read
    labels: tuple[str, ...] = ("model_name",)
    may_lack: bool = False  # absent where there is nothing to say

    @property
    def kind(self) -> Literal["gauge", "counter"]:
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which it is found, the present one first."""
        return (self.name, self.older) if self.older else (self.name,)


METRICS = (
    GatewayMetric(
        "vllm:num_requests_waiting", "Requests that wait for a slot.", "all: load", needed=True
    ),
    GatewayMetric(
        "vllm:num_requests_running", "Requests that have a slot.", "all: load", needed=True
    ),
    GatewayMetric(
        "vllm:kv_cache_usage_perc",
        "Positions of slots that requests lease, over those of all slots: 0 to 1.",
        "all: load",
        needed=True,
        older="vllm:gpu_cache_usage_perc",
    ),
    GatewayMetric(
        "vllm:cache_config_info",
        f"1; positions of the slots allocated at start, in blocks of {PREFIX_BLOCK}.",
        "llm-d: what it remembers of a replica's prefixes",
        labels=("block_size", "num_gpu_blocks"),
    ),
    GatewayMetric(
        "vllm:lora_requests_info",
        "When it was read, in seconds since 1970, with the adapters that are loaded, all of which "
        "may answer. Absent where there is none.",
        "llm-d, inference extension: adapters",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        may_lack=True,
    ),
    GatewayMetric(
        "vllm:prefix_cache_queries_total",
        "Tokens of prompts, of requests that ended.",
        "production-stack: hit rate",
        older="vllm:gpu_prefix_cache_queries_total",
    ),
    GatewayMetric(
        "vllm:prefix_cache_hits_total",
        "Of these tokens those that were found in a slot.",
        "production-stack: hit rate",
        older="vllm:gpu_prefix_cache_hits_total",
    ),
    GatewayMetric(
        "vllm:prompt_tokens_total", "Tokens of prompts, of requests that ended.", "boards"
    ),
    GatewayMetric(
        "vllm:generation_tokens_total", "Visible tokens of replies that ended.", "boards"
    ),
)

REQUEST_ID = "x-request-id"
HEADERS = (
    REQUEST_ID,
    # Sessions, by which a router finds the replica of the turn before.
    "x-session-id",
    "x-session-token",
    "x-session-affinity",
    "session-id",
    "session_id",
    "x-claude-code-session-id",
    # Objectives: priority, whose share, and how soon. The names of llm-d, and those before them.
    "x-llm-d-inference-objective",
    "x-gateway-inference-objective",
    "x-llm-d-inference-fairness-id",
    "x-gateway-inference-fairness-id",
    "x-llm-d-slo-ttft-ms",
    "x-slo-ttft-ms",
    "x-llm-d-slo-tpot-ms",
    "x-slo-tpot-ms",
    # Where the request was sent.
    "x-gateway-destination-endpoint",
)
"""Headers of routers that go into the logs by name and change no answer."""
LONGEST = 128  # characters of a value
_VALUE = re.compile(rf"[\x21-\x7e]{{1,{LONGEST}}}")


def kept(header: Callable[[str], str | None]) -> dict[str, str]:
    """The headers of a request that its log lines have, by name. header: the value of a name, None
    where there is none. A value that is too long, or not of printable ASCII without spaces, counts
    as absent: it can forge no line of a log."""
    values = ((name, header(name)) for name in HEADERS)
    return {name: value for name, value in values if value and _VALUE.fullmatch(value)}
