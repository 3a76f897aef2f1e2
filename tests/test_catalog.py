"""What is said of the published model: predicted from its shapes, and the same in every place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from docs import tables

from sfumato import catalog
from sfumato.bench.subject import random_checkpoint
from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.memory.estimate import ModelFootprint, predict
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


def test_the_readme_has_the_table() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tables.models() in text, "README.md: paste what `python docs/tables.py models` prints"


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
