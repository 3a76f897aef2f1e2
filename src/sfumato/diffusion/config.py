"""`SamplerConfig`: every decoding choice of one request, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sfumato.diffusion.processors import LogitProcessor
from sfumato.diffusion.sampler import SAMPLERS, EntropyBound, Sampler
from sfumato.diffusion.schedule import LinearTemperature, Schedule
from sfumato.diffusion.stopping import Never, StableAndConfident, Stopping


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


def defaults_from_hf(generation: Mapping[str, Any]) -> SamplerConfig:
    """A checkpoint's defaults from `generation_config.json` (but for its max_new_tokens)."""
    sampler = generation.get("sampler_config") or {}
    return _defaults(
        max_steps=generation.get("max_denoising_steps"),
        entropy_bound=sampler.get("entropy_bound"),
        t_min=generation.get("t_min"),
        t_max=generation.get("t_max"),
        stability=generation.get("stability_threshold"),
        confidence=generation.get("confidence_threshold"),
    )


def defaults_from_gguf(metadata: Mapping[str, Any]) -> SamplerConfig:
    """A checkpoint's defaults from its `diffusion.eb_*` keys."""
    return _defaults(
        max_steps=metadata.get("diffusion.eb_max_steps"),
        entropy_bound=metadata.get("diffusion.eb_entropy_bound"),
        t_min=metadata.get("diffusion.eb_t_min"),
        t_max=metadata.get("diffusion.eb_t_max"),
        stability=metadata.get("diffusion.eb_stability_threshold"),
        confidence=metadata.get("diffusion.eb_confidence_threshold"),
    )


def _defaults(
    max_steps: Any, entropy_bound: Any, t_min: Any, t_max: Any, stability: Any, confidence: Any
) -> SamplerConfig:
    def known(**values: Any) -> dict[str, Any]:
        return {k: v for k, v in values.items() if v is not None}

    return replace(
        REFERENCE,
        **known(max_steps=max_steps),
        sampler=EntropyBound(**known(bound=entropy_bound)),
        schedule=LinearTemperature(**known(t_min=t_min, t_max=t_max)),
        stopping=StableAndConfident(**known(stability=stability, confidence=confidence)),
    )


def fixed_steps(count: int) -> SamplerConfig:
    """Exactly `count` steps per canvas, whatever the text: for speed measurements."""
    return SamplerConfig(max_steps=count, stopping=Never())
