"""The same network on a CPU and on a GPU gives the same: passes, statistics, whole replies.

Each test also runs with the CPU on both sides, so that one which cannot run here is known to work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import one_row
from tests.support.denoise import denoise_step
from tests.support.gguf_files import gguf_config, random_state, write_gguf
from tests.support.soft_of import soft_of
from torch import Tensor

import sfumato
from sfumato import SamplerConfig
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import LogitBias
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.model.cache import Slot
from sfumato.model.families import open_checkpoint
from sfumato.model.layer_devices import Placement
from sfumato.model.loading import config_of, load_network
from sfumato.model.network import Network
from sfumato.ops.cpu import library
from sfumato.train.recipe import EMBEDDED, initialised, save_checkpoint
from sfumato.train.vocabulary import write_text_side
from sfumato.weights.formats import QuantizedTensor

_NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _NEEDS_CUDA])]
)

QUANTIZED = {
    "embed_tokens.weight": "Q6_K",
    "*.experts.gate_up_proj": "Q4_K",
    "*.experts.down_proj": "IQ4_XS",
    "*.self_attn.*_proj.weight": "Q8_0",
    "*mlp.*_proj.weight": "Q5_K",
    "self_conditioning.*_proj.weight": "Q5_1",
}
PROMPTS = [torch.arange(27) * 5 % 97, torch.arange(3) + 40]
CANVASES = [torch.arange(8) * 9, torch.arange(6) * 7 + 3]


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, too: its compiled operations round activations."""
    monkeypatch.setattr(library, "kernels", None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One random network, float or quantized; and, with two experts that are always both active,
    the weights of each half precision: rounding cannot decide between experts there."""
    folder = tmp_path_factory.mktemp("gpu")
    some = gguf_config(256, 256, 256)
    every = replace(some, num_experts=2, experts_per_token=2)
    kinds = {"float32": (some, {}), "quantized": (some, QUANTIZED)}
    kinds |= {"bfloat16": (every, {"*": "BF16"}), "float16": (every, {"*": "F16"})}
    for kind, (config, formats) in kinds.items():
        write_gguf(folder / f"{kind}.gguf", random_state(config), config, formats)
    return {kind: folder / f"{kind}.gguf" for kind in kinds}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained checkpoint with a text side."""
    folder = tmp_path_factory.mktemp("chat")
    network = initialised(EMBEDDED, torch.Generator().manual_seed(0))
    with torch.no_grad():
        network.embed_tokens.weight.mul_(20)  # or every token would be as likely as any other
    save_checkpoint(network, folder)
    write_text_side(folder)
    return folder


def load(path: Path, device: str, dtype: torch.dtype = torch.float32) -> Network:
    """The network, with a head that takes several chunks to see the whole vocabulary."""
    network = load_network(open_checkpoint(path), torch.device(device), dtype)
    network.head = replace(network.head, chunk=40)
    return network


def passes(network: Network) -> tuple[list[Tensor], list[Slot]]:
    """What each denoising pass of two rows finds, without and with a soft embedding, and the
    slots, which hold what encoding them gave."""
    slots = [network.new_slot(40) for _ in PROMPTS]
    network.encode(PROMPTS, slots, chunk=16)
    soft = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    hidden = [network.denoise(CANVASES, slots, softs) for softs in (None, [soft, None])]
    return hidden, slots


def cached(network: Network, slots: list[Slot]) -> list[Tensor]:
    layers = range(len(network.config.layers))
    return [part for slot in slots for layer in layers for part in slot.read(layer)]


def weights(network: Network) -> Iterator[Tensor | QuantizedTensor]:
    """All of them: quantized ones are plain attributes of their modules."""
    yield from network.transformer.parameters()
    for module in network.transformer.modules():
        yield from (v for v in vars(module).values() if isinstance(v, QuantizedTensor))


def assert_close(on_device: Tensor, on_cpu: Tensor, device: str) -> None:
    assert on_device.device.type == device
    torch.testing.assert_close(on_device.cpu(), on_cpu, rtol=1e-4, atol=1e-4)


@devices
@pytest.mark.parametrize("kind", ["bfloat16", "quantized"])
def test_layers_that_stream_change_no_bit(files: dict[str, Path], kind: str, device: str) -> None:
    """Twice, since the first pass finds empty buffers; with more than the two that these hold."""
    checkpoint, at = open_checkpoint(files[kind]), torch.device(device)
    count = len(config_of(checkpoint).layers)
    placement = Placement(at, (at,) * count, (at,) * count, tuple(range(count)))
    streamed = load_network(checkpoint, at, torch.bfloat16, placement=placement)
    assert count > len(streamed.transformer.streams[0].buffers)
    expected, _ = passes(load(files[kind], device, torch.bfloat16))
    for _ in range(2):
        states, _ = passes(streamed)
        assert all(torch.equal(a, b) for a, b in zip(states, expected, strict=True))


@devices
@pytest.mark.parametrize("kind", ["float32", "quantized"])
def test_passes_agree(files: dict[str, Path], kind: str, device: str) -> None:
    on_cpu, on_device = load(files[kind], "cpu"), load(files[kind], device)
    assert {weight.device.type for weight in weights(on_device)} == {device}
    assert any(isinstance(w, QuantizedTensor) for w in weights(on_device)) == (kind == "quantized")
    (expected, slots), (states, slots_there) = passes(on_cpu), passes(on_device)
    for a, b in zip(cached(on_device, slots_there), cached(on_cpu, slots), strict=True):
        assert_close(a, b, device)
    for a, b in zip(states, expected, strict=True):
        assert_close(a, b, device)


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_further_from_exact(
    files: dict[str, Path], dtype: torch.dtype, device: str
) -> None:
    path = files[str(dtype).removeprefix("torch.")]
    runs = [load(path, "cpu"), load(path, "cpu", dtype), load(path, device, dtype)]
    exact, on_cpu, on_device = (passes(network)[0] for network in runs)
    for a, b, c in zip(exact, on_cpu, on_device, strict=True):
        assert (c.device.type, c.dtype) == (device, dtype)
        errors = [float((x.cpu().float() - a).norm() / a.norm()) for x in (b, c)]
        assert errors[1] < 1.5 * errors[0] + torch.finfo(dtype).eps


CONFIGS = {
    "plain": SamplerConfig(),
    "adjusted": SamplerConfig(processors=(LogitBias({3: 4.0, 50: float("-inf")}),)),
    "top-k": SamplerConfig(top_k=3, temperature=0.5),
    "top-p": SamplerConfig(top_p=0.6),
    "all": SamplerConfig(top_k=20, top_p=0.9, processors=(LogitBias({7: 2.0}),)),
}


def canvases(network: Network, config: SamplerConfig) -> list[Canvas]:
    """Two rows under distributions of their own."""
    configs = [replace(c.over(REFERENCE), canvas_length=8) for c in (config, SamplerConfig())]
    return [
        Canvas(c, Noise(seed, 0), network.config.vocab_size, network.device, pinned={2: 5})
        for seed, c in enumerate(configs)
    ]


@devices
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", ["float32", "quantized"])
def test_statistics_agree(
    files: dict[str, Path], kind: str, config: SamplerConfig, device: str
) -> None:
    """Of the same hidden states: the same tokens, and distributions equal within float32."""
    networks = [load(files[kind], "cpu"), load(files[kind], device)]
    hidden = torch.randn(16, 256, generator=torch.Generator().manual_seed(2))
    scored = [one_row.score(n.head, hidden.to(n.device), canvases(n, config)) for n in networks]
    for rows in zip(*scored, strict=True):
        # Which of the banned tokens come last among the most probable is not defined.
        clear = [replace(s, top_ids=s.top_ids.masked_fill(s.top_probs == 0, -1)) for s in rows]
        for field in fields(clear[0]):
            on_cpu, on_device = (getattr(stats, field.name) for stats in clear)
            if on_cpu is not None:
                assert_close(on_device, on_cpu, device)


@devices
def test_a_step_leaves_everything_where_it_belongs(files: dict[str, Path], device: str) -> None:
    """The canvas's state on the network's device; drafts, which are for the caller, on the CPU."""
    results = []
    for network in (load(files["float32"], "cpu"), load(files["float32"], device)):
        slots, rows = [network.new_slot(40) for _ in PROMPTS], canvases(network, CONFIGS["all"])
        network.encode(PROMPTS, slots)
        for _ in range(2):
            drafts = denoise_step(network, rows, slots)
        results.append((rows, drafts))
    (rows, drafts), (rows_there, drafts_there) = results
    for on_cpu, on_device in zip(rows, rows_there, strict=True):
        assert_close(on_device.tokens, on_cpu.tokens, device)
        assert_close(on_device.history, on_cpu.history, device)
        assert_close(soft_of(on_device), soft_of(on_cpu), device)
    for one, other in zip(drafts, drafts_there, strict=True):
        assert torch.equal(other.token_ids, one.token_ids)
        assert torch.equal(other.accepted, one.accepted)
        assert_close(other.entropy, one.entropy, "cpu")


@devices
@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.8, "temperature": 0.7}])
def test_whole_replies_are_the_same(chat: Path, options: dict[str, Any], device: str) -> None:
    config = SamplerConfig(max_steps=6, **options)
    models = [sfumato.load(chat, device=where, dtype="float32") for where in ("cpu", device)]
    on_cpu, on_device = (
        m.generate("What is the capital of France?", max_tokens=70, seed=3, sampler=config)
        for m in models
    )
    assert models[1].network.device.type == device
    assert on_cpu.stats.canvases > 1 and on_cpu.text
    assert (on_device.text, on_device.token_ids) == (on_cpu.text, on_cpu.token_ids)
    assert on_device.stats.steps == on_cpu.stats.steps
