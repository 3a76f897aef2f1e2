"""The sampling fields of every body as fields of a `Request`: settings, seeds and stop strings."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from sfumato.diffusion.processors import LogitBias
from sfumato.diffusion.sampler import FixedCount, Threshold
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.diffusion.schedule import LinearTemperature
from sfumato.diffusion.stopping import StableAndConfident
from sfumato.engine import ServedModel
from sfumato.options.limits import LONGEST_STOP, MOST_BIASES, MOST_STOPS
from sfumato.refused import Refused
from sfumato.server.schemas.generation import Generation, Sampling

G = TypeVar("G", bound=Generation)
_DEFAULT = "checkpoint's default"
# Tokens of one answer, alternatives included: about 400 bytes each until they are encoded. 128
# replies of 4,096 tokens pass, and one of 32,768 with 20 alternatives.
MOST_ENTRIES = 2**20
_LEAST_SHARE = 1e-6  # top_p 0 means the most probable token


def request_fields(
    body: Sampling,
    model: ServedModel,
    endpoint: str,
    banned: Iterable[int] = (),
    alternatives: int | None = None,
) -> dict[str, Any]:
    """The fields of a Request that every dialect reads from a body in the same way. alternatives:
    tokens that the log probabilities name at each position. Raises Refused."""
    sampler = replace(sampler_of(body, model, banned), top_tokens=alternatives)
    # A causal reply that ends at once is what the model says.
    retry = body.retry_empty if sampler.mode == "causal" else body.retry_empty is not False
    return {
        "sampler": sampler,
        "stop": stops_of(body.stop) or None,
        "max_thinking_tokens": body.max_thinking_tokens,
        "retry_empty": bool(retry),
        "drafts": bool(body.stream and body.stream_drafts),
        "timeout_s": body.timeout,
        "since": body.since,
        "endpoint": endpoint,
    }


def limited(body: G) -> G:
    """The body with llama-server's `n_predict` as its max_tokens. Raises Refused."""
    if body.n_predict is None:
        return body
    if body.max_tokens not in (None, body.n_predict):
        raise Refused(("max_tokens", "n_predict"), "differ", "send one")
    return body.model_copy(update={"max_tokens": body.n_predict})


def sampler_of(body: Sampling, model: ServedModel, banned: Iterable[int] = ()) -> SamplerConfig:
    """The sampler's settings in a body; `banned` tokens are never drawn. Raises Refused."""
    bias = _bias(body.logit_bias, model.tokenizer.vocab_size)
    bias |= dict.fromkeys(banned, float("-inf"))
    if sum(value == float("-inf") for value in bias.values()) >= model.config.vocab_size:
        raise Refused("logit_bias", "bans every token of this model")
    config = SamplerConfig(processors=(LogitBias(bias),) if bias else ()).options(
        mode=body.mode,
        max_steps=body.max_steps,
        sampler=body.sampler,
        entropy_bound=body.entropy_bound,
        temperature=body.temperature,
        top_k=body.top_k if body.top_k and body.top_k > 0 else None,
        top_p=_LEAST_SHARE if body.top_p == 0 else body.top_p,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        settle_at_end=body.settle_at_end,
        canvas_length=body.canvas_length,
        self_conditioning=body.self_conditioning,
        soft_skip=body.soft_skip,
        soft_top_k=body.soft_top_k,
    )
    return _with_rules(_with_sampler(config, body), body, model.sampler_defaults)


def _with_sampler(config: SamplerConfig, body: Sampling) -> SamplerConfig:
    """Sets the fields that belong to one sampler alone."""
    for name, part, field, kind in (
        ("fixed-count", "count", "count", FixedCount),
        ("threshold", "top", "threshold", Threshold),
        ("threshold", "margin", "margin", Threshold),
    ):
        value = getattr(body, field)
        if value is None:
            continue
        if not isinstance(config.sampler, kind):
            raise Refused(field, f"belongs to the sampler {name!r}")
        try:
            config = replace(config, sampler=replace(config.sampler, **{part: value}))
        except Refused as error:
            raise error.about(field) from None
    return config


def _with_rules(config: SamplerConfig, body: Sampling, defaults: SamplerConfig) -> SamplerConfig:
    """Sets the schedule and the stopping rule where the body has a field of either."""
    if body.t_min is not None or body.t_max is not None:
        default = (
            defaults.schedule
            if isinstance(defaults.schedule, LinearTemperature)
            else LinearTemperature()
        )
        low = default.t_min if body.t_min is None else body.t_min
        high = default.t_max if body.t_max is None else body.t_max
        if low > high and body.t_max is None:
            raise Refused(
                "t_min", f"must be at most t_max, {high:g} by the {_DEFAULT}", f"got {low:g}"
            )
        if low > high and body.t_min is None:
            raise Refused(
                "t_max", f"must be at least t_min, {low:g} by the {_DEFAULT}", f"got {high:g}"
            )
        config = replace(config, schedule=LinearTemperature(low, high))
    if body.stability is not None or body.confidence is not None:
        rule = defaults.stopping if isinstance(defaults.stopping, StableAndConfident) else None
        rule = rule or StableAndConfident()
        stability = rule.stability if body.stability is None else body.stability
        confidence = rule.confidence if body.confidence is None else body.confidence
        config = replace(config, stopping=StableAndConfident(stability, confidence))
    return config


def _bias(biases: Mapping[str, float] | None, vocabulary: int) -> dict[int, float]:
    biases = biases or {}
    if len(biases) > MOST_BIASES:
        raise Refused("logit_bias", f"at most {MOST_BIASES} tokens")
    bias: dict[int, float] = {}
    for key, value in biases.items():
        token = int(key) if key.isascii() and key.isdecimal() and len(key) < 12 else -1
        if not 0 <= token < vocabulary:
            raise Refused(
                "logit_bias", f"{key[:40]!r} is no token id of this model (0 to {vocabulary - 1})"
            )
        if not -100 <= value <= 100:
            raise Refused("logit_bias", f"{value} is not from -100 to 100")
        bias[token] = float("-inf") if value == -100 else value
    return bias


def check_size(
    model: ServedModel, limits: Iterable[int], alternatives: int | None, *fields: str
) -> None:
    """Bounds the entries of one answer. limits: tokens of each reply; what exceeds the model's
    context is refused elsewhere. Raises Refused."""
    tokens = sum(min(limit, model.config.context_length) for limit in limits)
    entries = tokens * (1 + (alternatives or 0))
    if entries > MOST_ENTRIES:
        raise Refused(
            fields,
            f"come to {entries:,} tokens and alternatives, and one answer has at most "
            f"{MOST_ENTRIES:,}",
            "ask for less, in several requests",
        )


def seeds_of(seed: int | None, count: int) -> list[int]:
    """The seeds of `count` replies, each one more than the last; the first is random where the body
    has none.

    OpenAI's API has negative seeds too; the engine counts from 0 to 2⁶⁴-1. Random seeds have 48
    bits: a client that reads JSON numbers as floats keeps every digit.
    """
    first = secrets.randbits(48) if seed is None else seed
    return [(first + i) % 2**64 for i in range(count)]


def stops_of(stop: str | list[str] | None) -> list[str]:
    """Raises Refused."""
    stops = [text for text in ([stop] if isinstance(stop, str) else stop or ()) if text]
    if len(stops) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in stops):
        raise Refused(
            "stop", f"at most {MOST_STOPS} texts, each of at most {LONGEST_STOP} characters"
        )
    return stops
