"""Adapters as files: PEFT's own loading and saving as the oracle, GGUF there and back, and files
that are refused by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tests.support import qwen3_oracle
from tests.support.oracle import (
    encode_logits,
    network_of,
    oracle_encode_logits,
    oracle_logits,
    random_oracle,
    relative,
    tiny_config,
)
from tests.support.random_adapter import added, random_adapter, tensor_name
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

from sfumato.model.adapter_files import (
    CONFIG,
    WEIGHTS,
    AdapterFile,
    _joined,
    read_adapter,
    write_gguf_adapter,
    write_peft,
)
from sfumato.model.adapters import LowRank
from sfumato.model.families import DIFFUSION_GEMMA, SDAR_MOE, Family, open_checkpoint
from sfumato.model.families.diffusion_gemma.config import config_from_hf
from sfumato.model.loading import config_of
from sfumato.model.model_config import Design
from sfumato.model.network import Network
from sfumato.weights.files.gguf import write_gguf
from sfumato.weights.files.tensorfile import TensorStream

PROMPT, CANVAS = torch.arange(3, 16), torch.arange(50, 58)
CONFIG_OF_TINY = config_from_hf(tiny_config().to_dict())
CONFIG_OF_QWEN = replace(
    CONFIG_OF_TINY, intermediate_size=0, design=Design(post_norms=False, self_conditioning=False)
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def same(one: AdapterFile, other: AdapterFile) -> bool:
    """Whether they add the same to the same weights."""
    return one.changes.keys() == other.changes.keys() and all(
        torch.allclose(added(change), added(other.changes[path]), rtol=1e-5, atol=1e-7)
        for path, change in one.changes.items()
    )


def our_logits(network: Network, adapter: AdapterFile) -> list[Tensor]:
    """Those of the prompt, and those of the canvas with a soft embedding."""
    network.transformer.attach(1, adapter.changes)
    slots = network.new_cache(1, capacity=64)
    slots[0].adapter = 1
    prompt = encode_logits(network, [PROMPT], slots)[0]
    soft = torch.sin(torch.arange(8 * 64).float()).view(8, 64)
    hidden = network.denoise([CANVAS], slots, [soft])
    return [prompt, network.head.logits(hidden)]


def their_logits(model: DiffusionGemmaForBlockDiffusion) -> list[Tensor]:
    with torch.no_grad():
        prompt, cache = oracle_encode_logits(model, PROMPT)
        soft = torch.sin(torch.arange(8 * 64).float()).view(8, 64)
        return [prompt, oracle_logits(model, CANVAS, cache, soft=soft)]


def test_peft_loads_what_is_written_and_computes_the_same(tmp_path: Path) -> None:
    model = random_oracle(tiny_config(), 11)
    plain, network = their_logits(model), network_of(model)
    adapter = random_adapter(CONFIG_OF_TINY)
    write_peft(tmp_path / "adapter", adapter, DIFFUSION_GEMMA, CONFIG_OF_TINY)
    assert same(adapter, read_adapter(tmp_path / "adapter", DIFFUSION_GEMMA, CONFIG_OF_TINY))
    PeftModel.from_pretrained(model, tmp_path / "adapter")
    theirs, ours = their_logits(model), our_logits(network, adapter)
    for their, our, before in zip(theirs, ours, plain, strict=True):
        assert relative(our, their) < 1e-5
        assert relative(before, their) > 1e-2


def test_what_peft_writes_computes_the_same(tmp_path: Path) -> None:
    model = random_oracle(tiny_config(), 12)
    network = network_of(model)
    stacks = r"model\.(decoder|encoder\.language_model)\.(layers|self_conditioning)\..*"
    options = LoraConfig(
        r=4,
        lora_alpha=10,
        use_rslora=True,
        target_modules=stacks + r"(q_proj|v_proj|gate_proj|up_proj|down_proj|router\.proj)",
        target_parameters=["experts.down_proj", "experts.gate_up_proj"],
        rank_pattern={"v_proj": 2},
        alpha_pattern={r"mlp\.up_proj": 3, "self_conditioning.up_proj": 5},
        init_lora_weights=False,
    )
    torch.manual_seed(3)
    tuned = get_peft_model(model, options)
    state = tuned.state_dict()
    for name, value in state.items():  # one adapter for both stacks, as tuning has to keep it
        if "lora_" in name and ".encoder." in name:
            value.copy_(state[name.replace(".encoder.language_model.", ".decoder.")])
    tuned.save_pretrained(tmp_path)
    adapter = read_adapter(tmp_path, DIFFUSION_GEMMA, CONFIG_OF_TINY)
    assert (adapter.rank, adapter.alpha) == (4, pytest.approx(20))
    theirs, ours = their_logits(model), our_logits(network, adapter)
    for our, their in zip(ours, theirs, strict=True):
        assert relative(our, their) < 1e-5


def test_a_network_of_qwen3_has_one_stack_and_experts_in_parts(tmp_path: Path) -> None:
    model = qwen3_oracle.random_oracle(5, experts=True)
    folder = qwen3_oracle.save_oracle(model, tmp_path / "base", "sdar_moe", 4)
    checkpoint = open_checkpoint(folder)
    config = config_of(checkpoint)
    adapter = random_adapter(config)
    write_peft(tmp_path / "peft", adapter, SDAR_MOE, config)
    assert same(adapter, read_adapter(tmp_path / "peft", SDAR_MOE, config))
    merged = PeftModel.from_pretrained(model, tmp_path / "peft").merge_and_unload().state_dict()
    for path, change in adapter.changes.items():
        name = tensor_name(path, change)
        before = checkpoint.read(name)
        after = merged[SDAR_MOE.tensor_names.transformers_name(name)]
        assert torch.allclose(after, before + added(change), atol=1e-5)


@pytest.mark.parametrize("family", [DIFFUSION_GEMMA, SDAR_MOE], ids=lambda family: family.name)
def test_gguf_there_and_back(family: Family, tmp_path: Path) -> None:
    config = CONFIG_OF_TINY if family is DIFFUSION_GEMMA else CONFIG_OF_QWEN
    adapter, path = random_adapter(config), tmp_path / "adapter.gguf"
    write_gguf_adapter(path, adapter, family, config)
    again = read_adapter(path, family, config)
    assert same(adapter, again)
    assert (again.alpha, again.base) == (6, "tiny")
    reader = GGUFReader(path)
    fields = {key: part.contents() for key, part in reader.fields.items()}
    assert (fields["general.type"], fields["adapter.type"]) == ("adapter", "lora")
    assert fields["adapter.lora.alpha"] == 6
    factors = {tensor.name: tensor.data for tensor in reader.tensors}
    query, own = adapter.changes["layers.0.self_attn.q_proj"], "blk.0.attn_q.weight.lora_"
    np.testing.assert_array_equal(factors[f"{own}a"], query.down)
    np.testing.assert_array_equal(factors[f"{own}b"], query.up)
    experts = adapter.changes["layers.0.experts.down_proj"]
    np.testing.assert_array_equal(factors["blk.0.ffn_down_exps.weight.lora_b"], experts.up)


def test_ranges_of_rows_with_other_factors_become_one_change() -> None:
    """GGUF files of Qwen3 have gate and up of experts as tensors of their own."""
    downs, ups = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 4, 3)
    parts = [LowRank(down, up, 0.5) for down, up in zip(downs, ups, strict=True)]
    joined = _joined(parts)
    wanted = torch.cat([added(part) for part in parts], -2)
    torch.testing.assert_close(added(joined), wanted)


Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]
DECODER = "base_model.model.model.decoder.layers.0.self_attn.q_proj.lora_"
ENCODER = DECODER.replace("decoder", "encoder.language_model")


def both(tensors: dict[str, Tensor], factor: str, change: Callable[[Tensor], Tensor]) -> None:
    for stack in (DECODER, ENCODER):
        tensors[f"{stack}{factor}.weight"] = change(tensors[f"{stack}{factor}.weight"])


REFUSED: dict[str, Edit] = {
    r"peft_type is 'LOHA'; only 'LORA'": lambda c, t: c.update(peft_type="LOHA"),
    r"use_dora is True": lambda c, t: c.update(use_dora=True),
    r"bias is 'all'": lambda c, t: c.update(bias="all"),
    r"modules_to_save is \['lm_head'\]": lambda c, t: c.update(modules_to_save=["lm_head"]),
    r"init_lora_weights is 'pissa_niter_4'": lambda c, t: c.update(
        init_lora_weights="pissa_niter_4"
    ),
    r"new_option: not known here": lambda c, t: c.update(new_option={"a": 1}),
    r"config.json: r is 0": lambda c, t: c.update(r=0),
    r"lora_alpha is inf": lambda c, t: c.update(lora_alpha=float("inf")),
    r"alpha_pattern: '\(a\+\)\+' is a pattern": lambda c, t: c.update(alpha_pattern={"(a+)+": 1}),
    r"rank_pattern: 'q_proj' is '9'": lambda c, t: c.update(rank_pattern={"q_proj": "9"}),
    r"q_proj.lora_A.weight': has the rank 3, and adapter_config.json says 4": (
        lambda c, t: c.update(r=4)
    ),
    r"target_modules: leaves out model": lambda c, t: c.update(target_modules=["k_proj"]),
    r"layers_to_transform: leaves out": lambda c, t: c.update(layers_to_transform=[1, 2]),
    r"lora_B.weight': lacks the other factor": lambda c, t: t.pop(f"{DECODER}A.weight"),
    r"changes model.decoder.layers.0.self_attn.q_proj and not model.encoder.*q_proj: both are": (
        lambda c, t: [t.pop(f"{ENCODER}{factor}.weight") for factor in "AB"]
    ),
    r"q_proj have different changes: both are one weight": (
        lambda c, t: t.update({f"{ENCODER}B.weight": t[f"{ENCODER}B.weight"] + 1})
    ),
    r"q_proj.magnitude': is no factor": lambda c, t: t.update(
        {"model.decoder.layers.0.q_proj.magnitude": torch.ones(3)}
    ),
    r"layers.9.* of no matrix of DiffusionGemma": lambda c, t: t.update(
        {
            f"model.decoder.layers.9.mlp.up_proj.lora_{factor}.weight": torch.ones(3)
            for factor in "AB"
        }
    ),
    r"has the shape \[3, 65\], and \[3, 64\]": lambda c, t: both(
        t, "A", lambda each: torch.ones(3, 65)
    ),
    r"has the shape \[2000, 64\]; ranks are 1 to 1024": lambda c, t: both(
        t, "A", lambda each: torch.ones(2000, 64)
    ),
    r"has the rank 1, and adapter_config.json says 3": lambda c, t: both(
        t, "A", lambda each: torch.ones(())
    ),
    r"lora_A.weight': holds values that are not finite": lambda c, t: both(
        t, "A", lambda each: each * float("nan")
    ),
    r"stored as I8": lambda c, t: both(t, "B", lambda each: each.to(torch.int8)),
    r"holds no change of a weight": lambda c, t: t.clear(),
}


def test_what_is_no_low_rank_change_of_this_network_is_refused_by_name(tmp_path: Path) -> None:
    path = "layers.0.self_attn.q_proj"
    change = random_adapter(CONFIG_OF_TINY).changes[path]
    good, edited = tmp_path / "good", tmp_path / "edited"
    write_peft(good, AdapterFile({path: change}, 3, 6.0), DIFFUSION_GEMMA, CONFIG_OF_TINY)
    edited.mkdir()
    for message, edit in REFUSED.items():
        config, tensors = json.loads((good / CONFIG).read_text()), load_file(good / WEIGHTS)
        edit(config, tensors)
        (edited / CONFIG).write_text(json.dumps(config))
        save_file(tensors, edited / WEIGHTS)
        with pytest.raises(ValueError, match=message) as caught:
            read_adapter(edited, DIFFUSION_GEMMA, CONFIG_OF_TINY)
        assert str(edited / "adapter_") in str(caught.value)
    (edited / WEIGHTS).rename(edited / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model.bin is a pickle"):
        read_adapter(edited, DIFFUSION_GEMMA, CONFIG_OF_TINY)
    with pytest.raises(ValueError, match="is no adapter; give a folder with"):
        read_adapter(tmp_path, DIFFUSION_GEMMA, CONFIG_OF_TINY)


def test_a_gguf_file_that_is_no_adapter_is_refused_by_key(tmp_path: Path) -> None:
    good = {
        "general.architecture": "diffusion-gemma",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 6.0,
    }
    factors = {"a": torch.ones(2, 64), "b": torch.ones(64, 2)}
    for changes, name, message in (
        ({"general.type": "model"}, "attn_q", "general.type: is 'model', and 'adapter' in"),
        ({"adapter.type": "control"}, "attn_q", "adapter.type: is 'control'"),
        ({"general.architecture": "qwen3"}, "attn_q", "general.architecture: is 'qwen3'"),
        ({"adapter.lora.alpha": "6"}, "attn_q", "adapter.lora.alpha: is '6'"),
        ({}, "attn_x", r"blk.0.attn_x.weight.lora_a': is of no matrix"),
        ({}, "attn_k", r"attn_k.weight.lora_b': has the shape \[64, 2\], and \[32, 2\]"),
    ):
        path = tmp_path / "adapter.gguf"
        with path.open("wb") as stream:
            named = {f"blk.0.{name}.weight.lora_{factor}": each for factor, each in factors.items()}
            tensors = [TensorStream.of(each, value, "F32") for each, value in named.items()]
            write_gguf(stream, good | changes, tensors)
        with pytest.raises(ValueError, match=message):
            read_adapter(path, DIFFUSION_GEMMA, CONFIG_OF_TINY)


def test_an_adapter_appears_whole_and_replaces_nothing_else(tmp_path: Path) -> None:
    path, adapter = tmp_path / "adapter", random_adapter(CONFIG_OF_TINY)
    write_peft(path, adapter, DIFFUSION_GEMMA, CONFIG_OF_TINY)
    with pytest.raises(ValueError, match="exists already"):
        write_peft(path, adapter, DIFFUSION_GEMMA, CONFIG_OF_TINY)
    write_peft(path, adapter, DIFFUSION_GEMMA, CONFIG_OF_TINY, force=True)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds more than an adapter"):
        write_peft(path, adapter, DIFFUSION_GEMMA, CONFIG_OF_TINY, force=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapter"]
