"""Whole checkpoints of both kinds: names, values, aliases, and what is wrong with bad ones."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support.gguf_files import gguf_config, random_state, state_shapes, write_gguf
from torch import Tensor

from sfumato.model.families import open_checkpoint
from sfumato.model.families.diffusion_gemma import TENSOR_NAMES
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.errors import CheckpointError
from sfumato.weights.formats import QuantizedTensor

CONFIG = gguf_config()
WIDE = gguf_config(hidden_size=256, intermediate_size=256, expert_size=256)
STATE = random_state(CONFIG)
SHAPES = state_shapes(CONFIG)
ENCODER = "model.encoder.language_model."


def save_folder(
    folder: Path, tensors: Mapping[str, Tensor], shards: int = 1, config: Any = None
) -> Path:
    """A folder as transformers saves it, by the file's names."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "diffusion_gemma"}))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    names = [f"model-{part + 1:05}-of-{shards:05}.safetensors" for part in range(shards)]
    for part, name in enumerate(names):
        save_file(dict(list(tensors.items())[part::shards]), folder / name)
    weight_map = {key: names[place % shards] for place, key in enumerate(tensors)}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def theirs(state: Mapping[str, Tensor] = STATE) -> dict[str, Tensor]:
    return {TENSOR_NAMES.transformers_name(name): tensor for name, tensor in state.items()}


