"""`SamplerConfig`: every decoding choice of one request, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sfumato.diffusion.processors import LogitProcessor
from sfumato.diffusion.sampler import SAMPLERS, EntropyBound, Sampler
from sfumato.diffusion.schedule import LinearTemperature, Schedule
from sfumato.diffusion.stopping import Never, StableAndConfident, Stopping
from sfumato.weights.errors import CheckpointError, quoted


@dataclass(frozen=True)
class SamplerConfig:
    """How canvases are denoised. What is None is the checkpoint's own choice."""

    max_steps: int | None = None  # denoising steps per canvas at most
    sampler: Sampler | None = None  # which drawn tokens are accepted
    schedule: Schedule | None = None  # the temperature of each step
    stopping: Stopping | None = None  # when a canvas is finished early
    temperature: float = 1.0  # scales the schedule; at 0 the draw is the argmax
    top_k: int | None = None  # only the k likeliest tokens
    top_p: float | None = None  # only the likeliest tokens that hold this much probability
    processors: tuple[LogitProcessor, ...] = ()
    canvas_length: int | None = None  # at most the checkpoint's
    min_tokens: int = 0  # no end of the reply before so many tokens
    ignore_eos: bool = False  # end tokens do not end the reply
    self_conditioning: bool = True  # off only to measure what it is worth

    def __post_init__(self) -> None:
        for name, low in (("max_steps", 1), ("top_k", 1), ("canvas_length", 1), ("min_tokens", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{name}: must be an integer, got {value!r}")
            if value is not None and value < low:
                raise ValueError(f"{name}: must be at least {low}, got {value}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: must be finite and at least 0, got {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must be over 0 and at most 1, got {self.top_p}")

    def over(self, defaults: SamplerConfig) -> SamplerConfig:
        """This config with its Nones filled from `defaults`."""
        own = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return replace(defaults, **own)

    def options(
        self,
        *,
        entropy_bound: float | None = None,
        confidence: float | None = None,
        stability: int | None = None,
        sampler: str | None = None,
        **flat: Any,
    ) -> SamplerConfig:
        """The same with flat options laid over it, as command line and HTTP have them; None
        leaves as is. Raises ValueError naming the option."""
        new = replace(self, **{k: v for k, v in flat.items() if v is not None})
        if sampler is not None:
            if sampler not in SAMPLERS:
                raise ValueError(f"sampler: {sampler!r} is none of {', '.join(SAMPLERS)}")
            chosen: Sampler = SAMPLERS[sampler]()
            new = replace(new, sampler=chosen)
        if entropy_bound is not None:
            if not isinstance(new.sampler, EntropyBound | None):
                raise ValueError("entropy_bound: belongs to the sampler 'entropy-bound'")
            new = replace(new, sampler=EntropyBound(entropy_bound))
        if confidence is not None or stability is not None:
            rule = new.stopping if isinstance(new.stopping, StableAndConfident) else None
            rule = rule or StableAndConfident()
            rule = StableAndConfident(
                rule.stability if stability is None else stability,
                rule.confidence if confidence is None else confidence,
            )
            new = replace(new, stopping=rule)
        return new


REFERENCE = SamplerConfig(
    max_steps=48,
    sampler=EntropyBound(),
    schedule=LinearTemperature(),
    stopping=StableAndConfident(),
)
"""What the reference implementation does where a checkpoint says nothing."""


_HF_KEYS = {
    "max_steps": "max_denoising_steps",
    "bound": "entropy_bound",
    "t_min": "t_min",
    "t_max": "t_max",
    "stability": "stability_threshold",
    "confidence": "confidence_threshold",
}
_GGUF_KEYS = {
    "max_steps": "diffusion.eb_max_steps",
    "bound": "diffusion.eb_entropy_bound",
    "t_min": "diffusion.eb_t_min",
    "t_max": "diffusion.eb_t_max",
    "stability": "diffusion.eb_stability_threshold",
    "confidence": "diffusion.eb_confidence_threshold",
}


def defaults_from_hf(generation: Mapping[str, Any]) -> SamplerConfig:
    """A checkpoint's defaults from `generation_config.json` (but for its max_new_tokens).

    Raises CheckpointError naming the field."""
    sampler = generation.get("sampler_config") or {}
    if not isinstance(sampler, Mapping):
        raise CheckpointError(
            f"generation_config.json: sampler_config: must be an object, got {quoted(sampler)}"
        )
    return _defaults("generation_config.json", _HF_KEYS, {**generation, **sampler})


def defaults_from_gguf(metadata: Mapping[str, Any]) -> SamplerConfig:
    """A checkpoint's defaults from its `diffusion.eb_*` keys. Raises CheckpointError naming the
    key."""
    return _defaults("GGUF metadata", _GGUF_KEYS, metadata)


def _defaults(where: str, keys: Mapping[str, str], given: Mapping[str, Any]) -> SamplerConfig:
    found = {ours: given[key] for ours, key in keys.items() if given.get(key) is not None}
    for ours, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{where}: {keys[ours]}: must be a number, got {quoted(value)}")

    def known(*names: str) -> dict[str, Any]:
        return {name: found[name] for name in names if name in found}

    try:
        return replace(
            REFERENCE,
            **known("max_steps"),
            sampler=EntropyBound(**known("bound")),
            schedule=LinearTemperature(**known("t_min", "t_max")),
            stopping=StableAndConfident(**known("stability", "confidence")),
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: the sampler's defaults: {error}") from error


def fixed_steps(count: int) -> SamplerConfig:
    """Exactly `count` steps per canvas, whatever the text: for speed measurements."""
    return SamplerConfig(max_steps=count, stopping=Never())
