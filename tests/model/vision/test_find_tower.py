"""Which vision tower a model is loaded with: a given one, one beside it, or its own."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.pictures import picture
from tests.support.seeing_model import seeing_model, with_markers
from tests.support.vision_oracle import random_vision

import sfumato
from sfumato.convert import convert
from sfumato.model.model_config import ConfigError
from sfumato.model.vision.loading import fits_float16, load_tower, open_mmproj
from sfumato.refused import Refused
from sfumato.weights.checkpoint import towers_among
from sfumato.weights.errors import CheckpointError
from sfumato.weights.formats import QuantizedTensor

HIDDEN = 128  # of the embedded model
IMAGE = [{"type": "image", "image": picture(40, 40)}, {"type": "text", "text": "Which digit?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded text network with a random tower, whose tokenizer has the family's picture."""
    folder = tmp_path_factory.mktemp("own") / "model"
    seeing_model(folder)
    return with_markers(folder)


@pytest.fixture(scope="module")
def gguf(folder: Path) -> Path:
    """The same as a GGUF file, which has no tower."""
    return convert(folder, folder.parent / "text.gguf", "f32").path


@pytest.fixture
def model(gguf: Path, tmp_path: Path) -> Path:
    """The GGUF file in a folder of its own."""
    os.link(gguf, tmp_path / "model.gguf")
    return tmp_path / "model.gguf"


@pytest.fixture(scope="module")
def mmproj(folder: Path) -> Path:
    return convert(folder, folder.parent / "mmproj-text.gguf", "f32").path


def test_the_tower_beside_a_gguf_file_is_found(folder: Path, model: Path, mmproj: Path) -> None:
    assert sfumato.load(model).network.tower is None
    os.link(mmproj, model.parent / "mmproj-F32.gguf")
    seeing, own = sfumato.load(model), sfumato.load(folder)
    assert (seeing.cut, seeing.text.pictures) == (own.cut, own.text.pictures)
    messages = [{"role": "user", "content": IMAGE}]
    prompt = seeing.make_prompt(messages=messages)
    assert prompt.ids == own.make_prompt(messages=messages).ids
    (placed,) = prompt.pictures
    pixels = torch.from_numpy(placed.patches.values())
    soft = [m.network.soft_tokens(pixels, placed.patches.columns) for m in (seeing, own)]
    assert torch.equal(*soft)
    assert seeing.generate(messages=messages, max_tokens=8).token_ids
    blind = sfumato.load(model, mmproj="none")
    with pytest.raises(Refused, match="reads no pictures; load its mmproj file too"):
        assert blind.cut


def test_that_of_a_folder_is_found_too(model: Path, mmproj: Path) -> None:
    os.link(mmproj, model.parent / "vision.MMPROJ.GGUF")
    assert sfumato.load(model.parent).network.tower is not None


def test_several_are_chosen_by_format() -> None:
    names = ["mmproj-F32.gguf", "b-mmproj.gguf", "mmproj-Q8_0.gguf", "mmproj-F16.gguf"]
    names += ["model-bf16.gguf", "mmproj-BF16.gguf", "mmproj-BF16.txt"]
    assert towers_among(names) == [
        *("mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-Q8_0.gguf"),
        *("b-mmproj.gguf", "mmproj-F32.gguf"),
    ]


