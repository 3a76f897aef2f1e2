from __future__ import annotations

from dataclasses import replace

import torch

from sfumato.diffusion.config import REFERENCE, defaults_from_gguf, defaults_from_hf
from sfumato.diffusion.export import to_gguf, to_hf
from sfumato.diffusion.sampler import EntropyBound
from sfumato.diffusion.schedule import LinearTemperature
from sfumato.diffusion.stopping import StableAndConfident

OTHER = replace(
    REFERENCE,
    max_steps=7,
    sampler=EntropyBound(0.5),
    schedule=LinearTemperature(0.25, 0.75),
    stopping=StableAndConfident(2, 0.125),
)


def test_both_kinds_of_metadata_say_it_all() -> None:
    for config in (REFERENCE, OTHER):
        assert defaults_from_hf(to_hf(config)) == config
        assert defaults_from_gguf(to_gguf(config)) == config


def test_numbers_that_were_float32_are_written_as_people_do() -> None:
    once = replace(REFERENCE, schedule=LinearTemperature(torch.tensor(0.4).item(), 0.8))
    assert to_hf(once) == to_hf(REFERENCE)
