"""The sampler defaults of a checkpoint, read from its metadata and written as such.

The keys are the family's. Only the reference's sampler, schedule and stopping rule can be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sfumato.diffusion.sampler import EntropyBound, LinearTemperature, StableAndConfident
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.model.families import SamplerKeys, family_of
from sfumato.model.families.family import shortest_float
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.errors import CheckpointError, quoted


def checkpoint_defaults(checkpoint: Checkpoint) -> SamplerConfig:
    """The sampler defaults of a checkpoint, and its family's where it names none. Raises
    CheckpointError naming the field, or the canvas process that there is no sampler for."""
    family, metadata = family_of(checkpoint), checkpoint.metadata
    if checkpoint.kind == "gguf":
        defaults = defaults_from_gguf(metadata, family.sampler)
    else:
        defaults = defaults_from_hf(metadata.get("generation_config") or {}, family.sampler)
    if family.canvas.noise != "uniform":
        raise CheckpointError(
            f"{family.name}: denoises canvases from {family.canvas.noise!r} noise; only 'uniform' "
            "is implemented"
        )
    return replace(defaults, self_conditioning=family.canvas.self_conditioning)


def defaults_from_hf(generation: Mapping[str, Any], keys: SamplerKeys) -> SamplerConfig:
    """A checkpoint's defaults from `generation_config.json` (but for its max_new_tokens).

    Null counts as absent: `transformers` writes it for what was not set. Raises CheckpointError
    naming the field."""
    nested = generation.get(keys.hf_nested)
    nested = {} if nested is None else nested
    if not isinstance(nested, Mapping):
        raise CheckpointError(
            f"generation_config.json: {keys.hf_nested}: must be an object, got {quoted(nested)}"
        )
    return _defaults("generation_config.json", keys.hf, {**generation, **nested})


def defaults_from_gguf(metadata: Mapping[str, Any], keys: SamplerKeys) -> SamplerConfig:
    """A checkpoint's defaults from GGUF metadata. Raises CheckpointError naming the key."""
    return _defaults("GGUF metadata", keys.gguf, metadata)


def _defaults(where: str, keys: Mapping[str, str], metadata: Mapping[str, Any]) -> SamplerConfig:
    values = {name: metadata[key] for name, key in keys.items() if metadata.get(key) is not None}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{where}: {keys[name]}: must be a number, got {quoted(value)}")

    def given(*names: str) -> dict[str, Any]:
        return {name: values[name] for name in names if name in values}

    try:
        return replace(
            REFERENCE,
            **given("max_steps"),
            sampler=EntropyBound(**given("bound")),
            schedule=LinearTemperature(**given("t_min", "t_max")),
            stopping=StableAndConfident(**given("stability", "confidence")),
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: the sampler's defaults: {error}") from error


def defaults_to_hf(config: SamplerConfig, keys: SamplerKeys) -> dict[str, Any]:
    """The sampler's fields of `generation_config.json`."""
    fields: dict[str, Any] = {}
    nested: dict[str, Any] = {"_cls_name": keys.hf_class}
    for name, value in _values(config).items():
        place = nested if name in keys.nested else fields
        place[keys.hf[name]] = shortest_float(value) if isinstance(value, float) else value
    return fields | {keys.hf_nested: nested}


def defaults_to_gguf(config: SamplerConfig, keys: SamplerKeys) -> dict[str, Any]:
    """The sampler's GGUF keys."""
    return {keys.gguf[name]: value for name, value in _values(config).items()}


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
