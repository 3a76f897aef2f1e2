"""Many schemas: every reply that stops is valid. A random model writes nonsense, and is held."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.random_model import random_model
from tests.support.random_schemas import is_valid, random_schema

import sfumato
from sfumato.api import Model
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.text.tokenizer import Tokenizer
from sfumato.weights.gguf import read_gguf

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = ROOT.parent / "shared" / "fixtures" / "ggml-vocab-gemma-4.gguf"
SUITE = os.environ.get("JSON_SCHEMA_TEST_SUITE", "")
QUICK = replace(REFERENCE, max_steps=2)


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(defaults=QUICK)


@pytest.mark.parametrize("seed", range(20))
def test_a_schema(model: Model, seed: int) -> None:
    schema = random_schema(seed)
    reply = model.generate("x", schema=schema, max_tokens=128, seed=seed)
    assert reply.stop_reason == "eos" and is_valid(schema, reply.text), (schema, reply.text)


def held(model: Model, schema: Any, max_tokens: int, seed: int) -> str:
    """ "stop", "length", or the beginning of a refusal. Fails where a stop is not valid."""
    try:
        reply = model.generate("x", schema=schema, max_tokens=max_tokens, seed=seed)
    except ValueError as error:
        return str(error)[:60]
    if reply.stop_reason != "eos":
        return "length"
    assert is_valid(schema, reply.text), (schema, reply.text)
    return "stop"


def real_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf(VOCABULARY).metadata)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "embedded", "real vocabulary"])
def test_two_hundred_schemas(kind: str, note: Callable[[str], None]) -> None:
    """Three seeds of each with the random model; of the others a part."""
    if kind == "embedded":
        model, every = sfumato.load(), 10
    elif kind == "random":
        model, every = random_model(defaults=QUICK), 1
    else:
        if not VOCABULARY.exists():
            pytest.skip("needs the vocabulary of the published checkpoint")
        model, every = random_model(text=real_tokenizer(), defaults=QUICK, end_ids=(1, 106)), 10
    counts = Counter(
        held(model, random_schema(number), 1024, seed)
        for number in range(0, 200, every)
        for seed in range(3)
    )
    note(f"{kind}: {dict(counts)}")
    assert counts["stop"] >= 0.95 * (counts["stop"] + counts["length"])


def suite() -> Iterator[Any]:
    """The schemas of the public suite for draft 2020-12."""
    for path in sorted((Path(SUITE) / "tests" / "draft2020-12").glob("*.json")):
        yield from (group["schema"] for group in json.loads(path.read_text()))


@pytest.mark.slow
@pytest.mark.skipif(not SUITE, reason="JSON_SCHEMA_TEST_SUITE names no folder")
def test_the_public_suite(model: Model, note: Callable[[str], None]) -> None:
    """The first hundred that compile; what is refused is counted by its reason."""
    counts: Counter[str] = Counter()
    for number, schema in enumerate(suite()):
        counts[held(model, schema, 192, number)] += 1
        if counts["stop"] + counts["length"] == 100:
            break
    note(f"draft 2020-12: {dict(counts)}")
    assert counts["stop"] + counts["length"] >= 100
