from __future__ import annotations

import torch

import sfumato
from sfumato.bench import subject
from sfumato.bench.subject import random_subject
from sfumato.model.loading import place
from sfumato.ops.cpu.panels import PackedTensor
from sfumato.weights.formats import FORMATS


def test_what_there_is_to_tell() -> None:
    about = random_subject("tiny", "bf16", layers=3, device="cpu", dtype="bfloat16").about
    assert about["model"] == "random tiny, bf16"
    assert (about["layers"], about["vocab_size"], about["canvas_length"]) == (3, 512, 32)
    assert about["stored_bytes"] == sum(about["formats"].values())
    assert about["precision"].startswith("bfloat16")
    assert about["device"] == "cpu"


def test_the_kind_of_cache_is_told() -> None:
    made = random_subject("tiny", "f32", layers=1, device="cpu", cache_type="fp8")
    assert made.about["precision"] == "float32; cache fp8"


def test_the_precision_of_packed_weights_is_told() -> None:
    network = random_subject("tiny", "f32", device="cpu").network
    block = network.transformer.layers[0]
    for module, name, format in (
        (block.mlp.up_proj, "weight", "Q5_0"),
        (block.mlp.down_proj, "weight", "Q4_K"),
        (block.experts, "down_proj", "Q5_0"),
    ):
        place(module, name, PackedTensor(torch.zeros(1), 0, FORMATS[format], (1, 1), "int8"))
    assert subject._precision(network) == "float32; int8 with Q4_K, Q5_0"


def test_synthetic_prompts_and_filling() -> None:
    made = random_subject("tiny", "f32", device="cpu")
    ids = made.prompt_ids(5, seed=1)
    assert torch.equal(ids, made.prompt_ids(5, seed=1))
    assert not torch.equal(ids, made.prompt_ids(5, seed=2))
    assert 0 <= int(ids.min()) <= int(ids.max()) < 512
    filled = made.prompt_ids(5, seed=1, context=9)
    assert len(filled) == 9
    assert torch.equal(filled[[0, -4, -3, -2, -1]], ids)


def test_what_is_quantized_at_load_is_told() -> None:
    about = subject.loaded(sfumato.load(quantize="q8_0", device="cpu"), "q8_0").about
    assert about["formats"]["Q8_0"] > about["formats"].get("BF16", 0)
    plain = subject.loaded(sfumato.load(device="cpu")).about
    assert "Q8_0" not in plain["formats"] and plain["parameters"] == about["parameters"]
