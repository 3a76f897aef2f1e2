"""`SamplerConfig`: what it refuses, how options and defaults lie over one another, and where a
checkpoint's own defaults come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sfumato.diffusion.sampler import (
    EntropyBound,
    FixedCount,
    LinearPace,
    LinearTemperature,
    LogitBias,
    LowConfidence,
    Never,
    SoftTopK,
    StableAndConfident,
    Threshold,
)
from sfumato.diffusion.sampler_config import (
    REFERENCE,
    SamplerConfig,
    fixed_steps,
)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_steps": 0}, "max_steps: must be a whole number from 1 to 4096, got 0"),
        ({"max_steps": 2.5}, "max_steps: must be a whole number from 1 to 4096, got 2.5"),
        ({"max_steps": True}, "max_steps: must be a whole number from 1 to 4096, got True"),
        ({"max_steps": "48"}, "max_steps: must be a whole number from 1 to 4096, got '48'"),
        ({"top_k": 0}, "top_k: must be a whole number from 1 to 1024"),
        ({"canvas_length": 0}, "canvas_length: must be a whole number from 1 to"),
        ({"min_tokens": -1}, "min_tokens: must be a whole number from 0 to"),
        ({"self_conditioning": 1}, "self_conditioning: must be true or false, got 1"),
        ({"settle_at_end": 1}, "settle_at_end: must be true or false, got 1"),
        ({"ignore_eos": "no"}, "ignore_eos: must be true or false, got 'no'"),
        ({"max_steps": 4097}, "max_steps: must be a whole number from 1 to 4096, got 4097"),
        ({"max_steps": 10**15}, "max_steps: must be a whole number from 1 to 4096"),
        ({"top_k": 1025}, "top_k: must be a whole number from 1 to 1024, got 1025"),
        ({"canvas_length": 10**15}, "canvas_length: must be a whole number from 1 to"),
        ({"min_tokens": 2**63}, "min_tokens: must be a whole number from 0 to"),
        ({"temperature": -0.1}, r"temperature: must be a number from 0 to 1000000"),
        ({"temperature": 1e39}, r"temperature: must be a number from 0 to 1000000"),
        ({"temperature": float("nan")}, "temperature: must be a number from 0"),
        ({"temperature": float("inf")}, "temperature: must be a number from 0"),
        ({"top_p": 0.0}, "top_p: must be a number over 0 to 1"),
        ({"top_p": 1.5}, "top_p: must be a number over 0 to 1"),
        ({"top_p": float("nan")}, "top_p: must be a number over 0"),
        ({"temperature": "x"}, r"temperature: must be a number from 0 to .*, got 'x'"),
        ({"temperature": True}, "temperature: must be a number from 0"),
        ({"top_p": "x"}, "top_p: must be a number over 0 to 1, got 'x'"),
        ({"sampler": "threshold"}, r"sampler: .* 'accept', .*options\(sampler='threshold'\)"),
        ({"sampler": EntropyBound}, r"sampler: .* such as EntropyBound\(\)"),
        ({"schedule": 0.5}, r"schedule: .* 'temperature', such as LinearTemperature\(\).* got 0.5"),
        ({"stopping": 3}, r"stopping: .* 'done', such as StableAndConfident\(\); got 3"),
        ({"soft_skip": -1e-9}, r"soft_skip: must be a number from 0 to under 1, got -1e-09"),
        ({"soft_skip": 1}, r"soft_skip: must be a number from 0 to under 1, got 1"),
        ({"soft_skip": float("nan")}, r"soft_skip: must be a number from 0 to under 1"),
        ({"soft_skip": "x"}, r"soft_skip: must be a number from 0 to under 1, got 'x'"),
        ({"soft_top_k": 0}, "soft_top_k: must be whole numbers from 1 to 2048, got 0"),
        ({"soft_top_k": 2049}, "soft_top_k: must be whole numbers from 1 to 2048, got 2049"),
        ({"soft_top_k": True}, "soft_top_k: must be .*'k', .* or a whole number; got True"),
        ({"soft_top_k": 2.5}, r"soft_top_k: must be .* SoftTopK\(256, 32\), .*; got 2.5"),
        ({"soft_top_k": 8, "soft_skip": 0.1}, "soft_skip, soft_top_k: give at most one of them"),
        ({"processors": (1,)}, r"processors: must be a tuple of .* 'process', .* got \(1,\)"),
        ({"processors": LogitBias({1: 1.0})}, "processors: must be a tuple"),
        ({"named_tokens": [5]}, r"named_tokens: must be a tuple of token ids, .* got \[5\]"),
        ({"named_tokens": (-1,)}, "named_tokens: must be a tuple of token ids"),
        ({"named_tokens": (1,) * 129}, "named_tokens: at most 128, got 129"),
        ({"named_tokens": (5,), "top_k": 3}, "named_tokens: .* leave out top_k"),
        ({"named_tokens": (5,), "processors": (LogitBias({1: 1.0}),)}, "named_tokens: "),
    ],
)
def test_nonsense_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        SamplerConfig(**values)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: EntropyBound(-0.1),
            "entropy_bound: must be a number from 0 to .*, got -0.1",
        ),
        (lambda: EntropyBound(1e308), "entropy_bound"),
        (lambda: EntropyBound(float("nan")), "entropy_bound"),
        (lambda: EntropyBound("x"), "entropy_bound: .* got 'x'"),  # type: ignore[arg-type]
        (lambda: FixedCount(0), "count: must be a whole number from 1 to"),
        (lambda: FixedCount(1.5), "count: must be a whole number from 1 to"),  # type: ignore[arg-type]
        (lambda: FixedCount(10**15), "count: must be a whole number from 1 to"),
        (lambda: Threshold(top=float("nan")), "top: must be a number from 0 to 1, got nan"),
        (lambda: Threshold(top=-0.1), "top: must be a number from 0 to 1"),
        (lambda: Threshold(margin=1.1), "margin: must be a number from 0 to 1"),
        (lambda: Threshold(margin="x"), "margin: .* got 'x'"),  # type: ignore[arg-type]
        (lambda: LinearTemperature("x", 1), "^t_min: must be"),  # type: ignore[arg-type]
        (lambda: LinearTemperature(0.8, 0.4), "^t_min, t_max: need t_min <= t_max"),
        (lambda: LinearTemperature(0, 0), "^t_max: "),
        (
            lambda: LinearTemperature(0, 1e300),
            r"^t_max: must be .* from 1e-06 to .*, got 1e\+300",
        ),
        (lambda: LinearTemperature(0, 1e-320), "^t_max: "),
        (lambda: LinearTemperature(-1, 1), "^t_min: must be a number from 0"),
        (lambda: StableAndConfident(stability=-1), "^stability: must be .* from 0 to 64, got -1"),
        (lambda: StableAndConfident(stability=65), "^stability: must be .* from 0 to 64, got 65"),
        (lambda: StableAndConfident(stability=1.5), "^stability: "),  # type: ignore[arg-type]
        (lambda: StableAndConfident(confidence="x"), "^confidence: "),  # type: ignore[arg-type]
        (lambda: StableAndConfident(confidence=0), "^confidence: must be a number over 0"),
        (lambda: StableAndConfident(confidence=1e308), "^confidence: "),
        (lambda: StableAndConfident(confidence=float("nan")), "^confidence: "),
    ],
)
def test_parts_refuse_nonsense_too(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("rows", [-1, 257, 10**15, 1.5, None])
def test_a_rule_may_not_look_back_for_ever(rows: Any) -> None:
    class Far:
        history = rows

        def done(self, view: Any) -> Any: ...

        accept = done

    for name in ("sampler", "stopping"):
        with pytest.raises(ValueError, match=f"^{name}: its history must be .* from 0 to 256"):
            SamplerConfig(**{name: Far()})


def test_over_fills_only_what_is_none() -> None:
    own = SamplerConfig(max_steps=3, stopping=Never(), temperature=0.5, top_k=7)
    filled = own.over(REFERENCE)
    assert filled == replace(REFERENCE, max_steps=3, stopping=Never(), temperature=0.5, top_k=7)
    assert SamplerConfig().over(REFERENCE) == REFERENCE
    assert SamplerConfig(soft_skip=1e-3).over(REFERENCE).soft_skip == 1e-3
    assert SamplerConfig().over(replace(REFERENCE, soft_skip=1e-3)).soft_skip == 1e-3
    assert SamplerConfig(soft_top_k=64).over(REFERENCE).soft_top_k == SoftTopK(64)
    assert SamplerConfig(temperature=0.0).over(REFERENCE).temperature == 0.0
    assert REFERENCE.max_steps == 48  # and the defaults are as they were


def test_options_lay_over() -> None:
    config = REFERENCE.options(max_steps=5, temperature=0.2, top_k=None, entropy_bound=0.7)
    assert config == replace(REFERENCE, max_steps=5, temperature=0.2, sampler=EntropyBound(0.7))
    assert REFERENCE.options() == REFERENCE
    assert REFERENCE.options(sampler="threshold").sampler == Threshold()
    assert REFERENCE.options(sampler="fixed-count").sampler == FixedCount()
    both = REFERENCE.options(sampler="entropy-bound", entropy_bound=0.0)
    assert both.sampler == EntropyBound(0.0)
    assert SamplerConfig().options(entropy_bound=0.3).sampler == EntropyBound(0.3)
    masks = REFERENCE.options(sampler="low-confidence", threshold=0.7, pace="linear")
    assert (masks.sampler, masks.pace) == (LowConfidence(0.7), LinearPace())
    other = REFERENCE.options(sampler="threshold", threshold=0.7, margin=0.2)
    assert other.sampler == Threshold(0.7, 0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": "euler"}, "sampler: 'euler' is none of entropy-bound, fixed-count, threshold"),
        ({"sampler": "threshold", "entropy_bound": 0.1}, "entropy_bound: belongs to the sampler"),
        ({"entropy_bound": -1.0}, "entropy_bound: must be a number from 0"),
        ({"threshold": 0.5}, "threshold: belongs to the sampler 'threshold' or 'low-confidence'"),
        ({"sampler": "threshold", "threshold": 2.0}, "threshold: must be a number from 0 to 1"),
        ({"pace": "slow"}, "pace: 'slow' is none of even, linear"),
        ({"max_steps": 0}, "max_steps"),
    ],
)
def test_options_refuse_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFERENCE.options(**options)


def test_fixed_steps_never_stop_early() -> None:
    config = fixed_steps(12).over(REFERENCE)
    assert config.max_steps == 12 and config.stopping == Never()
    assert config.sampler == EntropyBound(0.1)


def test_configs_are_values() -> None:
    with pytest.raises(AttributeError):
        SamplerConfig().max_steps = 3  # type: ignore[misc]
    assert SamplerConfig(processors=(LogitBias({1: 2.0}),)) != SamplerConfig()
