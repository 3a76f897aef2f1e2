"""A checkpoint's sampler defaults as metadata: the way back from `config.py`'s readers.

Only the reference's sampler, schedule and stop can be said there.
"""

from __future__ import annotations

from typing import Any

from sfumato.diffusion.config import GGUF_KEYS, HF_KEYS, SamplerConfig
from sfumato.diffusion.sampler import EntropyBound
from sfumato.diffusion.schedule import LinearTemperature
from sfumato.diffusion.stopping import StableAndConfident
from sfumato.model.families.diffusion_gemma.write_config import short


def to_hf(config: SamplerConfig) -> dict[str, Any]:
    """The sampler's fields of `generation_config.json`."""
    values = {
        HF_KEYS[name]: short(value) if isinstance(value, float) else value
        for name, value in _values(config).items()
    }
    bound = values.pop(HF_KEYS["bound"])
    sampler = {"_cls_name": "EntropyBoundSamplerConfig", HF_KEYS["bound"]: bound}
    return {**values, "sampler_config": sampler}


def to_gguf(config: SamplerConfig) -> dict[str, Any]:
    """The `diffusion.eb_*` keys."""
    return {GGUF_KEYS[name]: value for name, value in _values(config).items()}


def _values(config: SamplerConfig) -> dict[str, Any]:
    sampler, schedule, stopping = config.sampler, config.schedule, config.stopping
    assert isinstance(sampler, EntropyBound)
    assert isinstance(schedule, LinearTemperature) and isinstance(stopping, StableAndConfident)
    return {
        "max_steps": config.max_steps,
        "bound": sampler.bound,
        "t_min": schedule.t_min,
        "t_max": schedule.t_max,
        "stability": stopping.stability,
        "confidence": stopping.confidence,
    }
