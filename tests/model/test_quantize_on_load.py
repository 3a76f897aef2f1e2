"""Quantized at load: the same network as from the converted file, and foretold alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.gguf_files import gguf_config, random_state
from tests.support.narrow_files import LAYOUTS

import sfumato
from sfumato.api import Model
from sfumato.catalog import EMBEDDED
from sfumato.convert import convert
from sfumato.model.families import open_checkpoint
from sfumato.model.families.diffusion_gemma import TENSOR_NAMES
from sfumato.model.families.diffusion_gemma.config import hf_config
from sfumato.model.loading import loaded_bytes
from sfumato.model.quantization import format_on_load, quantized, quantized_on_load
from sfumato.ops.cpu.panels import PackedTensor
from sfumato.weights.formats import FORMATS, QuantizedTensor, ScaledTensor, quantize

CPU = torch.device("cpu")
# Rows of 256, of 288 and of 96 elements: Q4_K and what serves where it cannot.
CONFIG = gguf_config(hidden_size=256, intermediate_size=288, expert_size=96, vocab_size=1100)


def _hf_state() -> dict[str, torch.Tensor]:
    state = random_state(CONFIG).items()
    return {TENSOR_NAMES.transformers_name(name): t.to(torch.bfloat16) for name, t in state}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    named = {
        TENSOR_NAMES.transformers_name(n): t.to(torch.bfloat16)
        for n, t in random_state(CONFIG).items()
    }
    save_file(named, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(hf_config(CONFIG)))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_bytes((EMBEDDED / name).read_bytes())
    return path


def logits(model: Model) -> torch.Tensor:
    cache = model.new_cache(1, 40)
    model.encode(torch.arange(20)[None], cache)
    return model.denoise_logits(torch.arange(8)[None] * 7, cache)


@pytest.mark.parametrize("target", ["q4_k", "q8_0"])
def test_it_equals_the_converted_file(folder: Path, tmp_path: Path, target: str) -> None:
    convert(folder, tmp_path / "x.gguf", target)
    ours = sfumato.load(folder, device="cpu", quantize=target)
    theirs = sfumato.load(tmp_path / "x.gguf", device="cpu")
    assert ours.network.dtype == theirs.network.dtype
    assert ours.network.cache_dtype == theirs.network.cache_dtype
    assert torch.equal(logits(ours), logits(theirs))
    assert not torch.equal(logits(ours), logits(sfumato.load(folder, device="cpu")))


@pytest.mark.parametrize("target", ["q4_k", "q8_0"])
def test_formats_and_bytes_are_foretold(folder: Path, tmp_path: Path, target: str) -> None:
    checkpoint = quantized_on_load(open_checkpoint(folder), target, CPU)
    convert(folder, tmp_path / "x.gguf", target)
    for name, info in open_checkpoint(tmp_path / "x.gguf").tensors.items():
        value = checkpoint.read(name)
        assert isinstance(value, QuantizedTensor) == (info.format not in ("F32", "F16")), name
        if isinstance(value, QuantizedTensor):
            assert value.format.name == checkpoint.tensors[name].format == info.format
        assert value.nbytes == checkpoint.tensors[name].nbytes, name
    seen: list[tuple[int, int]] = []
    model = sfumato.load(
        folder, device="cpu", quantize=target, progress=lambda *at: seen.append(at)
    )
    assert seen[-1] == (sum(info.nbytes for info in checkpoint.tensors.values()),) * 2
    network = model.network
    modules = network.transformer.modules()
    held = [value for module in modules for value in vars(module).values()]
    kept = [value for value in held if isinstance(value, QuantizedTensor | PackedTensor)]
    kept += [*network.transformer.parameters(), *(network.head.output or ())]
    infos = checkpoint.tensors.items()
    foretold = sum(loaded_bytes(name, info, CPU, network.dtype) for name, info in infos)
    assert foretold == sum(value.nbytes for value in kept)


def test_what_is_quantized_already_stays_as_it_is(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "x.gguf", "q8_0")
    stored = open_checkpoint(tmp_path / "x.gguf")
    assert quantized_on_load(stored, "q4_k", CPU).tensors == stored.tensors
    models = [sfumato.load(tmp_path / "x.gguf", device="cpu", quantize=q) for q in (None, "q4_k")]
    assert torch.equal(*map(logits, models))


@pytest.mark.parametrize("target", ["q3_k", "bf16", "q4_k_m", "Q8_0", ""])
def test_another_target_is_refused(folder: Path, target: str) -> None:
    with pytest.raises(ValueError, match=rf"^quantize: '{target}' is none of q4_k, q8_0, fp8$"):
        sfumato.load(folder, quantize=target)


@pytest.mark.parametrize("target", ["q4_k", "fp8"])
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, folder: Path, target: str) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    state = {
        TENSOR_NAMES.transformers_name(n): t.to(torch.bfloat16)
        for n, t in random_state(CONFIG).items()
    }
    state["model.decoder.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"quantize: .*layers\.1\.mlp\.up_proj.*not finite"):
        sfumato.load(tmp_path, device="cpu", quantize=target)


@pytest.mark.parametrize(
    ("name", "shape", "target", "format"),
    [
        ("layers.0.mlp.up_proj.weight", (8, 256), "q4_k", "Q4_K"),
        ("layers.0.mlp.up_proj.weight", (8, 256), "q8_0", "Q8_0"),
        ("layers.0.mlp.down_proj.weight", (8, 96), "q4_k", "Q5_0"),
        ("layers.0.mlp.down_proj.weight", (8, 96), "q5_k", "Q5_1"),
        ("layers.0.mlp.down_proj.weight", (8, 96), "q6_k", "Q8_0"),
        ("layers.0.experts.gate_up_proj", (2, 8, 256), "q6_k", "Q6_K"),
        ("embed_tokens.weight", (8, 256), "q4_k", "Q6_K"),
        ("embed_tokens.weight", (8, 96), "q4_k", "Q8_0"),
        ("embed_tokens.weight", (8, 256), "q8_0", "Q8_0"),
        ("layers.0.router.proj.weight", (8, 256), "q4_k", None),
        ("layers.0.input_layernorm.weight", (256,), "q4_k", None),
        ("layers.0.mlp.down_proj.weight", (8, 48), "q4_k", None),
        ("layers.0.mlp.up_proj.weight", (8, 256), "bf16", None),
    ],
)
def test_quantizing_at_load(
    name: str, shape: tuple[int, ...], target: str, format: str | None
) -> None:
    chosen = format_on_load(name, shape, target)
    assert (chosen and chosen.name) == format
    if chosen is not None:
        values = torch.randn(*shape)
        result = quantized(values, chosen)
        assert isinstance(result, QuantizedTensor) and result.shape == shape
        assert torch.equal(result.data, quantize(values, chosen).data)


def test_fp8_is_that_of_the_published_checkpoints(folder: Path) -> None:
    """Matrices of layers become codes, and nothing else; formats and bytes are foretold."""
    checkpoint = quantized_on_load(open_checkpoint(folder), "fp8", CPU)
    model = sfumato.load(folder, device="cpu", quantize="fp8")
    for name, info in checkpoint.tensors.items():
        path, _, leaf = name.rpartition(".")
        weight = getattr(model.network.transformer.get_submodule(path), leaf)
        is_code = LAYOUTS["fp8"].narrows.fullmatch(name) is not None
        assert isinstance(weight, ScaledTensor) == is_code == (info.format == "FP8"), name
        assert weight.nbytes == loaded_bytes(name, info, CPU, model.network.dtype), name
        if is_code:
            floats = open_checkpoint(folder).read(name).float()
            error = (weight.dequantize() - floats).norm() / floats.norm()
            assert error < 1 / 28, name
    again = sfumato.load(folder, device="cpu", quantize="fp8")
    assert torch.equal(logits(model), logits(again))


def test_no_codes_of_a_weight_that_is_no_number() -> None:
    weight = torch.ones(4, 32)
    weight[2, 1] = torch.inf
    with pytest.raises(ValueError, match=r"^holds values that are not finite$"):
        quantized(weight, FORMATS["FP8"])
    assert format_on_load("layers.0.mlp.up_proj.weight", (4, 32), "fp8") is FORMATS["FP8"]
    assert format_on_load("layers.0.router.proj.weight", (4, 32), "fp8") is None
    assert format_on_load("layers.0.mlp.up_proj.weight", (4, 31), "fp8") is None
