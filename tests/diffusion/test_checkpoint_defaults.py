from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.gguf_files import gguf_config, random_state, write_gguf

from sfumato.convert.files import config_files
from sfumato.diffusion import checkpoint_defaults as module
from sfumato.diffusion.checkpoint_defaults import (
    checkpoint_defaults,
    defaults_from_gguf,
    defaults_from_hf,
    defaults_to_gguf,
    defaults_to_hf,
)
from sfumato.diffusion.sampler import (
    EntropyBound,
    LinearPace,
    LinearTemperature,
    LowConfidence,
    StableAndConfident,
)
from sfumato.diffusion.sampler_config import MASKS, REFERENCE, SamplerConfig
from sfumato.model.families import DIFFUSION_GEMMA, CanvasProcess, SamplerKeys, open_checkpoint
from sfumato.train.recipe import EMBEDDED
from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.gguf import read_gguf

KEYS = DIFFUSION_GEMMA.sampler
OTHER = replace(
    REFERENCE,
    max_steps=7,
    sampler=EntropyBound(0.5),
    schedule=LinearTemperature(0.25, 0.75),
    stopping=StableAndConfident(2, 0.125),
)


def test_both_kinds_of_metadata_say_it_all() -> None:
    for config in (REFERENCE, OTHER):
        assert defaults_from_hf(defaults_to_hf(config, KEYS), KEYS) == config
        assert defaults_from_gguf(defaults_to_gguf(config, KEYS), KEYS) == config


def test_numbers_that_were_float32_are_written_as_people_do() -> None:
    once = replace(REFERENCE, schedule=LinearTemperature(torch.tensor(0.4).item(), 0.8))
    assert defaults_to_hf(once, KEYS) == defaults_to_hf(REFERENCE, KEYS)


HF = {
    "max_new_tokens": 256,
    "max_denoising_steps": 30,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.25},
    "t_min": 0.3,
    "t_max": 0.9,
    "stability_threshold": 2,
    "confidence_threshold": 0.01,
}
EXPECTED = SamplerConfig(
    max_steps=30,
    sampler=EntropyBound(0.25),
    schedule=LinearTemperature(0.3, 0.9),
    stopping=StableAndConfident(2, 0.01),
)


def test_defaults_from_generation_config() -> None:
    assert defaults_from_hf(HF, KEYS) == EXPECTED  # max_new_tokens is no choice of the sampler
    assert defaults_from_hf({}, KEYS) == REFERENCE
    assert defaults_from_hf({"t_max": None, "sampler_config": None}, KEYS) == REFERENCE
    assert defaults_from_hf({"t_min": 0}, KEYS).schedule == LinearTemperature(0, 0.8)


def test_what_is_written_reads_back() -> None:
    files = config_files(DIFFUSION_GEMMA, EMBEDDED, REFERENCE, EMBEDDED.eos_ids)
    written = json.loads(json.dumps(files["generation_config.json"]))
    assert defaults_from_hf(written, KEYS) == REFERENCE


def test_defaults_from_gguf_keys(tmp_path: Path) -> None:
    keys = {
        "eb_max_steps": 30,
        "eb_entropy_bound": 0.25,
        "eb_t_min": 0.5,
        "eb_t_max": 0.75,
        "eb_stability_threshold": 2,
        "eb_confidence_threshold": 0.0078125,
    }
    config = gguf_config()
    path = tmp_path / "tiny.gguf"
    extra = {f"diffusion.{key}": value for key, value in keys.items()}
    write_gguf(path, random_state(config), config, extra=extra)
    expected = SamplerConfig(
        max_steps=30,
        sampler=EntropyBound(0.25),
        schedule=LinearTemperature(0.5, 0.75),
        stopping=StableAndConfident(2, 0.0078125),
    )
    assert defaults_from_gguf(read_gguf(path).metadata, KEYS) == expected
    assert defaults_from_gguf({}, KEYS) == REFERENCE


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("t_min", "0.4", "generation_config.json: t_min: must be a number, got '0.4'"),
        ("max_denoising_steps", True, "max_denoising_steps: must be a number, got True"),
        ("max_denoising_steps", 4.5, "max_steps: must be a whole number from 1 to 4096, got 4.5"),
        ("sampler_config", [0.1], "sampler_config: must be an object"),
        ("sampler_config", [], r"sampler_config: must be an object, got \[\]"),
        ("sampler_config", 0, "sampler_config: must be an object, got 0"),
        ("sampler_config", {"entropy_bound": "x"}, "entropy_bound: must be a number"),
        ("stability_threshold", -1, "stability: must be"),
        ("stability_threshold", 10**15, "stability: must be"),
        ("max_denoising_steps", 10**15, "max_steps: must be a whole number from 1 to"),
        ("t_min", 2.0, "t_min <= t_max"),
    ],
)
def test_a_bad_generation_config_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        defaults_from_hf(HF | {field: value}, KEYS)


def test_bad_gguf_keys_are_refused() -> None:
    message = r"GGUF metadata: diffusion\.eb_t_max: must be a number, got 'hot'"
    with pytest.raises(CheckpointError, match=message):
        defaults_from_gguf({"diffusion.eb_t_max": "hot"}, KEYS)


def test_defaults_of_a_canvas_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = gguf_config()
    write_gguf(tmp_path / "tiny.gguf", random_state(config), config)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    assert checkpoint_defaults(checkpoint) == REFERENCE
    keys = SamplerKeys({"max_steps": "steps"}, {"threshold": "t"}, "", "", ())
    masks = CanvasProcess("mask", False, threshold=1.0, pace="linear")
    other = replace(DIFFUSION_GEMMA, canvas=masks, sampler=keys)
    monkeypatch.setattr(module, "family_of", lambda checkpoint: other)
    expected = replace(MASKS, sampler=LowConfidence(1.0), pace=LinearPace())
    steps = replace(expected, max_steps=config.canvas_length)
    assert checkpoint_defaults(checkpoint) == steps
    assert defaults_from_hf({"steps": 7}, keys, steps) == replace(expected, max_steps=7)
    surer = replace(steps, sampler=LowConfidence(0.5))
    assert defaults_from_gguf({"t": 0.5}, keys, steps) == surer
    assert defaults_to_gguf(surer, keys) == {"t": 0.5}
    assert defaults_to_hf(surer, keys) == {"steps": config.canvas_length}
    with pytest.raises(CheckpointError, match="threshold: must be"):
        defaults_from_gguf({"t": 2.0}, keys, steps)
    other = replace(DIFFUSION_GEMMA, canvas=CanvasProcess("uniform", False))
    monkeypatch.setattr(module, "family_of", lambda checkpoint: other)
    assert checkpoint_defaults(checkpoint) == replace(REFERENCE, self_conditioning=False)
