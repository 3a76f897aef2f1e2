"""`SamplerConfig`: every decoding choice of one request, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from sfumato.diffusion.checks import check_setting, is_whole
from sfumato.diffusion.sampler import (
    PACES,
    SAMPLERS,
    EntropyBound,
    EvenPace,
    FixedCount,
    LinearTemperature,
    LogitProcessor,
    LowConfidence,
    Never,
    Pace,
    Sampler,
    Schedule,
    SoftTopK,
    StableAndConfident,
    Stopping,
    Threshold,
    banned_by,
    count_at,
    counts_of,
    temperature_at,
)
from sfumato.options import MODES, default, exclusions, setting
from sfumato.options.limits import MOST_HISTORY
from sfumato.refused import Refused
from sfumato.weights.errors import quoted

_METHODS = {
    "sampler": ("accept", "EntropyBound(), or options(sampler='threshold') for a name"),
    "schedule": ("temperature", "LinearTemperature()"),
    "stopping": ("done", "StableAndConfident()"),
    "pace": ("count", "EvenPace()"),
    "soft_top_k": ("k", "SoftTopK(256, 32), or a whole number"),
}
"""For each part the method that makes it one, and an example."""


_OF_SAMPLERS: dict[str, dict[type, str]] = {
    "entropy_bound": {EntropyBound: "bound"},
    "count": {FixedCount: "count"},
    "threshold": {Threshold: "top", LowConfidence: "threshold"},
    "margin": {Threshold: "margin"},
}
"""Flat options that belong to samplers: of each sampler the field."""

MOST_NAMED = 128
"""Named tokens: as many as vLLM takes."""

_OPTIONAL = (
    "max_steps",
    "patience",
    "top_k",
    "top_tokens",
    "canvas_length",
    "min_tokens",
    "top_p",
    "soft_skip",
)
_GIVEN = ("temperature", "ignore_eos", "self_conditioning", "settle_at_end")


@dataclass(frozen=True)
class SamplerConfig:
    """How a reply is written. What is None is the checkpoint's own choice.

    In the mode "causal" the encode phase writes one token after another, and `temperature` is the
    temperature itself; what belongs to denoising steps has no part in it (see `check_mode`)."""

    max_steps: int | None = None  # denoising steps per canvas at most; up to MOST_STEPS
    sampler: Sampler | None = None  # which drawn tokens are accepted
    schedule: Schedule | None = None  # the temperature of each step
    stopping: Stopping | None = None  # when a canvas is finished early
    pace: Pace | None = None  # how many mask tokens a step reveals at least
    temperature: float = default("temperature")  # scales the schedule; at 0 the draw is the argmax
    top_k: int | None = None  # only the k most probable tokens; up to MOST_TOP_K
    top_p: float | None = None  # only the most probable tokens that hold this much probability
    processors: tuple[LogitProcessor, ...] = ()
    canvas_length: int | None = None  # at most the checkpoint's
    min_tokens: int = default(
        "min_tokens"
    )  # no end token before so many tokens; a stop string may come earlier
    ignore_eos: bool = default(
        "ignore_eos"
    )  # end tokens are banned: the reply has max_tokens tokens
    # Whether a canvas has settled is tested only up to its first settled end token
    settle_at_end: bool = default("settle_at_end")
    patience: int | None = None  # each position settles by itself: see `EachSettled`
    self_conditioning: bool = default("self_conditioning")  # off only to measure what it is worth
    # Probability that self-conditioning may leave out, 0 for none; None: as much as rounding hides
    # on a CPU, and none elsewhere: docs/head.md
    soft_skip: float | None = None
    soft_top_k: SoftTopK | int | None = None  # most probable tokens that count: docs/head.md
    top_tokens: int | None = None  # most probable tokens that drafts and commits name; at least 8
    named_tokens: tuple[int, ...] = ()  # whose log probabilities drafts and commits have
    mode: str = default("mode")  # canvas or causal

    def __post_init__(self) -> None:
        for name in (*_GIVEN, *(each for each in _OPTIONAL if getattr(self, each) is not None)):
            check_setting(name, getattr(self, name))
        if self.mode not in MODES:
            raise Refused("mode", f"must be {' or '.join(MODES)}, got {quoted(self.mode)}")
        kept_tokens = self.soft_top_k
        if isinstance(kept_tokens, int) and is_whole(kept_tokens):
            object.__setattr__(self, "soft_top_k", SoftTopK(kept_tokens))
        given = {"patience": self.patience is not None, "settle_at_end": self.settle_at_end}
        exclusions.check(exclusions.STOPPING, given)
        given = {"soft_skip": self.soft_skip is not None, "soft_top_k": kept_tokens is not None}
        exclusions.check(exclusions.SOFT, given)
        for name, (method, example) in _METHODS.items():
            part = getattr(self, name)
            if part is not None and not _has(part, method):
                raise Refused(
                    name,
                    f"must be an object with a method {method!r}, such as {example}",
                    f"got {part!r}",
                )
        for name in ("sampler", "stopping"):
            rows = getattr(getattr(self, name), "history", 1)
            if not (is_whole(rows) and 0 <= rows <= MOST_HISTORY):
                raise Refused(
                    name,
                    f"its history must be a whole number of rows from 0 to {MOST_HISTORY}, got "
                    f"{quoted(rows)}",
                )
        processors = self.processors
        if not isinstance(processors, tuple) or not all(_has(p, "process") for p in processors):
            raise Refused(
                "processors",
                "must be a tuple of objects with a method 'process', such as (LogitBias({5: "
                "1.0}),)",
                f"got {processors!r}",
            )

        self._check_named()

    def _check_named(self) -> None:
        named = self.named_tokens
        if not isinstance(named, tuple) or not all(is_whole(i) and i >= 0 for i in named):
            raise Refused(
                "named_tokens",
                "must be a tuple of token ids, such as (5, 7)",
                f"got {quoted(named)}",
            )
        if len(named) > MOST_NAMED:
            raise Refused("named_tokens", f"at most {MOST_NAMED}, got {len(named)}")
        given = {
            "named_tokens": named,
            "top_k": self.top_k,
            "top_p": self.top_p is not None and self.top_p < 1,
            "processors": not all(banned_by(each, 0, 1) for each in self.processors),
        }
        exclusions.check(exclusions.NAMED, given)

    def by_step(self) -> tuple[list[float], list[int]]:
        """Temperature and soft_top_k of every step that there may be; the second is empty where
        all tokens count. Raises ValueError, which names the step, for what no step can use."""
        assert self.schedule and self.max_steps
        schedule, counts, most = self.schedule, self.soft_top_k, self.max_steps
        steps = range(1, most + 1)
        temperatures = [temperature_at(schedule, step, most) for step in steps]
        if counts is None or isinstance(counts, int):
            return temperatures, []
        return temperatures, [count_at(counts, step, most) for step in steps]

    def counts(self, length: int) -> list[int]:
        """How many mask tokens each step of a canvas of so many positions reveals at least. Raises
        ValueError, which names the step, for what is no count."""
        assert self.pace and self.max_steps
        return counts_of(self.pace, self.max_steps, length)

    def check_mode(self) -> None:
        """Raises Refused for what a request sets that its mode has not."""
        given = {each.name: getattr(self, each.name) is not None for each in fields(self)}
        given |= {"self_conditioning": not self.self_conditioning}
        given |= {"settle_at_end": self.settle_at_end, "mode=causal": self.mode == "causal"}
        exclusions.check(exclusions.CAUSAL, given)

    @property
    def beside_grammar(self) -> dict[str, object]:
        """What does not go together with a grammar, as `exclusions.GRAMMAR` names it."""
        return {
            "grammar": True,
            "mode=causal": self.mode == "causal",
            "ignore_eos": self.ignore_eos,
            "named_tokens": self.named_tokens,
        }

    def over(self, defaults: SamplerConfig) -> SamplerConfig:
        """A config with this one's Nones filled from `defaults`."""
        own = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return replace(defaults, **own)

    def options(
        self,
        *,
        sampler: str | None = None,
        pace: str | None = None,
        **flat: Any,
    ) -> SamplerConfig:
        """The same with flat options laid over it, as command line and HTTP have them; None
        leaves as is. Raises ValueError naming the option."""
        given = {name: value for name, value in flat.items() if value is not None}
        own = {name: given.pop(name) for name in _OF_SAMPLERS if name in given}
        new = replace(self, **given)
        if sampler is not None:
            if sampler not in SAMPLERS:
                raise Refused("sampler", f"{sampler!r} is none of {', '.join(SAMPLERS)}")
            chosen: Sampler = SAMPLERS[sampler]()
            new = replace(new, sampler=chosen)
        if pace is not None:
            if pace not in PACES:
                raise Refused("pace", f"{pace!r} is none of {', '.join(PACES)}")
            new = replace(new, pace=PACES[pace]())
        for name, value in own.items():
            new = new._with_own(name, value)
        return new

    def _with_own(self, name: str, value: Any) -> SamplerConfig:
        """The same with an option that belongs to some samplers. Raises Refused for another one."""
        sampler, homes = self.sampler, _OF_SAMPLERS[name]
        if sampler is None and EntropyBound in homes:
            sampler = EntropyBound()
        if type(sampler) not in homes:
            names = " or ".join(map(repr, setting(name).samplers))
            raise Refused(name, f"belongs to the sampler {names}")
        try:
            changed: Any = replace(sampler, **{homes[type(sampler)]: value})  # type: ignore[type-var]
        except Refused as error:
            raise error.about(name) from None
        return replace(self, sampler=changed)