def test_one_of_another_model_is_passed_over(
    model: Path, mmproj: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder may hold many models: what is beside a file stops no load, and one line says why."""
    random_vision(64).write_mmproj(model.parent / "mmproj-BF16.gguf")
    (model.parent / "mmproj-F16.gguf").write_bytes(b"GGUF broken")
    assert sfumato.load(model).network.tower is None
    (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert "no pictures are read: " in record.message
    assert "mmproj-BF16.gguf: its soft tokens are 64 wide" in record.message
    caplog.clear()
    os.link(mmproj, model.parent / "mmproj-F32.gguf")
    assert sfumato.load(model).network.tower is not None
    assert not [r for r in caplog.records if r.levelno == logging.WARNING]


def test_a_given_file_must_fit(model: Path, folder: Path, mmproj: Path, tmp_path: Path) -> None:
    random_vision(64).write_mmproj(tmp_path / "other.gguf")
    metadata = {"clip.projector_type": "gemma4uv"}
    random_vision(HIDDEN).write_mmproj(tmp_path / "uv.gguf", metadata=metadata)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (tmp_path / "other.gguf", ConfigError, f"64 wide and the model is {HIDDEN} wide"),
        (tmp_path / "uv.gguf", ConfigError, r"gemma4uv.*\(a model without a vision tower\)"),
        (model, ConfigError, "clip.projector_type is null"),
        (tmp_path, CheckpointError, "is not a regular file"),
        (tmp_path / "absent.gguf", CheckpointError, "absent.gguf: does not exist"),
        ("", Refused, "mmproj: must name a GGUF file"),
        (7, Refused, "mmproj: must name a GGUF file"),
    ]
    for given, kind, words in wrong:
        with pytest.raises(kind, match=words):
            sfumato.load(model, mmproj=given)
    with pytest.raises(CheckpointError, match=r"holds a vision tower and no model.*--mmproj"):
        sfumato.load(mmproj)
    blind = shutil.copytree(Path(sfumato.__file__).parent / "embedded", tmp_path / "blind")
    config = json.loads((blind / "config.json").read_text())
    del config["image_token_id"]
    (blind / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match="mmproj: the model's tokenizer has no token for a picture"):
        sfumato.load(blind, mmproj=mmproj)
    with pytest.raises(Refused, match="image_mask: 'all' is none of model, transformers"):
        sfumato.load(folder, image_mask="all")  # type: ignore[arg-type]


def test_a_tower_of_few_positions_gets_no_wider_pictures(folder: Path, tmp_path: Path) -> None:
    oracle = random_vision(HIDDEN, position_embedding_size=16)
    oracle.write_mmproj(tmp_path / "few.gguf")
    model = sfumato.load(folder, mmproj=tmp_path / "few.gguf")
    wide = [{"type": "image", "image": picture(400, 4)}, {"type": "text", "text": "What?"}]
    (placed,) = model.make_prompt(messages=[{"role": "user", "content": wide}]).pictures
    pixels = torch.from_numpy(placed.patches.values())
    assert len(model.network.soft_tokens(pixels, placed.patches.columns)) == 5
    random_vision(HIDDEN, position_embedding_size=2).write_mmproj(tmp_path / "fewer.gguf")
    with pytest.raises(ConfigError, match="2 positions, fewer than a soft token has patches"):
        sfumato.load(folder, mmproj=tmp_path / "fewer.gguf")


def test_a_given_file_takes_the_place_of_the_own_tower(folder: Path, tmp_path: Path) -> None:
    random_vision(HIDDEN, hidden_size=64).write_mmproj(tmp_path / "mmproj.gguf")
    model = sfumato.load(folder, mmproj=tmp_path / "mmproj.gguf", image_mask="transformers")
    assert model.network.tower is not None and model.network.tower.config.hidden_size == 64
    assert model.network.image_mask == "transformers"


def test_weights_that_are_quantized_stay_so(model: Path, folder: Path) -> None:
    path = convert(folder, model.parent / "mmproj-Q8_0.gguf", "q8_0").path
    config, opened = open_mmproj(path, HIDDEN)
    tower = load_tower(config, opened, torch.device("cpu"), torch.float32)
    assert isinstance(tower.blocks[0].mlp.up_proj.weight, QuantizedTensor)
    assert sfumato.load(model).network.tower is not None


def test_a_gpu_tests_its_kernels_for_the_formats_of_the_tower(
    mmproj: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[tuple[Any, ...]] = []
    config, opened = open_mmproj(mmproj, HIDDEN)
    loading = "sfumato.model.vision.loading"
    monkeypatch.setattr(f"{loading}.gpu", SimpleNamespace(is_gpu=lambda device: True))
    monkeypatch.setattr(f"{loading}.ops.prepare", lambda *given: prepared.append(given))
    tower = load_tower(config, opened, torch.device("cpu"), torch.float32)
    ((device, sizes, formats),) = prepared
    assert (device, formats) == (torch.device("cpu"), frozenset({"F32"}))
    layer = tower.blocks[0]
    for matrix in (layer.self_attn.q_proj, layer.mlp.gate_proj, layer.mlp.down_proj):
        assert tuple(matrix.weight.shape) in sizes.products


def test_a_checkpoint_that_was_saved_without_its_tower_loads(gguf: Path, tmp_path: Path) -> None:
    """Its config.json has a tower's shape all the same."""
    os.link(gguf, tmp_path / "text.gguf")
    done = convert(tmp_path / "text.gguf", tmp_path / "folder")
    assert sfumato.load(done.path).network.tower is None


def test_the_identity_and_the_files_are_those_of_the_tower_too(
    model: Path, mmproj: Path, folder: Path
) -> None:
    blind = sfumato.load(model)
    copied = Path(shutil.copy(mmproj, model.parent / "mmproj.gguf"))
    seeing, other = sfumato.load(model), sfumato.load(model, image_mask="transformers")
    assert blind.identity.pictures == "" != seeing.identity.pictures != other.identity.pictures
    assert blind.identity == seeing.identity  # of what answers about text depend on
    assert seeing.network.files.truncated() is None
    os.truncate(copied, copied.stat().st_size - 1)
    assert seeing.network.files.truncated() == copied


def test_float16_is_tried(folder: Path, mmproj: Path) -> None:
    opened = open_mmproj(mmproj, HIDDEN)
    tower = load_tower(*opened, torch.device("cpu"), torch.float16)
    assert fits_float16(tower)
    tower.blocks[-1].mlp.down_proj.weight.mul_(1e5)
    assert not fits_float16(tower)
