"""The sampler defaults of a checkpoint, read from its metadata and written as such.

The keys are the family's. Only the reference's sampler, schedule and stopping rule can be written,
and of a model with a mask token the sampler `LowConfidence`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sfumato.diffusion.sampler import (
    PACES,
    EntropyBound,
    LinearTemperature,
    LowConfidence,
    StableAndConfident,
)
from sfumato.diffusion.sampler_config import MASKS, REFERENCE, SamplerConfig
from sfumato.model.families import CanvasProcess, SamplerKeys, family_of
from sfumato.model.families.family import shortest_float
from sfumato.model.loading import config_of
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.errors import CheckpointError, quoted


def checkpoint_defaults(checkpoint: Checkpoint) -> SamplerConfig:
    """The sampler defaults of a checkpoint, and its family's where it names none; of a model with a
    mask token as many steps as a canvas has positions. Raises CheckpointError naming the field."""
    family, metadata = family_of(checkpoint), checkpoint.metadata
    base = defaults_of_process(family.canvas)
    if family.canvas.noise == "mask":
        base = replace(base, max_steps=config_of(checkpoint).canvas_length)
    if checkpoint.kind == "gguf":
        return defaults_from_gguf(metadata, family.sampler, base)
    return defaults_from_hf(metadata.get("generation_config") or {}, family.sampler, base)


def defaults_of_process(canvas: CanvasProcess) -> SamplerConfig:
    """The defaults of a family."""
    if canvas.noise == "uniform":
        return replace(REFERENCE, self_conditioning=canvas.self_conditioning)
    return replace(MASKS, sampler=LowConfidence(canvas.threshold), pace=PACES[canvas.pace]())


def defaults_from_hf(
    generation: Mapping[str, Any], keys: SamplerKeys, base: SamplerConfig = REFERENCE
) -> SamplerConfig:
    """A checkpoint's defaults from `generation_config.json` (but for its max_new_tokens), and
    those of `base` where the file has none.

    Null counts as absent: `transformers` writes it for what was not set. Raises CheckpointError
    naming the field."""
    nested = generation.get(keys.hf_nested)
    nested = {} if nested is None else nested
    if not isinstance(nested, Mapping):
        raise CheckpointError(
            f"generation_config.json: {keys.hf_nested}: must be an object, got {quoted(nested)}"
        )
    return _defaults("generation_config.json", keys.hf, {**generation, **nested}, base)


def defaults_from_gguf(
    metadata: Mapping[str, Any], keys: SamplerKeys, base: SamplerConfig = REFERENCE
) -> SamplerConfig:
    """A checkpoint's defaults from GGUF metadata, and those of `base` where it has none. Raises
    CheckpointError naming the key."""
    return _defaults("GGUF metadata", keys.gguf, metadata, base)


def _defaults(
    where: str, keys: Mapping[str, str], metadata: Mapping[str, Any], base: SamplerConfig
) -> SamplerConfig:
    values = {name: metadata[key] for name, key in keys.items() if metadata.get(key) is not None}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{where}: {keys[name]}: must be a number, got {quoted(value)}")

    def given(*names: str) -> dict[str, Any]:
        return {name: values[name] for name in names if name in values}

    try:
        if isinstance(base.sampler, LowConfidence):
            sampler = replace(base.sampler, **given("threshold"))
            return replace(base, **given("max_steps"), sampler=sampler)
        return replace(
            base,
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
    for name, value in _values(config, keys.hf).items():
        place = nested if name in keys.nested else fields
        place[keys.hf[name]] = shortest_float(value) if isinstance(value, float) else value
    return fields | ({keys.hf_nested: nested} if keys.hf_nested else {})


def defaults_to_gguf(config: SamplerConfig, keys: SamplerKeys) -> dict[str, Any]:
    """The sampler's GGUF keys."""
    return {keys.gguf[name]: value for name, value in _values(config, keys.gguf).items()}


def _values(config: SamplerConfig, keys: Mapping[str, str]) -> dict[str, Any]:
    """The defaults that have a key, by name."""
    sampler, schedule, stopping = config.sampler, config.schedule, config.stopping
    if isinstance(sampler, LowConfidence):
        values = {"max_steps": config.max_steps, "threshold": sampler.threshold}
        return {name: value for name, value in values.items() if name in keys}
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
