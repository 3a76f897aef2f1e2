"""Soft tokens against `Gemma4VisionModel` and `DiffusionGemmaMultimodalEmbedder` of
`transformers`, from safetensors and from mmproj files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.pictures import picture
from tests.support.vision_oracle import VisionOracle, random_vision
from torch import Tensor

from sfumato.media.patches import Cut, Patches, patches_of
from sfumato.model.families import open_checkpoint
from sfumato.model.vision.loading import load_tower, open_mmproj, open_tower
from sfumato.model.vision.tower import Encoding, VisionTower
from sfumato.ops.cpu import library
from sfumato.ops.cpu.attention import multiplies_bf16
from sfumato.weights.formats import QuantizedTensor

CPU, TEXT = torch.device("cpu"), 32


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> VisionTower:
    opened = open_tower(open_checkpoint(folder), TEXT)
    assert opened is not None
    return load_tower(*opened, CPU, dtype)


def loaded_mmproj(path: Path) -> VisionTower:
    return load_tower(*open_mmproj(path, TEXT), CPU, torch.float32)


def encoding(tower: VisionTower, patches: Patches) -> Encoding:
    return Encoding(tower, torch.from_numpy(patches.values()), patches.columns)


def soft_tokens(tower: VisionTower, patches: Patches) -> Tensor:
    tokens = encoding(tower, patches).advance()
    assert tokens is not None
    return tokens


def cut_of(oracle: VisionOracle, tokens: int = 12) -> Cut:
    return Cut(oracle.config.patch_size, oracle.config.pooling_kernel_size, tokens)


def error_of(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, of the largest number."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


@st.composite
def oracles(draw: st.DrawFn) -> VisionOracle:
    kv_heads = draw(st.integers(1, 3))
    return random_vision(
        TEXT,
        seed=draw(st.integers(0, 1000)),
        hidden_size=draw(st.sampled_from([8, 20, 32])),
        intermediate_size=draw(st.sampled_from([8, 48])),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=kv_heads * draw(st.integers(1, 2)),
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 8, 12])),
        patch_size=draw(st.sampled_from([2, 4, 5])),
        # With 1 the oracle keeps the padding and drops the picture: its mask has the other sense.
        pooling_kernel_size=draw(st.integers(2, 4)),
        use_clipped_linears=draw(st.booleans()),
        standardize=draw(st.booleans()),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-3])),
        rope_parameters={"rope_type": "axial", "rope_theta": draw(st.sampled_from([100.0, 10.0]))},
    )


@settings(max_examples=12, deadline=None)
@given(oracles(), st.integers(1, 60), st.integers(1, 60), st.integers(2, 24), st.integers(0, 5))
def test_soft_tokens_are_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory,
    oracle: VisionOracle,
    width: int,
    height: int,
    tokens: int,
    padding: int,
) -> None:
    folder = tmp_path_factory.mktemp("tower")
    patches = patches_of(picture(width, height), cut_of(oracle, tokens))
    theirs = oracle.soft_tokens(patches, padding)
    ours = soft_tokens(loaded(oracle.save(folder)), patches)
    assert error_of(ours, theirs) < 1e-4
    if oracle.config.rope_parameters["rope_theta"] == 100:  # GGUF files have no key for it
        held = oracle.write_mmproj(folder / "mmproj.gguf")
        assert all(torch.equal(held[name], tensor) for name, tensor in oracle.state().items())
        assert torch.equal(soft_tokens(loaded_mmproj(folder / "mmproj.gguf"), patches), ours)


@pytest.mark.parametrize("clamps", [False, True])
def test_each_part_of_the_tower_counts(clamps: bool, tmp_path: Path) -> None:
    """A change of any tensor changes the soft tokens: none is loaded and then not used."""
    oracle = random_vision(use_clipped_linears=clamps)
    patches = patches_of(picture(40, 30), cut_of(oracle))
    tower = loaded(oracle.save(tmp_path))
    before = soft_tokens(tower, patches)
    for name, tensor in tower.named_parameters():
        kept = tensor.clone()
        tensor.data = tensor * (0.1 if name.endswith(("_min", "_max")) else 2)
        assert not torch.equal(soft_tokens(tower, patches), before), name
        tensor.data = kept
    assert torch.equal(soft_tokens(tower, patches), before)


def test_slices_of_layers_give_what_one_pass_gives(tmp_path: Path) -> None:
    oracle = random_vision(num_hidden_layers=5)
    patches = patches_of(picture(40, 30), cut_of(oracle))
    tower = loaded(oracle.save(tmp_path))
    at_once = soft_tokens(tower, patches)
    for step in (1, 2, 5, 9):
        sliced = encoding(tower, patches)
        results = [sliced.advance(step) for _ in range(-(-5 // step))]
        assert all(result is None for result in results[:-1])
        assert results[-1] is not None and torch.equal(results[-1], at_once)
        assert sliced.layer == 5


def test_quantized_matrices_stay_quantized(tmp_path: Path) -> None:
    oracle = random_vision(hidden_size=64, num_attention_heads=4, head_dim=16, intermediate_size=96)
    kinds = {"_norm.weight": "F32", "ln1.weight": "F32", "ln2.weight": "F32", "std_bias": "F32",
             "std_scale": "F32", "patch_embd.weight": "F16", "ffn_down.weight": "Q4_0",
             "attn_v.weight": "Q5_1", ".weight": "Q8_0"}  # fmt: skip
    held = oracle.write_mmproj(tmp_path / "mmproj.gguf", kinds)
    tower = loaded_mmproj(tmp_path / "mmproj.gguf")
    formats = {
        name.rpartition(".")[2] + ":" + module.weight.format.name
        for name, module in tower.named_modules()
        if isinstance(getattr(module, "weight", None), QuantizedTensor)
    }
    assert formats == {
        *(f"{name}_proj:Q8_0" for name in ("q", "k", "o", "gate", "up")),
        *("v_proj:Q5_1", "down_proj:Q4_0", "projection:Q8_0"),
    }
    for name, tensor in oracle.state().items():
        tensor.copy_(held[name])
    patches = patches_of(picture(40, 30), cut_of(oracle))
    assert error_of(soft_tokens(tower, patches), oracle.soft_tokens(patches)) < 1e-4


@pytest.mark.parametrize(("activations", "most"), [("int8", 0.04), ("bf16", 0.02)])
def test_packed_matrices_round_their_inputs(activations: str, most: float, tmp_path: Path) -> None:
    oracle = random_vision(hidden_size=64, num_attention_heads=4, head_dim=32, intermediate_size=96)
    kinds = {"_norm.weight": "F32", "ln1.weight": "F32", "ln2.weight": "F32",
             "patch_embd.weight": "F32", ".weight": "Q8_0"}  # fmt: skip
    oracle.write_mmproj(tmp_path / "mmproj.gguf", kinds)
    opened = open_mmproj(tmp_path / "mmproj.gguf", TEXT)
    patches = patches_of(picture(40, 30), cut_of(oracle))
    packed = load_tower(*opened, CPU, torch.float32, activations)
    exact = soft_tokens(load_tower(*opened, CPU, torch.float32), patches)
    assert error_of(soft_tokens(packed, patches), exact) < most


def test_bfloat16_is_as_near_as_that_of_transformers(tmp_path: Path) -> None:
    oracle = random_vision(num_hidden_layers=3)
    patches = patches_of(picture(40, 30), cut_of(oracle))
    exact = oracle.soft_tokens(patches)
    tower = loaded(oracle.save(tmp_path), torch.bfloat16)
    oracle.tower.bfloat16(), oracle.projector.bfloat16()
    theirs = error_of(oracle.soft_tokens(patches).float(), exact)
    ours = soft_tokens(tower, patches)
    assert ours.dtype == torch.bfloat16
    assert error_of(ours.float(), exact) < 1.5 * theirs + 1e-3


@pytest.mark.skipif(not multiplies_bf16(), reason="torch attends to bfloat16 here")
def test_compiled_attention_takes_heads_of_72(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = random_vision(num_hidden_layers=3, head_dim=72)
    called: list[str] = []
    run = library.run
    monkeypatch.setattr(library, "run", lambda *given: (called.append(given[0]), run(*given)))
    tower = loaded(oracle.save(tmp_path), torch.bfloat16)
    soft_tokens(tower, patches_of(picture(40, 30), cut_of(oracle)))
    assert called.count("sf_shared_attention") == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_size(tmp_path: Path) -> None:
    """27 layers of 1152, 70 soft tokens: 569 million parameters."""
    oracle = random_vision(
        2816, hidden_size=1152, intermediate_size=4304, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, head_dim=72, patch_size=16,
        position_embedding_size=10240,
    )  # fmt: skip
    patches = patches_of(picture(640, 480), Cut(tokens=70))
    theirs = oracle.soft_tokens(patches)
    assert len(oracle.state()) == 356
    oracle.write_mmproj(tmp_path / "mmproj.gguf")
    tower = load_tower(*open_mmproj(tmp_path / "mmproj.gguf", 2816), CPU, torch.float32)
    assert error_of(soft_tokens(tower, patches), theirs) < 1e-4
