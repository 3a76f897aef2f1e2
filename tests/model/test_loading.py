"""Loading: the result equals the oracle, every tensor is accounted for, and little is copied."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.ops.cpu.forced import compiled
from tests.support.gguf_files import gguf_config, random_state, state_shapes, write_gguf
from tests.support.oracle import (
    canonical_state,
    network_of,
    oracle_encode,
    oracle_logits,
    random_oracle,
    relative,
    tiny_config,
)
from torch import Tensor

from sfumato.bench.subject import random_checkpoint
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import config_of, expected_shapes, load_network, loaded_bytes
from sfumato.model.model_config import ConfigError
from sfumato.model.network import Network
from sfumato.model.placement import pick_dtype
from sfumato.model.quantization import TARGETS
from sfumato.ops.cpu import library
from sfumato.ops.cpu.panels import PackedTensor
from sfumato.weights.errors import CheckpointError
from sfumato.weights.formats import QuantizedTensor

CPU = torch.device("cpu")


def theirs(name: str) -> str:
    """The name in a safetensors file."""
    if name.endswith("encoder_layer_scalar"):
        return "model.encoder.language_model." + name.replace("encoder_layer", "layer")
    return "model.decoder." + name


def write_safetensors(folder: Path, state: dict[str, Tensor]) -> Path:
    """A checkpoint of the tiny config with these tensors, by canonical name."""
    tiny_config().save_pretrained(folder)
    save_file({theirs(name): t for name, t in state.items()}, folder / "model.safetensors")
    return folder


def step(network: Network) -> Tensor:
    """Logits of a canvas after a prompt."""
    slot = network.new_slot(40)
    network.encode([torch.arange(30)], [slot])
    return network.head.logits(network.denoise([torch.arange(8) * 7], [slot]))


def test_what_transformers_saves(tmp_path: Path) -> None:
    oracle = random_oracle(tiny_config(), 21)
    oracle.save_pretrained(tmp_path)
    network = load_network(open_checkpoint(tmp_path), CPU, torch.float32)
    cache = oracle_encode(oracle, torch.arange(30))
    assert relative(step(network), oracle_logits(oracle, torch.arange(8) * 7, cache)) <= 1e-4


def test_float_gguf_equals_the_oracle(tmp_path: Path) -> None:
    oracle = random_oracle(tiny_config(), 22)
    path = tmp_path / "model.gguf"
    write_gguf(path, canonical_state(oracle), gguf_config())
    network = load_network(open_checkpoint(path), CPU, torch.float32)
    cache = oracle_encode(oracle, torch.arange(30))
    assert relative(step(network), oracle_logits(oracle, torch.arange(8) * 7, cache)) <= 1e-4


MIXED = {
    "embed_tokens.weight": "Q6_K",
    "self_conditioning.down_proj.weight": "Q5_0",
    "*.self_attn.v_proj.weight": "Q6_K",
    "*.self_attn.*_proj.weight": "Q4_K",
    "*.mlp.down_proj.weight": "Q5_1",
    "layers.1.mlp.up_proj.weight": "IQ3_S",
    "layers.2.mlp.up_proj.weight": "IQ3_XXS",
    "*.experts.down_proj": "Q8_0",
    "layers.1.experts.gate_up_proj": "IQ4_XS",
    "layers.0.experts.gate_up_proj": "Q3_K",
    "layers.2.experts.gate_up_proj": "Q2_K",
    "*.gate_proj.weight": "Q8_0",
    "*.up_proj.weight": "BF16",
}


def stored(network: Network) -> list[QuantizedTensor | PackedTensor]:
    """The weights that are no float tensors."""
    return [
        value
        for module in network.transformer.modules()
        for value in vars(module).values()
        if isinstance(value, QuantizedTensor | PackedTensor)
    ]


@pytest.mark.parametrize(
    ("activations", "limit"),
    [
        (None, 1e-5),
        pytest.param("bf16", 1e-2, marks=compiled),
        pytest.param("int8", 3e-2, marks=compiled),
    ],
)
def test_mixed_gguf_equals_its_dequantized_self(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activations: str | None, limit: float
) -> None:
    """On plain torch (None), and with compiled operations."""
    config = gguf_config(hidden_size=256, num_heads=16)  # 16 heads of 16: rows of 256
    path = tmp_path / "model.gguf"
    held = write_gguf(path, random_state(config, 23), config, MIXED)
    if activations is None:
        monkeypatch.setattr(library, "kernels", None)
    checkpoint = open_checkpoint(path)
    network = load_network(checkpoint, CPU, torch.float32, activations=activations or "int8")
    assert isinstance(network.head.embedding, QuantizedTensor)
    kinds: dict[type, set[str]] = {QuantizedTensor: set(), PackedTensor: set()}
    for value in stored(network):
        name = value.format.name
        kinds[type(value)].add(name)
        if isinstance(value, PackedTensor):
            tiles = library.loaded().tiles and len(value.shape) == 2
            assert value.activations == ("bf16" if tiles else activations)
    matrices = {"Q6_K", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "IQ4_XS"}
    matrices |= {"Q2_K", "Q3_K", "IQ3_S", "IQ3_XXS"}
    if activations is None:
        assert kinds == {QuantizedTensor: matrices, PackedTensor: set()}
    else:
        assert kinds == {QuantizedTensor: {"Q6_K"}, PackedTensor: matrices}
    oracle = random_oracle(tiny_config(hidden_size=256, num_attention_heads=16), 0)
    weights = canonical_state(oracle)  # views of the oracle's own
    assert weights.keys() == held.keys() == state_shapes(config).keys()
    for name, tensor in held.items():
        weights[name].copy_(tensor)
    assert relative(step(network), step(network_of(oracle))) <= limit
    cache = oracle_encode(oracle, torch.arange(30))
    assert relative(step(network), oracle_logits(oracle, torch.arange(8) * 7, cache)) <= 10 * limit


def test_other_activations_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", random_state(gguf_config()), gguf_config())
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="activations: 'int4' is none of int8, bf16"):
        load_network(checkpoint, CPU, torch.float32, activations="int4")


def test_routers_stay_exact(tmp_path: Path) -> None:
    """Even where a file has them in blocks: their choice is discrete."""
    formats = {"*.router.proj.weight": "Q8_0", "*.experts.*": "Q8_0"}
    write_gguf(tmp_path / "model.gguf", random_state(gguf_config()), gguf_config(), formats)
    network = load_network(open_checkpoint(tmp_path / "model.gguf"), CPU, torch.float32)
    for block in network.transformer.layers:
        assert isinstance(block.router.proj.weight, QuantizedTensor)


def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    state = random_state(gguf_config())
    del state["layers.2.mlp.up_proj.weight"]
    state["layers.2.self_attn.v_proj.weight"] = torch.zeros(32, 64)  # a full layer has none
    state["norm.weight"] = torch.zeros(63)
    with pytest.raises(CheckpointError) as caught:
        load_network(open_checkpoint(write_safetensors(tmp_path, state)), CPU, torch.float32)
    text = str(caught.value)
    assert "1 missing: layers.2.mlp.up_proj.weight" in text
    assert "1 left over: model.decoder.layers.2.self_attn.v_proj.weight" in text
    assert "1 wrongly shaped: norm.weight (the file has [63], the config asks for [64])" in text


def test_config_errors_come_through(tmp_path: Path) -> None:
    write_safetensors(tmp_path, random_state(gguf_config()))
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["attention_bias"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        load_network(open_checkpoint(tmp_path), CPU, torch.float32)
    assert str(caught.value).startswith(f"{tmp_path}: config.json: attention_bias is True")


def test_a_gguf_without_its_embedding(tmp_path: Path) -> None:
    state = random_state(gguf_config())
    del state["embed_tokens.weight"]
    write_gguf(tmp_path / "model.gguf", state, gguf_config())
    with pytest.raises(ConfigError, match=r"model\.gguf: token_embd\.weight is missing"):
        config_of(open_checkpoint(tmp_path / "model.gguf"))


def write_rotary(path: Path, pairs: int, **metadata: int) -> Path:
    """A GGUF file whose rope_freqs.weight lets so many of 16 pairs turn."""
    config = gguf_config()
    full = dataclasses.replace(config.layers[-1], rope_pairs=pairs)
    config = dataclasses.replace(config, layers=(*config.layers[:-1], full))
    write_gguf(path, random_state(config), config, extra=metadata)
    return path


@pytest.mark.parametrize("pairs", [1, 4, 16])
def test_rotary_factors_of_a_gguf(tmp_path: Path, pairs: int) -> None:
    checkpoint = open_checkpoint(write_rotary(tmp_path / "model.gguf", pairs))
    assert [layer.rope_pairs for layer in config_of(checkpoint).layers] == [8, 8, pairs]


def test_impossible_rotary_factors_are_refused(tmp_path: Path) -> None:
    key = {"diffusion-gemma.attention.key_length": 8}  # 4 pairs, of which 16 cannot turn
    checkpoint = open_checkpoint(write_rotary(tmp_path / "model.gguf", 16, **key))
    with pytest.raises(ConfigError, match="16 rotary pairs cannot turn in a head_dim of 8"):
        config_of(checkpoint)
    checkpoint = open_checkpoint(write_rotary(tmp_path / "none.gguf", 0))
    with pytest.raises(ConfigError, match=r"none\.gguf: rope_freqs\.weight"):
        config_of(checkpoint)


def test_expected_shapes() -> None:
    config = gguf_config()
    assert expected_shapes(config) == state_shapes(config)


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_what_needs_no_work_is_a_view_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(library, "kernels", None)  # which would want the blocks in panels
    state, config = random_state(gguf_config()), gguf_config()
    if kind == "gguf":
        write_gguf(tmp_path / "model.gguf", state, config, {"*.experts.*": "Q8_0"})
        checkpoint = open_checkpoint(tmp_path / "model.gguf")
    else:
        checkpoint = open_checkpoint(write_safetensors(tmp_path, state))
    assert config_of(checkpoint).layers == config.layers
    network = load_network(checkpoint, CPU, torch.float32)
    (file,) = checkpoint.files.values()
    start, size = file._bytes.data_ptr(), file._bytes.numel()
    weights = dict(network.transformer.named_parameters())
    for layer, block in enumerate(network.transformer.layers):
        experts = block.experts.gate_up_proj
        assert isinstance(experts, QuantizedTensor) == (kind == "gguf")
        weights[f"experts of {layer}"] = getattr(experts, "data", experts)
    assert len(weights) > 50
    for name, weight in weights.items():
        assert start <= weight.data_ptr() < start + size, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_after_loading(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = open_checkpoint(write_safetensors(tmp_path, random_state(gguf_config())))
    network = load_network(checkpoint, CPU, dtype)
    assert network.dtype == dtype and network.new_slot(4).read(0)[0].dtype == dtype
    for name, weight in network.transformer.named_parameters():
        exact = ".router." in name or weight.ndim == 1
        assert weight.dtype == (torch.float32 if exact else dtype), name
        assert not weight.requires_grad


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    state = random_state(gguf_config())
    checkpoint = open_checkpoint(write_safetensors(tmp_path, state))
    calls: list[tuple[int, int]] = []
    load_network(checkpoint, CPU, torch.float32, lambda done, total: calls.append((done, total)))
    sizes = sum(tensor.nbytes for tensor in state.values())
    assert calls[-1] == (sizes, sizes) and len(calls) == len(state)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


# Run in a process of its own: loads checkpoints, one after another, and prints of each how far the
# anonymous memory grew at most beyond where it began, in bytes, sampled by a thread and after every
# tensor.
MEASURE = """
import sys, threading, torch
from sfumato.model.loading import load_network
from sfumato.model.families import open_checkpoint

