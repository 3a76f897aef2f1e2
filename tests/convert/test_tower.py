"""Vision towers as mmproj files, against those of the `gguf` package, and as safetensors again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tests.support.vision_oracle import random_vision

import sfumato
from sfumato.catalog import EMBEDDED
from sfumato.convert import convert
from sfumato.model.vision.config import VisionConfig, vision_from_gguf, vision_to_gguf
from sfumato.model.vision.loading import open_mmproj
from sfumato.train import recipe


@pytest.mark.parametrize("clamps", [False, True])
def test_an_mmproj_file_is_the_one_that_others_write(clamps: bool, tmp_path: Path) -> None:
    oracle = random_vision(32, use_clipped_linears=clamps)
    oracle.write_mmproj(tmp_path / "theirs.gguf")
    done = convert(tmp_path / "theirs.gguf", tmp_path / "mmproj.gguf", "f32")
    theirs, ours = (gguf.GGUFReader(p) for p in (tmp_path / "theirs.gguf", done.path))
    of_theirs, of_ours = ({t.name: t.data for t in file.tensors} for file in (theirs, ours))
    assert of_theirs.keys() == of_ours.keys()
    for name, data in of_theirs.items():
        assert data.shape == of_ours[name].shape and (data == of_ours[name]).all(), name
    for key in theirs.fields.keys() - {"general.architecture"}:
        if key.startswith("clip.") and key != "clip.vision.image_size":
            assert theirs.fields[key].contents() == ours.fields[key].contents(), key


def test_a_tower_of_safetensors_goes_to_mmproj_and_back(tmp_path: Path) -> None:
    network = recipe.load_weights(EMBEDDED)
    tower = recipe.new_tower(recipe.TOWER, torch.Generator().manual_seed(1)).requires_grad_(False)
    folder, back = tmp_path / "folder", tmp_path / "back"
    recipe.save_checkpoint(network, folder, tower)
    convert(folder, tmp_path / "model.gguf", "bf16")
    made = convert(folder, tmp_path / "mmproj.gguf")
    assert (made.target, {t.format for t in made.tensors}) == ("bf16", {"BF16", "F32"})
    done = convert(tmp_path / "model.gguf", back)
    assert "the vision tower of mmproj.gguf is written too" in done.notes
    (source, target), configs = (
        [load_file(path / "model.safetensors") for path in (folder, back)],
        [json.loads((path / "config.json").read_text()) for path in (folder, back)],
    )
    assert source.keys() == target.keys()
    assert all(torch.equal(value, target[name]) for name, value in source.items())
    assert configs[0]["vision_config"] == configs[1]["vision_config"]


def test_matrices_whose_rows_are_no_blocks_stay_f16(tmp_path: Path) -> None:
    random_vision(32, intermediate_size=48).write_mmproj(tmp_path / "source.gguf")
    done = convert(tmp_path / "source.gguf", tmp_path / "mmproj-Q8_0.gguf", "q8_0")
    formats = {tensor.name: tensor.format for tensor in done.tensors}
    assert formats["v.blk.0.ffn_up.weight"] == "Q8_0"
    assert formats["v.blk.0.ffn_down.weight"] == "F16"  # rows of 48
    assert formats["v.patch_embd.weight"] == formats["v.position_embd.weight"] == "F32"
    assert open_mmproj(done.path, 32)[0] == open_mmproj(tmp_path / "source.gguf", 32)[0]


def test_what_a_file_cannot_say_is_refused(tmp_path: Path) -> None:
    gguf_file = convert(EMBEDDED, tmp_path / "text.gguf", "bf16").path
    wrong: list[tuple[Any, str | None, str]] = [
        (EMBEDDED, "q4_k_m", "--to: 'q4_k_m' is none of bf16, f16, f32, q8_0"),
        (gguf_file, None, "text.gguf: has no vision tower; give an mmproj file, or safetensors"),
    ]
    for source, to, words in wrong:
        with pytest.raises(ValueError, match=words):
            convert(source, tmp_path / "mmproj.gguf", to)
    assert not (tmp_path / "mmproj.gguf").exists()
    shape = VisionConfig(8, 8, 1, 1, 1, 8, 4, 3, 16, 8, rope_theta=10.0)
    with pytest.raises(ValueError, match="rope_theta: 10 is not 100"):
        vision_to_gguf(shape)


def test_the_default_of_soft_tokens_is_kept(tmp_path: Path) -> None:
    network = recipe.load_weights(Path(sfumato.load().path))
    tower = recipe.new_tower(recipe.TOWER, torch.Generator()).requires_grad_(False)
    recipe.save_checkpoint(network, tmp_path / "folder", tower)
    done = convert(tmp_path / "folder", tmp_path / "mmproj.gguf")
    config, _ = open_mmproj(done.path, None)
    assert config.soft_tokens == recipe.TOWER.soft_tokens != 280
    metadata = {"general.architecture": "clip", **vision_to_gguf(config)}
    del metadata["clip.projector_type"]
    with pytest.raises(ValueError, match=r"clip\.projector_type is null"):
        vision_from_gguf(metadata, {})
