"""Narrow checkpoints on a GPU whose kernels multiply them as they are: nothing is rounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.gguf_files import gguf_config, random_state
from tests.support.kernels import close, counted_launches, interpreted, seen_as
from tests.support.narrow_files import LAYOUTS, narrow_tensors, write_narrow
from torch import Tensor

from sfumato import ops
from sfumato.model.families import open_checkpoint
from sfumato.model.families.diffusion_gemma.config import hf_config
from sfumato.model.loading import load_network, loaded_bytes
from sfumato.model.network import Network
from sfumato.model.quantization import as_codes
from sfumato.ops import gpu, registry
from sfumato.ops.triton import self_test
from sfumato.ops.triton.planes import PlaneTensor
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.errors import CheckpointError
from sfumato.weights.formats import FORMATS, QuantizedTensor, ScaledTensor
from sfumato.weights.joined import JoinedTensor, NarrowPiece

CPU = torch.device("cpu")
CONFIG = gguf_config(hidden_size=64, intermediate_size=96, expert_size=32, vocab_size=64)
STATE = random_state(CONFIG, 5)
KINDS = {"fp8": "FP8", "int8": "INT8", "modelopt-fp8": "FP8"}


def opened(
    folder: Path, name: str, change: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor
) -> Checkpoint:
    """A checkpoint of STATE in a layout; change: what each tensor of the file becomes."""
    tensors = narrow_tensors(STATE, LAYOUTS[name])
    tensors = {at: change(at, tensor) for at, tensor in tensors.items()}
    return open_checkpoint(write_narrow(folder, tensors, LAYOUTS[name], hf_config(CONFIG)))


def values_of(checkpoint: Checkpoint, name: str) -> Tensor:
    """float32 [rows, columns], of the pieces of the file."""
    return torch.cat(
        [piece.read(checkpoint.files).dequantize() for piece in pieces_of(checkpoint, name)]
    )


def pieces_of(checkpoint: Checkpoint, name: str) -> list[NarrowPiece]:
    """The narrow matrices that a tensor is made of."""
    info = checkpoint.tensors[name]
    assert isinstance(info, JoinedTensor)
    return [each for each in info.pieces if isinstance(each, NarrowPiece)]


def serving(monkeypatch: pytest.MonkeyPatch, *operations: str) -> None:
    failed = ALL - set(operations)
    monkeypatch.setattr(self_test, "_failed", {CPU: dict.fromkeys(failed, "wrong")})
    monkeypatch.setattr(self_test, "_passed", {CPU: frozenset(operations)})


ALL = {f"{operation} {kind}" for operation in ("linear", "experts") for kind in ("FP8", "INT8")}


@interpreted
@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_codes_stay_codes(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the values of the file; formats and bytes are known before anything is read."""
    checkpoint = opened(tmp_path, name)
    serving(monkeypatch, *ALL)
    with seen_as("cpu", "cuda"):
        held = as_codes(checkpoint, lambda name: CPU)
        network = load_network(checkpoint, CPU, torch.float32)
        infos = held.tensors.items()
        foretold = {at: loaded_bytes(at, info, CPU, torch.float32) for at, info in infos}
    narrow = {at for at, info in held.tensors.items() if info.format == kind}
    assert narrow == {at for at in STATE if LAYOUTS[name].narrows.fullmatch(at)}
    for at, info in held.tensors.items():
        path, _, leaf = at.rpartition(".")
        weight = getattr(network.transformer.get_submodule(path), leaf)
        assert weight.nbytes == foretold[at], at
        assert isinstance(weight, ScaledTensor) == (at in narrow), at
        if at not in narrow:
            continue
        assert weight.kind == kind and info.nbytes == FORMATS["FP8"].nbytes(weight.shape)
        values = values_of(checkpoint, at)
        assert torch.equal(weight.dequantize().view(values.shape), values), at


NVFP4 = ("nvfp4", "modelopt-nvfp4")
WIDE = gguf_config(
    hidden_size=64,
    intermediate_size=128,
    expert_size=64,
    vocab_size=64,
    num_experts=4,
    layers=CONFIG.layers[1:],
)
"""Whose rows all divide into blocks of NVFP4."""
WIDE_STATE = random_state(WIDE, 5)
CACHED = 1e-3
"""The relative error of logits that numbers between two of a bfloat16 cache make, where kernels
round otherwise."""


def opened_nvfp4(folder: Path, name: str) -> Checkpoint:
    tensors = narrow_tensors(WIDE_STATE, LAYOUTS[name])
    return open_checkpoint(write_narrow(folder, tensors, LAYOUTS[name], hf_config(WIDE)))


