from __future__ import annotations

import pytest
import torch

from sfumato.bench.subject import PRESETS, PUBLISHED, random_checkpoint
from sfumato.model.loading import load_network
from sfumato.model.quantization import TARGETS
from sfumato.weights.formats import QuantizedTensor


@pytest.mark.parametrize(
    ("format", "gigabytes"),
    [
        ("q4_k_m", 16.8),
        ("q5_k_m", 19.1),
        ("q6_k", 22.6),
        ("q8_0", 26.9),
        ("bf16", 50.5),
        ("fp8", 26.1),
        ("int4", 16.1),
    ],
)
def test_sizes_are_those_of_the_published_files(format: str, gigabytes: float) -> None:
    tensors = random_checkpoint("26b-a4b", format).tensors.values()
    assert sum(info.nbytes for info in tensors) / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_the_real_proportions() -> None:
    tensors = random_checkpoint("26b-a4b").tensors
    assert len(tensors) == 691  # and the published file's rope_freqs, which follow from the config
    assert tensors["layers.29.experts.gate_up_proj"].shape == (128, 1408, 2816)
    assert "layers.5.self_attn.v_proj.weight" not in tensors  # every 6th layer is full
    assert "layers.4.self_attn.v_proj.weight" in tensors


@pytest.mark.parametrize("format", [*TARGETS, "fp8", "int8", "int4"])
def test_tensors_are_what_they_claim(format: str) -> None:
    checkpoint = random_checkpoint("tiny", format)
    for name, info in checkpoint.tensors.items():
        value = checkpoint.read(name)
        dense = value if isinstance(value, torch.Tensor) else value.dequantize()
        assert (tuple(value.shape), value.nbytes) == (info.shape, info.nbytes)
        if len(info.shape) > 1:
            wanted = info.shape[-1] ** -0.5 * (3 if name == "embed_tokens.weight" else 1)
            assert float(dense.float().std()) == pytest.approx(wanted, rel=0.15)
            rows = dense.reshape(-1, info.shape[-1])
            assert len(rows.unique(dim=0)) == len(rows)


def test_the_seed_makes_the_weights() -> None:
    name = "layers.0.mlp.up_proj.weight"

    def data(seed: int) -> torch.Tensor:
        return random_checkpoint("tiny", "q8_0", seed=seed).read(name).data

    assert torch.equal(data(1), data(1))
    assert not torch.equal(data(1), data(2))


@pytest.mark.parametrize("format", ["Q4_K", "Q5_K", "Q6_K", "Q8_0"])
def test_a_tiny_one_has_the_formats_of_a_large_one(format: str) -> None:
    tiny, large = (random_checkpoint(size, format.lower()).tensors for size in ("tiny", "26b-a4b"))
    for name in tiny.keys() & large.keys():
        assert tiny[name].format == large[name].format
    assert tiny["layers.0.experts.gate_up_proj"].format == format


@pytest.mark.parametrize("format", ["nvfp4", "int4"])
def test_published_formats_are_in_the_layers(format: str) -> None:
    """With numbers of a weight's size; INT4 keeps dense MLPs, and rows that do not divide stay."""
    checkpoint = random_checkpoint("tiny", format)
    formats = {name: info.format for name, info in checkpoint.tensors.items()}
    held = PUBLISHED[format]
    assert formats["layers.0.experts.gate_up_proj"] == formats["layers.1.self_attn.o_proj.weight"]
    assert formats["layers.0.experts.gate_up_proj"] == held
    assert formats["layers.0.mlp.gate_proj.weight"] == ("BF16" if format == "int4" else held)
    assert formats["layers.0.experts.down_proj"] == ("INT4" if format == "int4" else "BF16")
    weight = checkpoint.read("layers.0.experts.gate_up_proj")
    assert isinstance(weight, QuantizedTensor)
    assert float(weight.dequantize().std() * weight.shape[-1] ** 0.5) == pytest.approx(1, rel=0.1)
    assert checkpoint.tensors["layers.0.experts.gate_up_proj"].nbytes == weight.nbytes
    network = load_network(checkpoint, torch.device("cpu"), torch.float32)
    assert network.denoise([torch.arange(32)], [network.new_slot(1)]).isfinite().all()


def test_routers_spread_their_scores() -> None:
    checkpoint = random_checkpoint("tiny", "f32")
    network = load_network(checkpoint, torch.device("cpu"), torch.float32)
    random = torch.Generator().manual_seed(0)
    for layer in network.transformer.layers:
        scale = layer.router.scale * network.config.hidden_size**-0.5
        x = torch.randn(500, network.config.hidden_size, generator=random)
        assert float((x * scale @ layer.router.proj.weight.T).std()) == pytest.approx(3, rel=0.1)


def test_other_numbers_of_layers() -> None:
    network = load_network(
        random_checkpoint("tiny", "f32", layers=3), torch.device("cpu"), torch.float32
    )
    assert [layer.sliding for layer in network.config.layers] == [True, True, False]
    canvas = torch.arange(PRESETS["tiny"]["canvas_length"])
    hidden = network.denoise([canvas], [network.new_slot(1)])
    assert hidden.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("27b",), "random_weights: '27b' is none of 26b-a4b"),
        (("tiny", "q3_k"), "format: 'q3_k' is none of q4_k_m"),
        (("tiny", "q8_0", 10_000), "layers: 10000"),
    ],
)
def test_what_there_is_not(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        random_checkpoint(*arguments)  # type: ignore[arg-type]


def test_no_two_tokens_have_the_same_row() -> None:
    for format in ("bf16", "q8_0"):
        weight = random_checkpoint("180m", format, vocab=8200).read("embed_tokens.weight")
        rows = weight.data if isinstance(weight, QuantizedTensor) else weight
        assert len(rows.unique(dim=0)) == 8200


def test_networks_of_another_family() -> None:
    """Its sizes are those that are published, and a tiny one runs; other numbers of tokens have
    their last one as mask."""
    shapes = random_checkpoint("sdar-1.7b", "q8_0").tensors
    assert shapes["lm_head.weight"].shape == (151936, 2048) and len(shapes) == 28 * 11 + 3
    assert "lm_head.weight" not in random_checkpoint("qwen3-0.6b").tensors
    checkpoint = random_checkpoint("tiny-qwen3", "q4_k_m", vocab=500)
    assert checkpoint.tensors["lm_head.weight"].format == "Q6_K"
    network = load_network(checkpoint, torch.device("cpu"), torch.float32)
    assert network.config.mask_id == 499
    hidden = network.denoise([torch.arange(4)], [network.new_slot(1)])
    assert float(network.head.logits(hidden).std()) == pytest.approx(3, rel=0.2)
