"""Narrow checkpoints load, run, and become GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.narrow_files import LAYOUTS, narrow_tensors, write_narrow

import sfumato
from sfumato.bench.evaluate import evaluate
from sfumato.catalog import EMBEDDED
from sfumato.convert import convert
from sfumato.engine.memory.estimate import ModelFootprint
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import config_of
from sfumato.model.placement import pick_dtype
from sfumato.model.quantization import quantized_on_load
from sfumato.train.embedded_data import evaluation_sets
from sfumato.weights.errors import CheckpointError
from sfumato.weights.formats import QuantizedTensor
from sfumato.weights.joined import JoinedTensor

CPU = torch.device("cpu")
BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
BESIDE += ("generation_config.json",)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The embedded model in every layout."""
    source = open_checkpoint(EMBEDDED)
    state = {name: source.read(name).float() for name in source.tensors}
    config = json.loads((EMBEDDED / "config.json").read_text())
    folders = {}
    for name, layout in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name)
        folders[name] = write_narrow(folder, narrow_tensors(state, layout), layout, config)
        for file in BESIDE:
            (folder / file).write_bytes((EMBEDDED / file).read_bytes())
    return folders


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_the_embedded_model_solves_its_tasks_in_every_format(
    narrow: dict[str, Path], name: str
) -> None:
    """A sample; docs/conversion.md has the figures of all tasks."""
    model = sfumato.load(narrow[name])
    sets = evaluation_sets(count=4)
    right = sum(evaluate(model, sets[kind][:4]).exact for kind in ("sudoku", "questions"))
    assert right >= 2 - 0.25  # one of eight may fail


@pytest.mark.parametrize(
    ("name", "block"), [(name, "Q4_0" if name == "int4" else "Q8_0") for name in LAYOUTS]
)
def test_the_nearest_gguf_file_is_what_loading_makes(
    narrow: dict[str, Path], tmp_path: Path, name: str, block: str
) -> None:
    done = convert(narrow[name], tmp_path / "model.gguf")
    assert done.target == "nearest"
    assert not [note for note in done.notes if "errors add" in note]
    source, made = open_checkpoint(narrow[name]), open_checkpoint(tmp_path / "model.gguf")
    infos = source.tensors.items()
    formats = {made.tensors[name].format for name, i in infos if isinstance(i, JoinedTensor)}
    assert block in formats
    for tensor in source.tensors:
        ours, theirs = source.read(tensor), made.read(tensor)
        if isinstance(ours, QuantizedTensor):
            assert isinstance(theirs, QuantizedTensor)
            assert torch.equal(ours.data, theirs.data)
        else:
            assert isinstance(theirs, torch.Tensor)
            assert torch.equal(ours.float(), theirs.float())
    replies = [sfumato.load(p).generate("Hi", max_tokens=32) for p in (narrow[name], made.path)]
    assert replies[0].text == replies[1].text


@pytest.mark.parametrize("to", [None, "q5_0"])
def test_a_bad_scale_is_named_and_leaves_no_file(tmp_path: Path, to: str | None) -> None:
    source = open_checkpoint(EMBEDDED)
    state = {name: source.read(name).float() for name in source.tensors}
    tensors = narrow_tensors(state, LAYOUTS["fp8"])
    name = next(name for name in tensors if name.endswith("experts.3.down_proj.weight_scale"))
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    config = json.loads((EMBEDDED / "config.json").read_text())
    folder = write_narrow(tmp_path / "source", tensors, LAYOUTS["fp8"], config)
    for file in BESIDE:
        (folder / file).write_bytes((EMBEDDED / file).read_bytes())
    with pytest.raises(CheckpointError, match=f"tensor '{name}' holds NaN or infinity"):
        convert(folder, tmp_path / "model.gguf", to)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_other_targets_begin_with_the_exact_values(narrow: dict[str, Path], tmp_path: Path) -> None:
    """And not with the blocks that loading would make."""
    done = convert(narrow["fp8"], tmp_path / "model.gguf", "q5_0")
    assert done.target == "q5_0"
    convert(narrow["fp8"], tmp_path / "wide.gguf", "f32")
    convert(tmp_path / "wide.gguf", tmp_path / "other.gguf", "q5_0")
    ours, theirs = open_checkpoint(done.path), open_checkpoint(tmp_path / "other.gguf")
    name = "layers.0.self_attn.q_proj.weight"
    assert torch.equal(ours.read(name).data, theirs.read(name).data)
    with pytest.raises(ValueError, match="--to: 'nearest' is for narrow checkpoints to GGUF"):
        convert(tmp_path / "wide.gguf", tmp_path / "x.gguf", "nearest")
    with pytest.raises(ValueError, match=r"both are safetensors; give a name that ends in .gguf"):
        convert(narrow["fp8"], tmp_path / "folder")


def test_memory_is_predicted_as_it_is_loaded(narrow: dict[str, Path]) -> None:
    for name, to in (("fp8", None), ("int4", "q8_0")):
        checkpoint = open_checkpoint(narrow[name])
        if to is not None:
            checkpoint = quantized_on_load(checkpoint, to, CPU)
        dtype = pick_dtype("auto", checkpoint, CPU)
        predicted = ModelFootprint.of_checkpoint(checkpoint, config_of(checkpoint), CPU, dtype)
        loaded = sfumato.load(narrow[name], device="cpu", quantize=to)
        assert predicted.dtype == loaded.network.dtype == torch.float32
        assert predicted.weights == ModelFootprint.of_network(loaded.network).weights