def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(l.split()[1]) * 1024 for l in lines if l.startswith("RssAnon"))

load = lambda path, dtype, progress: load_network(
    open_checkpoint(path), torch.device("cpu"), dtype, progress)
load(sys.argv[1], torch.float32, None)  # imports and caches are not the loader's
def sample(*_):
    global peak
    peak = max(peak, anonymous())
done = threading.Event()
def watch():
    while not done.wait(0.001):
        sample()
start = peak = anonymous()
thread = threading.Thread(target=watch)
thread.start()
for path, dtype in zip(sys.argv[2::2], sys.argv[3::2]):
    start = peak = anonymous()
    network = load(path, getattr(torch, dtype), sample)
    print(peak - start)
    del network
done.set()
thread.join()
"""


def growth(small: Path, *large: tuple[Path, str]) -> list[int]:
    """Of each file in a dtype, in one process; what has grown may not count for the next ones."""
    files = [str(part) for each in large for part in each]
    command = [sys.executable, "-c", MEASURE, str(small), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_the_bytes_are_foretold(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    config = gguf_config(hidden_size=256, num_heads=16)
    state = random_state(config, 24)
    if kind == "gguf":
        write_gguf(tmp_path / "model.gguf", state, config, MIXED)
    else:
        write_safetensors(tmp_path, state)
        tiny_config(hidden_size=256, num_attention_heads=16).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    network = load_network(checkpoint, CPU, dtype)
    kept = (*stored(network), *network.transformer.parameters(), *(network.head.output or ()))
    taken = sum(value.nbytes for value in kept)
    infos = checkpoint.tensors.items()
    assert sum(loaded_bytes(name, info, CPU, dtype) for name, info in infos) == taken


@compiled
@pytest.mark.parametrize("size", [32, 97, 200])  # three and a rest, one, or less
def test_the_output_is_the_embedding_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    config = gguf_config(hidden_size=256, num_heads=16)
    write_gguf(tmp_path / "model.gguf", random_state(config, 25), config, MIXED)
    monkeypatch.setattr("sfumato.model.loading.CHUNK", size)
    network = load_network(open_checkpoint(tmp_path / "model.gguf"), CPU, torch.float32)
    embedding, output = network.head.embedding, network.head.output
    assert isinstance(embedding, QuantizedTensor) and output is not None
    rows = [min(size, config.vocab_size - at) for at in range(0, config.vocab_size, size)]
    assert [chunk.shape for chunk in output] == [(n, 256) for n in rows]
    together = torch.cat([c.dequantize() for c in output if isinstance(c, PackedTensor)])
    assert relative(together, embedding.dequantize()) < 2**-11


@pytest.mark.parametrize("format", sorted(TARGETS))
def test_memory_at_full_size(format: str) -> None:
    """At most 12 % more than the file's tensors for the Q4_K_M mix, 35 % for any other."""
    checkpoint = random_checkpoint("26b-a4b", format)
    dtype = pick_dtype("auto", checkpoint, CPU)
    infos = checkpoint.tensors.items()
    taken = sum(loaded_bytes(name, info, CPU, dtype) for name, info in infos)
    limit = 1.12 if format == "q4_k_m" else 1.35
    assert taken <= limit * sum(info.nbytes for _, info in infos)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_peak_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 90 MB: what needs no work costs nothing, the rest its own size, once."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "expert_size": 512, "num_experts": 8}
    config = gguf_config(**sizes)
    state = {name: torch.full(shape, 0.01) for name, shape in state_shapes(config).items()}
    small, gguf, folder = tmp_path / "small.gguf", tmp_path / "large.gguf", tmp_path / "large"
    write_gguf(small, random_state(gguf_config()), gguf_config())
    write_gguf(gguf, state, config, {"*.experts.gate_up_proj": "Q8_0"})
    write_safetensors(folder, {name: tensor.bfloat16() for name, tensor in state.items()})
    tiny_config(
        hidden_size=512, intermediate_size=1024, moe_intermediate_size=512, num_experts=8
    ).save_pretrained(folder)
    size = (folder / "model.safetensors").stat().st_size
    assert 40e6 < size < 120e6 and 40e6 < gguf.stat().st_size < 120e6
    slack = 8 << 20  # the allocator's and Python's own
    if library.kernels is not None:
        blocks = sum(
            info.nbytes for info in open_checkpoint(gguf).tensors.values() if info.format == "Q8_0"
        )
        (grown,) = growth(small, (gguf, "float32"))
        assert blocks < grown <= 1.35 * blocks + slack
    monkeypatch.setenv("SFUMATO_ISA", "torch")
    *as_they_are, grown = growth(
        small, (gguf, "float32"), (folder, "bfloat16"), (folder, "float32")
    )
    assert max(as_they_are) < slack
    # bfloat16 to float32: every tensor copied, one at a time
    largest = 4 * max(tensor.numel() for tensor in state.values())
    assert size < grown <= 2 * size * 1.1 + largest