def _has(part: object, method: str) -> bool:
    return callable(getattr(part, method, None)) and not isinstance(part, type)


def check_sampler(sampler: object) -> None:
    """Raises ValueError for what is no SamplerConfig, and for one that its mode refuses."""
    if not isinstance(sampler, SamplerConfig | None):
        raise Refused(
            "sampler",
            "must be a SamplerConfig, such as SamplerConfig(temperature=0.7, "
            f"sampler=EntropyBound()), got {sampler!r}",
        )
    if sampler is not None:
        sampler.check_mode()


REFERENCE = SamplerConfig(
    max_steps=default("max_steps"),
    sampler=EntropyBound(),
    schedule=LinearTemperature(),
    stopping=StableAndConfident(),
)
"""What the reference implementation does where a checkpoint says nothing."""


MASKS = replace(
    REFERENCE,
    sampler=LowConfidence(),
    schedule=LinearTemperature(1.0, 1.0),
    stopping=Never(),  # a canvas ends where nothing is masked any more
    pace=EvenPace(),
    self_conditioning=False,
)
"""What models with a mask token do where their checkpoint says nothing: `block_diffusion_generate`
of SDAR."""


def fixed_steps(count: int) -> SamplerConfig:
    """Exactly `count` steps per canvas, whatever the text: for speed measurements."""
    return SamplerConfig(max_steps=count, stopping=Never())
