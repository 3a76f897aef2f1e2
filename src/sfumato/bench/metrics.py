"""The figures of a report, each with its one definition. Knows not how they are taken.

A measurement is a mapping from a metric's key to the values found: one for each request, step or
canvas, as the definition says. What was not found has no key, and is never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Group = Literal["waiting", "steps", "where", "speed", "size", "memory"]
Values = dict[str, list[float]]


@dataclass(frozen=True)
class Metric:
    """One figure: its key in JSON and CSV, its name for people, its unit and what it means."""

    key: str
    label: str
    unit: str
    group: Group
    definition: str


METRICS = (
    Metric(
        "load_s", "load", "s", "waiting",
        "Opening the checkpoint and bringing its weights into memory, ready to run. Random "
        "weights are made in memory and have no such time.",
    ),
    Metric(
        "setup_s", "set-up", "s", "waiting",
        "From the request to the start of its prefill: the prompt rendered and tokenized, the "
        "settings checked, the cache slot made.",
    ),
    Metric(
        "prefill_tps", "prefill", "tok/s", "waiting",
        "Prompt tokens over the seconds that encoding them took.",
    ),
    Metric(
        "first_draft_s", "first draft", "s", "waiting",
        "From the request to the first draft: the canvas after one denoising step.",
    ),
    Metric(
        "first_commit_s", "first commit", "s", "waiting",
        "From the request to the first settled canvas.",
    ),
    Metric(
        "first_token_s", "first token", "s", "waiting",
        "From the request to the first visible text, thoughts included. Here that is the first "
        "settled canvas that has any.",
    ),
    Metric(
        "last_token_s", "last token", "s", "waiting",
        "From the request to the last visible text.",
    ),
    Metric(
        "total_s", "whole request", "s", "waiting",
        "From the request to the end of its reply.",
    ),
    Metric(
        "steps_per_canvas", "steps per canvas", "", "steps",
        "Denoising steps of a canvas. Of a server that reports only sums: the mean of each reply.",
    ),
    Metric(
        "step_ms", "a step", "ms", "steps",
        "One denoising step: the forward, the pass over the vocabulary and the sampler. Of a "
        "server: the mean of each reply.",
    ),
    Metric(
        "step_floor_ms", "a step, floor", "ms", "steps",
        "What no program can do a step in on this device: of each kernel the larger of its bytes "
        "over the bandwidth and its products over their rate, for the case's requests at a time. "
        "Only where the device is known (docs/hardware.md).",
    ),
    Metric(
        "step_predicted_ms", "a step, predicted", "ms", "steps",
        "The floor with what kernels are taken to reach of it, and the launches.",
    ),
    Metric(
        "commit_ms", "a commit", "ms", "steps",
        "Encoding a settled canvas into the prefix, mean of each reply that has more than one "
        "canvas; the last is never encoded.",
    ),
    Metric(
        "tokens_per_forward", "tokens per forward", "", "steps",
        "Visible tokens of a reply over its denoising steps. Commits are not counted.",
    ),
    Metric(
        "where_step_ms", "a step, timed apart", "ms", "where",
        "One denoising step of the pass with timers (--where): the sum of the parts below.",
    ),
    Metric(
        "attention_ms", "attention", "ms", "where",
        "Attention of all layers in a step: projections, head norms, rotary embedding, and "
        "attention itself.",
    ),
    Metric(
        "dense_ms", "dense", "ms", "where",
        "The dense MLPs of all layers in a step, and that of self-conditioning.",
    ),
    Metric(
        "experts_ms", "experts", "ms", "where",
        "Routers and experts of all layers in a step.",
    ),
    Metric(
        "head_ms", "head", "ms", "where",
        "The pass over the vocabulary in a step, with the search for the cutoffs of top-k and "
        "top-p.",
    ),
    Metric(
        "sampler_ms", "sampler", "ms", "where",
        "Acceptance, stop test and fresh noise of a step.",
    ),
    Metric(
        "rest_ms", "rest", "ms", "where",
        "What is left of a step's forward: embedding, rotary tables, norms and residuals.",
    ),
    Metric(
        "visible_tps", "visible", "tok/s", "speed",
        "Visible tokens of a reply over its whole request. Visible are the reply's tokens, "
        "thoughts included; an end token and what follows it in its canvas are not.",
    ),
    Metric(
        "canvas_tps", "canvas", "tok/s", "speed",
        "Positions of a reply's settled canvases over the seconds of denoising, those after the "
        "end of the reply included; without prefill and commits.",
    ),
    Metric(
        "blocks_per_s", "blocks", "1/s", "speed",
        "Settled canvases of a reply over the seconds of denoising and committing.",
    ),
    Metric(
        "throughput_tps", "all requests", "tok/s", "speed",
        "Visible tokens of all measured requests over the wall time from the first one's start "
        "to the last one's end.",
    ),
    Metric(
        "prompt_tokens", "prompt", "tok", "size",
        "Tokens of a request's prompt, the chat template's and the filling of --context included.",
    ),
    Metric(
        "output_tokens", "reply", "tok", "size",
        "Visible tokens of a reply.",
    ),
    Metric(
        "peak_anonymous", "anonymous", "B", "memory",
        "The largest private memory of the process until then, loading included: anonymous and "
        "shared pages (RssAnon and RssShmem), sampled 20 times a second.",
    ),
    Metric(
        "peak_mapped", "mapped", "B", "memory",
        "The most resident pages of mapped files (RssFile), sampled as often. These pages belong "
        "to the page cache and can be dropped.",
    ),
    Metric(
        "peak_resident", "resident", "B", "memory",
        "The largest sum of both at one time, by the kernel's own count (VmHWM).",
    ),
    Metric(
        "peak_device", "device", "B", "memory",
        "The most memory that torch's allocator held on a CUDA device, its unused blocks too.",
    ),
    Metric(
        "peak_device_used", "in use", "B", "memory",
        "The most memory of the CUDA device that was in use, sampled as often: also the driver's, "
        "the code of kernels, and what other processes have.",
    ),
)  # fmt: skip
"""In the order in which a report shows them."""

PARTS = ("attention_ms", "dense_ms", "experts_ms", "head_ms", "sampler_ms", "rest_ms")
"""The metrics that a timed step divides into."""