def check_numbers(checkpoint: Checkpoint, name: str, network: Network, kind: type, at: str) -> None:
    """A tensor of a network has the file's numbers, in its bytes."""
    path, _, leaf = at.rpartition(".")
    weight = getattr(network.transformer.get_submodule(path), leaf)
    assert isinstance(weight, kind), at
    stored = sum(info.nbytes for info in checkpoint.tensors[at].stored)
    values = values_of(checkpoint, at)
    assert weight.nbytes <= stored + 4 * len(values)
    dequantized = weight.dequantize().view(values.shape)
    torch.testing.assert_close(dequantized, values, rtol=2e-7, atol=0)


@interpreted
@pytest.mark.parametrize("name", NVFP4)
def test_nvfp4_gets_planes_of_its_own(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the file's numbers in its bytes; a CPU reads the nearest blocks of the same file."""
    checkpoint = opened_nvfp4(tmp_path, name)
    serving(monkeypatch, "linear NVFP4", "experts NVFP4")
    with seen_as("cpu", "cuda"):
        held = as_codes(checkpoint, lambda _: CPU)
        network = load_network(checkpoint, CPU, torch.float32)
    narrow = {at for at, info in held.tensors.items() if info.format == "NVFP4"}
    assert narrow == {at for at in WIDE_STATE if LAYOUTS[name].narrows.fullmatch(at)}
    for at in narrow:
        check_numbers(checkpoint, name, network, PlaneTensor, at)
    with seen_as("cpu", "cuda"), counted_launches() as launches:
        ours = logits(network)
    assert launches["experts_gate_up_planes"] == 2 * len(WIDE.layers)
    with registry.reference_only():
        close(ours, logits(network), CACHED)
    close(ours, logits(load_network(checkpoint, CPU, torch.float32)), 0.2)  # Q8_0 rounds


@interpreted
def test_what_takes_the_place_of_failed_kernels_is_tested_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights fill the memory: blocks in place of NVFP4 as it is."""
    checkpoint, tested = opened_nvfp4(tmp_path, "nvfp4"), list[set[str]]()

    def fails(device: torch.device, hidden: int, formats: frozenset[str]) -> None:
        tested.append(set(formats))
        names = (f"{operation} {each}" for operation in ("linear", "experts") for each in formats)
        monkeypatch.setattr(self_test, "_failed", {CPU: dict.fromkeys(names, "wrong")})

    def moves(device: torch.device) -> None:
        raise InterruptedError

    monkeypatch.setattr(self_test, "_failed", {})
    monkeypatch.setattr(self_test, "_passed", {CPU: frozenset()})
    monkeypatch.setattr(gpu, "is_gpu", lambda device: True)
    monkeypatch.setattr(ops, "prepare", fails)
    monkeypatch.setattr("sfumato.model.loading.Mover", moves)
    with seen_as("cpu", "cuda"), pytest.raises(InterruptedError):
        load_network(checkpoint, CPU, torch.float32)
    assert ["NVFP4" in each for each in tested] == [True, True]
    assert ["Q8_0" in each for each in tested] == [False, True]


@interpreted
def test_without_their_kernels_they_become_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernels of one operation failed, its weights; on a CPU all."""
    checkpoint = opened(tmp_path, "fp8")
    serving(monkeypatch, "linear FP8")
    assert as_codes(checkpoint, lambda name: CPU) is checkpoint
    with seen_as("cpu", "cuda"):
        held = as_codes(checkpoint, lambda name: CPU)
    layer = "layers.1."
    assert held.tensors[f"{layer}self_attn.q_proj.weight"].format == "FP8"
    assert held.tensors[f"{layer}experts.down_proj"].format == "Q8_0"
    assert isinstance(held.read(f"{layer}experts.down_proj"), QuantizedTensor)
    other = torch.device("meta")  # of no kernels, as the CPU of layers whose experts stay there
    serving(monkeypatch, *ALL)
    with seen_as("cpu", "cuda"):
        held = as_codes(checkpoint, lambda name: other if name.startswith(layer) else CPU)
    assert held.tensors[f"{layer}experts.down_proj"].format == "Q8_0"
    assert held.tensors["layers.0.experts.down_proj"].format == "FP8"


@interpreted
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_forward_multiplies_codes(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = opened(tmp_path, name)
    serving(monkeypatch, *ALL)
    with seen_as("cpu", "cuda"), counted_launches() as launches:
        network = load_network(checkpoint, CPU, torch.float32)
        layer = network.transformer.layers[0]
        x = torch.randn(6, 64)
        weight = layer.self_attn.q_proj.weight
        close(ops.linear(x, weight), x @ weight.dequantize().T, 0.05)
        assert launches[f"linear_{name}"] == launches[f"round_rows_{name}"] == 1


INT4 = frozenset(("linear INT4", "experts INT4"))


def logits(network: Network) -> Tensor:
    slot = network.new_slot(40)
    network.encode([torch.arange(10)], [slot])
    return network.head.logits(network.denoise([torch.arange(4) * 7], [slot]))


@interpreted
def test_int4_keeps_its_scales_in_planes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size: float16 holds none of these. In no more memory than the file's tensors."""
    sizes = {"q_proj": 1e-9, "down_proj": 1e9}

    def scaled(at: str, tensor: Tensor) -> Tensor:
        factor = next((size for part, size in sizes.items() if part in at), 1.0)
        return tensor * factor if at.endswith("weight_scale") else tensor

    checkpoint = opened(tmp_path, "int4", scaled)
    serving(monkeypatch, *INT4)
    with seen_as("cpu", "cuda"):
        held = as_codes(checkpoint, lambda name: CPU)
        network = load_network(checkpoint, CPU, torch.float32)
        infos = held.tensors.items()
        foretold = {at: loaded_bytes(at, info, CPU, torch.float32) for at, info in infos}
    int4 = {at for at, info in held.tensors.items() if info.format == "INT4"}
    assert int4 == {at for at in STATE if LAYOUTS["int4"].narrows.fullmatch(at)}
    assert as_codes(checkpoint).tensors == held.tensors
    for at in int4:
        path, _, leaf = at.rpartition(".")
        weight = getattr(network.transformer.get_submodule(path), leaf)
        assert isinstance(weight, PlaneTensor) and weight.nbytes == foretold[at], at
        values = values_of(checkpoint, at)
        assert torch.equal(weight.dequantize().view(values.shape), values), at
        pieces = pieces_of(checkpoint, at)
        stored = sum(piece.tensors[r].nbytes for piece in pieces for r in ("codes", "scale"))
        assert weight.nbytes <= 1.03 * stored, at
    with pytest.raises(CheckpointError, match="too large for a block's float16"):
        load_network(checkpoint, CPU, torch.float32)


def test_int4_keeps_its_scales_on_a_gpu_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks, which torch dequantizes: those of Q4_0 would refuse these scales."""
    checkpoint = opened(tmp_path, "int4", lambda at, tensor:
                        tensor * 1e9 if at.endswith("weight_scale") else tensor)  # fmt: skip
    serving(monkeypatch)
    monkeypatch.setattr(self_test, "_failed", {CPU: dict.fromkeys(INT4, "wrong")})
    name = "layers.0.experts.gate_up_proj"
    with seen_as("cpu", "cuda"):
        held = as_codes(checkpoint, lambda _: CPU)
        network = load_network(checkpoint, CPU, torch.float32)
        foretold = loaded_bytes(name, held.tensors[name], CPU, torch.float32)
    weight = network.transformer.layers[0].experts.gate_up_proj
    assert isinstance(weight, QuantizedTensor) and weight.format.name == "INT4"
    assert weight.nbytes == foretold
    values = values_of(checkpoint, name)
    assert torch.equal(weight.dequantize().view(values.shape), values)


@interpreted
def test_int4_in_planes_gives_the_logits_of_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sfumato.ops.cpu.library.kernels", None)
    checkpoint = opened(tmp_path, "int4")
    with registry.reference_only():
        expected = logits(load_network(checkpoint, CPU, torch.float32))
    serving(monkeypatch, *INT4)
    with seen_as("cpu", "cuda"), counted_launches() as launches:
        network = load_network(checkpoint, CPU, torch.float32)
        close(logits(network), expected)
    assert launches["linear_planes"] and launches["experts_gate_up_planes"]
    assert launches["experts_gate_up_planes"] == launches["experts_down_planes"]


@interpreted
@pytest.mark.parametrize(
    ("dtype", "format"), [(torch.float16, "Q4_0"), (torch.float32, "Q4_0"), (None, "INT4")]
)
def test_scales_that_are_not_bfloat16_are_those_of_blocks(
    tmp_path: Path, dtype: torch.dtype | None, format: str
) -> None:
    """bfloat16 would round them. Those of one stack are of one dtype, on every device."""

    def cast(at: str, tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if dtype and at.endswith("weight_scale") else tensor

    name = "layers.0.experts.gate_up_proj"
    with seen_as("cpu", "cuda"):
        checkpoint = opened(tmp_path, "int4", cast)
        assert as_codes(checkpoint, lambda name: CPU).tensors[name].format == format

    def mixed(at: str, tensor: Tensor) -> Tensor:
        return tensor.to(other) if "experts.1.down_proj.weight_scale" in at else cast(at, tensor)

    other = torch.float32 if dtype == torch.float16 else torch.float16
    with pytest.raises(CheckpointError, match="mixed stacks are not read"):
        opened(tmp_path, "int4", mixed)
