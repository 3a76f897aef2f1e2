"""What is said of the published model: predicted from its shapes, and the same in every place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from docs import tables

from sfumato import catalog, hub
from sfumato.bench.subject import random_checkpoint
from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.memory.estimate import ModelFootprint, predict
from sfumato.model.families import FAMILIES
from sfumato.model.loading import config_of
from sfumato.model.placement import pick_dtype

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("entry", catalog.PUBLISHED[:-1], ids=lambda entry: entry.format)
def test_sizes_and_memory_are_those_of_the_shapes(entry: catalog.Published) -> None:
    """Compiled operations pack weights, and take up to a tenth more than others."""
    checkpoint = random_checkpoint("26b-a4b", entry.format.lower())
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert stored == pytest.approx(entry.nbytes, rel=0.01)
    cpu, config = torch.device("cpu"), config_of(checkpoint)
    dtype = pick_dtype("auto", checkpoint, cpu)
    footprint = ModelFootprint.of_checkpoint(checkpoint, config, cpu, dtype)
    need = predict(footprint, EngineConfig(slots=1, context=4096, snapshot_bytes=0)).total
    assert need == pytest.approx(entry.memory, rel=0.08)


def test_the_advice_fits_a_terminal() -> None:
    assert max(map(len, catalog.advice().splitlines())) <= 80


def test_the_page_of_performance_has_the_table() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert tables.models() in text, "paste what `python docs/tables.py models` prints"


def test_the_docs_have_the_catalogue() -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert tables.catalogue() in text, "paste what `python docs/tables.py catalogue` prints"


def test_every_name_is_one_that_pull_takes() -> None:
    """The names are in lower case and no paths, and no two are the same files."""
    entries = catalog.CATALOGUE.values()
    assert len(entries) == len(catalog.SMALL) + len(catalog.PUBLISHED)
    for entry in entries:
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]+", entry.name)
        assert hub.parse(entry.name) == hub.Reference(entry.repo, entry.file)
        assert catalog.find(entry.repo, entry.file) is entry
        assert entry.needs("q4_k") <= entry.needs("q8_0") <= entry.needs()
    assert not catalog.is_name("embedded") and not catalog.is_name("model.gguf")


def test_every_model_is_of_a_family() -> None:
    readable = {family.model_type for family in FAMILIES}
    assert {entry.model_type for entry in catalog.CATALOGUE.values()} <= readable


def test_sizes_follow_from_the_shapes_of_qwen3() -> None:
    """Parameters of (layers, hidden, heads, intermediate, experts, vocabulary's matrices)."""
    shapes = {
        "qwen3-0.6b-diffusion": (28, 1024, 16, 3072, 1, 2),
        "sdar-1.7b": (28, 2048, 16, 6144, 1, 2),
        "sdar-4b": (36, 2560, 32, 9728, 1, 2),
        "sdar-8b": (36, 4096, 32, 12288, 1, 2),
        "sdar-30b-a3b": (48, 2048, 32, 768, 128, 2),
    }
    for name, (layers, hidden, heads, wide, experts, embeddings) in shapes.items():
        cached = 4 if experts > 1 else 8  # heads of keys
        attention = hidden * 128 * (2 * heads + 2 * cached)
        layer = attention + 3 * hidden * wide * experts
        parameters = layers * layer + embeddings * 151936 * hidden
        assert catalog.CATALOGUE[name].nbytes == pytest.approx(2 * parameters, rel=0.02), name


def test_figures_are_those_of_the_performance_page() -> None:
    """The one that is called measured."""
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    (measured,) = (entry for entry in catalog.PUBLISHED if entry.measured)
    assert "| a step | 5.96 s median" in text
    assert measured.step_s == pytest.approx(5.96, abs=0.05)


def test_a_file_is_found_by_its_repository() -> None:
    entry = catalog.PUBLISHED[0]
    assert catalog.find(entry.repo, entry.file) is entry
    assert catalog.find(entry.repo, "other.gguf") is None
    assert catalog.find(catalog.SAFETENSORS, "model-00001-of-00011.safetensors") is not None