def values(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.read(name)
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.float()


def assert_holds(checkpoint: Checkpoint, state: Mapping[str, Tensor]) -> None:
    assert set(checkpoint.tensors) == set(state)
    for name, tensor in state.items():
        assert checkpoint.tensors[name].shape == tensor.shape
        assert torch.equal(values(checkpoint, name), tensor), name


@pytest.fixture
def refused() -> Callable[[Path, str], None]:
    def refused(path: Path, words: str) -> None:
        started = time.process_time()
        with pytest.raises(CheckpointError, match=words) as caught:
            open_checkpoint(path)
        assert time.process_time() - started < 5
        assert str(path) in str(caught.value)

    return refused


@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors(tmp_path: Path, shards: int) -> None:
    folder = save_folder(tmp_path, theirs(), shards)
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.kind == "safetensors"
    assert_holds(checkpoint, STATE)
    checkpoint.check_tensors(SHAPES)
    assert checkpoint.metadata["config"] == {"model_type": "diffusion_gemma"}
    assert checkpoint.metadata["generation_config"] == {}
    assert not checkpoint.vision


def test_generation_config_is_read(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, theirs())
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    generation = open_checkpoint(folder / "model.safetensors").metadata["generation_config"]
    assert generation == {"eos_token_id": [1, 106]}


def test_tied_copies_serve_only_where_the_decoders_tensor_is_absent(tmp_path: Path) -> None:
    tensors = theirs()
    norm = tensors.pop("model.decoder.norm.weight")
    tensors[f"{ENCODER}norm.weight"] = norm
    embedding = tensors.pop("model.decoder.embed_tokens.weight")
    tensors["lm_head.weight"] = embedding
    tensors[f"{ENCODER}layers.0.router.scale"] = torch.zeros(CONFIG.hidden_size)
    checkpoint = open_checkpoint(save_folder(tmp_path, tensors))
    assert_holds(checkpoint, STATE)
    checkpoint.check_tensors(SHAPES)


def test_vision_is_kept_aside_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vision = {
        "model.encoder.vision_tower.layers.0.weight": torch.ones(2),
        "model.encoder.vision_tower.ids": torch.ones(2, dtype=torch.int64),
        "model.encoder.embed_vision.embedding_projection.weight": torch.ones(2, 2),
    }
    folder = save_folder(tmp_path, theirs() | vision)
    with caplog.at_level(logging.INFO):
        checkpoint = open_checkpoint(folder)
    assert set(checkpoint.vision) == set(vision)
    assert [record.message for record in caplog.records] == [
        f"{folder}: 3 vision tensors are kept aside"
    ]
    checkpoint.check_tensors(SHAPES)


FORMATS: dict[str, dict[str, str]] = {
    "plain": {},
    "bf16": {"*_proj.weight": "BF16", "embed_tokens.weight": "F16"},
    "q8": {"*_proj.weight": "Q8_0", "*experts.*": "Q5_1", "embed_tokens.weight": "Q4_0"},
    "k": {
        "embed_tokens.weight": "Q6_K",
        "*experts.gate_up_proj": "Q4_K",
        "*experts.down_proj": "IQ4_XS",
        "layers.2.mlp.up_proj.weight": "IQ3_XXS",
        "layers.0.mlp.*": "Q2_K",
        "layers.1.mlp.*": "Q3_K",
        "*mlp.*": "Q5_K",
        "self_conditioning.down_proj.weight": "IQ4_NL",
        "self_conditioning.up_proj.weight": "IQ3_S",
        "self_conditioning.*_proj.weight": "Q5_0",
    },
}


@pytest.mark.parametrize("older_names", [False, True])
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_gguf(tmp_path: Path, formats: dict[str, str], older_names: bool) -> None:
    path = tmp_path / "model.gguf"
    held = write_gguf(path, random_state(WIDE), WIDE, formats, older_names=older_names)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.kind == "gguf"
    assert_holds(checkpoint, held)
    checkpoint.check_tensors(state_shapes(WIDE))
    assert {info.format for info in checkpoint.tensors.values()} == {"F32", *formats.values()}
    assert checkpoint.metadata["diffusion-gemma.embedding_length"] == 256
    assert checkpoint.metadata["diffusion-gemma.attention.head_count_kv"].tolist() == [2, 2, 1]


def test_one_expert_of_a_file(tmp_path: Path) -> None:
    formats = {"*experts.gate_up_proj": "Q4_K"}
    held = write_gguf(tmp_path / "model.gguf", random_state(WIDE), WIDE, formats)
    name = "layers.1.experts.gate_up_proj"
    tensor = open_checkpoint(tmp_path).read(name)
    assert isinstance(tensor, QuantizedTensor)
    assert tensor.data.shape == (8, 512, 144)
    assert torch.equal(tensor[5].dequantize(), held[name][5])
    assert torch.equal(tensor[5][256:300].dequantize(), held[name][5, 256:300])


def test_account_names_all_faults_at_once(tmp_path: Path) -> None:
    tensors = theirs()
    del tensors["model.decoder.layers.0.router.scale"]
    tensors["model.decoder.norm.weight"] = torch.ones(3)
    tensors["model.decoder.layers.0.self_attn.q_proj.bias"] = torch.ones(3)
    tensors["elsewhere"] = torch.ones(3)
    checkpoint = open_checkpoint(save_folder(tmp_path, tensors))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_tensors(SHAPES)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "1 missing: layers.0.router.scale;" in message
    assert "2 left over: " in message and "elsewhere" in message
    assert "model.decoder.layers.0.self_attn.q_proj.bias" in message
    shapes = "norm.weight (the file has [3], the config asks for [64])"
    assert f"1 wrongly shaped: {shapes}" in message


def test_account_lists_eight_of_many(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_folder(tmp_path, theirs()))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_tensors({f"tensor{n:03}": (1,) for n in range(100)})
    message = str(caught.value)
    assert "100 missing: tensor000, " in message and "tensor007 and 92 more" in message
    assert "tensor008" not in message
    assert f"{len(SHAPES)} left over: " in message


def other_gguf(path: Path, architecture: str | None, **keys: int) -> None:
    writer = gguf.GGUFWriter(path, architecture or "x")
    if architecture is None:
        writer.kv_data[0].clear()
    for key, value in keys.items():
        writer.add_uint32(key.replace("_", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_other_architectures(tmp_path: Path, refused: Callable[[Path, str], None]) -> None:
    path = tmp_path / "model.gguf"
    other_gguf(path, "llama")
    refused(path, "general.architecture: is 'llama'; give .* 'diffusion-gemma'")
    other_gguf(path, "clip")
    refused(path, "is 'clip': the file holds a vision tower and no model; give the model's")
    other_gguf(path, None)
    refused(path, "general.architecture: is None; give")
    other_gguf(path, "diffusion-gemma", split_count=3)
    refused(path, "split.count: is 3, and by the names and tensors of the files it is 1; download")


def test_unsupported_formats(tmp_path: Path, refused: Callable[[Path, str], None]) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "diffusion-gemma")
    kind = gguf.GGMLQuantizationType.IQ2_XXS
    data = np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(path, "'token_embd.weight' is stored as IQ2_XXS, .* use a file with F32, .*IQ4_XS")
    tensors = theirs() | {"model.decoder.norm.weight": torch.ones(64, dtype=torch.float64)}
    folder = save_folder(tmp_path / "folder", tensors)
    refused(folder, "'model.decoder.norm.weight' is stored as F64")


def test_two_tensors_for_one_place(tmp_path: Path, refused: Callable[[Path, str], None]) -> None:
    folder = save_folder(tmp_path, theirs(), shards=2)
    first, second = sorted(folder.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    refused(folder, "holds the same as .* remove one")


def test_config_faults(tmp_path: Path, refused: Callable[[Path, str], None]) -> None:
    folder = save_folder(tmp_path, theirs())
    config, generation = folder / "config.json", folder / "generation_config.json"
    generation.write_text("[1]")
    refused(folder, "generation_config.json: holds a JSON list")
    config.write_text('{"a": ')
    refused(folder, "config.json: is not JSON")
    config.unlink()
    refused(folder, "config.json: does not exist; complete the checkpoint's folder")


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, theirs(), shards=2)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{shard.name}: .*truncated"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
def test_pretenders(tmp_path: Path, refused: Callable[[Path, str], None], name: str) -> None:
    for content in (b"", b"x", b"<html>Not found</html>" * 9, b"PK\3\4" + bytes(99), bytes(999)):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, name)
        refused(tmp_path, name)
