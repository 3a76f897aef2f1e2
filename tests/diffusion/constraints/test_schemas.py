"""Many schemas: every reply that stops is valid. A random model writes nonsense, and is held."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.random_model import random_model
from tests.support.random_schemas import is_valid, random_schema

from sfumato.api import Model
from sfumato.diffusion.sampler_config import REFERENCE

QUICK = replace(REFERENCE, max_steps=2)


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(defaults=QUICK)


@pytest.mark.parametrize("seed", range(20))
def test_a_schema(model: Model, seed: int) -> None:
    schema = random_schema(seed)
    reply = model.generate("x", schema=schema, max_tokens=128, seed=seed)
    assert reply.stop_reason == "eos" and is_valid(schema, reply.text), (schema, reply.text)
