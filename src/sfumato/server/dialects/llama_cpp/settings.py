"""`generation_settings` of llama-server's answers: what a reply was drawn with."""

from __future__ import annotations

import math
from typing import Any

from sfumato.diffusion.processors import LogitBias
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine import Request
from sfumato.server.service import Service

# What llama-server has and we have not, at the values that do nothing.
NEUTRAL: dict[str, Any] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "min_p": 0.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "repeat_last_n": 0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.0,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "samplers": ["temperature", "top_k", "top_p"],
    "lora": [],
}


def default_settings(service: Service) -> dict[str, Any]:
    """Of a request that names none; a seed of -1 is drawn at random."""
    config = service.model.sampler_defaults
    return {"seed": -1, **_drawn(config, config), **NEUTRAL, "n_predict": -1}


def generation_settings(
    service: Service, request: Request, seed: int | None, stream: bool, as_probs: bool = False
) -> dict[str, Any]:
    """Of one request. seed: what the reply was drawn with; as_probs: probabilities are shown in
    place of their logarithms."""
    defaults = service.model.sampler_defaults
    config = request.sampler or SamplerConfig()
    ends = service.model.end_ids if config.ignore_eos else ()
    stops = request.stop if isinstance(request.stop, list | tuple) else [request.stop]
    return {
        "seed": seed,
        **_drawn(config, defaults),
        **NEUTRAL,
        "max_tokens": request.max_tokens,
        "n_predict": request.max_tokens,
        "n_probs": config.top_tokens or 0,
        "stop": [stop for stop in stops if isinstance(stop, str)],
        "ignore_eos": bool(config.ignore_eos),
        "logit_bias": [*_biases(config), *({"token": end, "bias": None} for end in ends)],
        "stream": stream,
        "post_sampling_probs": as_probs,
        "timings_per_token": False,
    }


def _drawn(config: SamplerConfig, defaults: SamplerConfig) -> dict[str, Any]:
    """Numbers of 0 and 1 say that all tokens may be drawn."""
    temperature = defaults.temperature if config.temperature is None else config.temperature
    top_k = defaults.top_k if config.top_k is None else config.top_k
    top_p = defaults.top_p if config.top_p is None else config.top_p
    return {
        "temperature": temperature,
        "top_k": top_k or 0,
        "top_p": 1.0 if top_p is None else top_p,
    }


def _biases(config: SamplerConfig) -> list[dict[str, Any]]:
    """A bias of null bans its token, as llama-server writes it."""
    return [
        {"token": token, "bias": None if bias == -math.inf else bias}
        for processor in config.processors
        if isinstance(processor, LogitBias)
        for token, bias in processor.bias.items()
    ]
