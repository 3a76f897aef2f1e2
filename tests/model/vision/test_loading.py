"""What checkpoints and mmproj files say of a tower, and what is refused of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.oracle import tiny_config
from tests.support.vision_oracle import mmproj_name, random_vision

from sfumato.model.families import open_checkpoint
from sfumato.model.model_config import ConfigError
from sfumato.model.vision.config import VisionConfig, vision_from_hf
from sfumato.model.vision.loading import (
    load_tower,
    of_gguf,
    of_transformers,
    open_mmproj,
    open_tower,
)
from sfumato.weights.errors import CheckpointError

PUBLISHED: dict[str, Any] = {
    # vision_config of google/diffusiongemma-26B-A4B-it, what transformers adds to any left out
    "attention_bias": False,
    "attention_dropout": 0.0,
    "default_output_length": 280,
    "dtype": "bfloat16",
    "global_head_dim": 72,
    "head_dim": 72,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 4304,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_vision",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "standardize": True,
    "use_clipped_linears": False,
}
SIZES = "clip.vision.embedding_length", "clip.vision.feed_forward_length"
REAL = VisionConfig(1152, 4304, 27, 16, 16, 72, 16, 3, 10240, 2816, standardizes=True)


def test_the_published_config_is_read() -> None:
    assert vision_from_hf({"vision_config": PUBLISHED}, 2816) == REAL
    assert vision_from_hf({"vision_config": None}, 2816) is None
    assert vision_from_hf({}, 2816) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"num_hidden_layers": 1 << 20}, "no real checkpoint"),
        ({"num_key_value_heads": 5}, "cannot share 5"),
        ({"head_dim": 74}, "multiple of 4"),
        ({"patch_size": 1 << 20}, "no real checkpoint"),
        ({"standardize": "yes"}, "standardize is 'yes', not true or false"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type is 'linear'"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
        ({"rope_parameters": []}, "rope_parameters"),
        ({"model_type": "gemma4_unified_vision"}, "model_type is 'gemma4_unified_vision'"),
        ({"rms_norm_eps": 1.0}, "rms_norm_eps"),
    ],
)
def test_what_a_config_cannot_say(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vision_from_hf({"vision_config": PUBLISHED | change}, 2816)


@pytest.mark.parametrize("clamps", [False, True])
def test_both_files_say_one_config(clamps: bool, tmp_path: Path) -> None:
    oracle = random_vision(num_key_value_heads=2, use_clipped_linears=clamps, standardize=clamps)
    opened = open_tower(open_checkpoint(oracle.save(tmp_path)), 32)
    oracle.write_mmproj(tmp_path / "mmproj.gguf")
    config, _ = open_mmproj(tmp_path / "mmproj.gguf", 32)
    assert opened is not None and opened[0] == config
    assert config.clamps is config.standardizes is clamps


def test_a_checkpoint_without_a_tower(tmp_path: Path) -> None:
    values = tiny_config().to_dict() | {"vision_config": None}
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file({"model.decoder.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    assert open_tower(open_checkpoint(tmp_path), 64) is None


def test_names_are_those_of_the_gguf_package() -> None:
    oracle = random_vision(use_clipped_linears=True)
    state = oracle.state()
    canonical = [of_transformers(name) for name in state]
    assert None not in canonical and len(set(canonical)) == len(state)
    assert [of_gguf(mmproj_name(name, 2)) for name in state] == canonical


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("v.blk.1.ffn_up", r"1 missing: layers\.1\.mlp\.up_proj\.weight"),
        ("v.std_bias", "1 missing: std_bias"),
        ("v.blk.1.", "missing: layers.1.self_attn.q_proj.weight"),
        ("mm.", "projection.weight is missing"),
        ("attn_q_norm", "layers.0.self_attn.q_norm.weight is missing"),
    ],
)
def test_missing_tensors_are_named(left_out: str, message: str, tmp_path: Path) -> None:
    random_vision().write_mmproj(tmp_path / "file", left_out=left_out)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        open_mmproj(tmp_path / "file", 32)


@pytest.mark.parametrize(
    "name",
    [
        "v.blk.2.ln1.weight",
        "v.blk.0.ln3.weight",
        "v.other",
        "mm.0.weight",
        "std_bias",
        "layers.0.mlp.up_proj.weight",
        "blk.0.ln1.weight",
    ],
)
def test_tensors_that_are_left_over_are_named(name: str, tmp_path: Path) -> None:
    random_vision().write_mmproj(tmp_path / "file", added={name: torch.ones(32)})
    with pytest.raises(CheckpointError, match=f"1 left over: {name}"):
        open_mmproj(tmp_path / "file", 32)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"clip.projector_type": "gemma4uv"}, "'gemma4uv' .a model without a vision tower"),
        ({"clip.projector_type": [1, 2]}, "only 'gemma4v'"),
        ({"clip.projector_type": 3}, "only 'gemma4v'"),
        ({"clip.vision.block_count": "many"}, "block_count is 'many'"),
        ({"clip.projector_type": "gemma3"}, "'gemma3'; only 'gemma4v'"),
        ({"clip.vision.block_count": 500}, "tensors of a vision tower of 500 layers"),
        ({"clip.vision.block_count": 1 << 20}, "no real checkpoint"),
        ({"clip.vision.patch_size": 8}, "wrongly shaped: patch_embedding.weight"),
        ({"clip.vision.attention.head_count": 8}, "wrongly shaped"),
        ({"clip.vision.embedding_length": 64}, "wrongly shaped"),
        (dict.fromkeys(SIZES, (1 << 31) - 1), "2147483647 wide; that is no real checkpoint"),
        (dict.fromkeys(SIZES, 1 << 20), "wrongly shaped"),
    ],
)
def test_metadata_that_do_not_fit(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    random_vision().write_mmproj(tmp_path / "file", metadata=metadata)
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        open_mmproj(tmp_path / "file", 32)
    assert str(tmp_path / "file") in str(caught.value)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    random_vision(text_size=64).write_mmproj(tmp_path / "file")
    with pytest.raises(ConfigError, match="64 wide and the model is 32 wide"):
        open_mmproj(tmp_path / "file", 32)


def test_missing_tensors_of_a_checkpoint_are_named(tmp_path: Path) -> None:
    oracle = random_vision()
    checkpoint = open_checkpoint(oracle.save(tmp_path))
    name = "model.encoder.vision_tower.std_scale"
    less = {key: info for key, info in checkpoint.vision.items() if key != name}
    with pytest.raises(CheckpointError, match="1 missing: std_scale"):
        open_tower(replace(checkpoint, vision=less), 32)
    more = dict(checkpoint.vision) | {name + "s": checkpoint.vision[name]}
    with pytest.raises(CheckpointError, match="1 left over"):
        open_tower(replace(checkpoint, vision=more), 32)


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(random_vision().save(tmp_path))
    name = "model.encoder.vision_tower.encoder.layers.0.mlp.up_proj"
    info = replace(checkpoint.vision[f"{name}.linear.weight"], name=f"{name}.weight")
    twice = dict(checkpoint.vision) | {f"{name}.weight": info}
    with pytest.raises(CheckpointError, match="holds the same as"):
        open_tower(replace(checkpoint, vision=twice), 32)


def test_a_tower_takes_the_memory_of_its_files(tmp_path: Path) -> None:
    """Floats of the wanted dtype are views of the mapped file."""
    oracle = random_vision()
    opened = open_tower(open_checkpoint(oracle.save(tmp_path)), 32)
    assert opened is not None
    tower = load_tower(*opened, torch.device("cpu"), torch.float32)
    file = next(iter(opened[1].files.values()))
    address, end = file.address, file.address + len(file.mapping)
    assert all(address <= p.data_ptr() < end for p in tower.parameters())
