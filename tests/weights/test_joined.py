"""Published layouts become the network's tensors; what does not fit is refused by name."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.gguf_files import gguf_config, random_state
from tests.support.narrow_files import (
    LAYOUTS,
    Layout,
    Tensors,
    narrow_tensors,
    with_config,
    write_narrow,
)
from torch import Tensor

from sfumato.model.families import open_checkpoint
from sfumato.model.families.diffusion_gemma.config import hf_config
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.errors import CheckpointError
from sfumato.weights.files import safetensors
from sfumato.weights.formats import FORMATS, QuantizedTensor
from sfumato.weights.joined import JoinedTensor

CONFIG = gguf_config(hidden_size=256, intermediate_size=96, expert_size=32)
STATE = random_state(CONFIG)
SHAPES = {name: tuple(value.shape) for name, value in STATE.items()}
DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."
EXPERT = "model.decoder.layers.1.experts.3."


@cache
def tensors_of(name: str) -> Tensors:
    """STATE in the layout of that name."""
    return narrow_tensors(STATE, LAYOUTS[name])


def opened(folder: Path, tensors: Tensors, layout: Layout) -> Checkpoint:
    return open_checkpoint(write_narrow(folder, tensors, layout, hf_config(CONFIG, "bfloat16")))


def values(checkpoint: Checkpoint, name: str) -> Tensor:
    value = checkpoint.read(name)
    assert tuple(value.shape) == checkpoint.tensors[name].shape
    assert value.nbytes == checkpoint.tensors[name].nbytes
    return value.dequantize() if isinstance(value, QuantizedTensor) else value.float()


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_published_layouts(tmp_path: Path, name: str) -> None:
    checkpoint = opened(tmp_path, tensors_of(name), LAYOUTS[name])
    checkpoint.check_tensors(SHAPES)
    most = 0.12 if "4" in name else 0.03
    for tensor, value in STATE.items():
        error = (values(checkpoint, tensor) - value).norm() / value.norm().clamp(min=1e-9)
        narrow = LAYOUTS[name].narrows.fullmatch(tensor) is not None
        is_joined = isinstance(checkpoint.tensors[tensor], JoinedTensor)
        assert is_joined == narrow == (not checkpoint.is_view(tensor))
        assert error < (most if narrow else 0.005), tensor
        blocks = b"".join(part.numpy().tobytes() for part in checkpoint.recoded(tensor, "F32"))
        exact = torch.frombuffer(bytearray(blocks), dtype=torch.float32).view(value.shape)
        torch.testing.assert_close(values(checkpoint, tensor), exact, atol=0.01, rtol=0)
        checkpoint.prefetch(tensor)
    infos = checkpoint.tensors.values()
    formats = {info.format for info in infos if isinstance(info, JoinedTensor)}
    assert formats <= {"Q8_0", "Q4_0", "Q6_K"}


def test_experts_are_stacked_in_order(tmp_path: Path) -> None:
    """Each expert's gate lies before its up projection, by number and not by name."""
    tensors = dict(reversed(tensors_of("fp8").items()))
    checkpoint = opened(tmp_path, tensors, LAYOUTS["fp8"])
    for name in ("layers.1.experts.gate_up_proj", "layers.2.experts.down_proj"):
        error = (values(checkpoint, name) - STATE[name]).norm(dim=(1, 2))
        assert (error < 0.04 * STATE[name].norm(dim=(1, 2))).all()


def test_tied_copies_stand_in_module_by_module(tmp_path: Path) -> None:
    tensors = dict(tensors_of("fp8"))
    module = "layers.0.self_attn.q_proj."
    for leaf in ("weight", "weight_scale"):
        tensors[f"{ENCODER}{module}{leaf}"] = tensors.pop(f"{DECODER}{module}{leaf}")
    copied = f"{ENCODER}layers.1.self_attn.q_proj."
    tensors[copied + "weight"] = tensors[f"{DECODER}layers.0.self_attn.k_proj.weight"]
    tensors[copied + "weight_scale"] = torch.ones(1)
    checkpoint = opened(tmp_path, tensors, LAYOUTS["fp8"])
    checkpoint.check_tensors(SHAPES)
    for index in (0, 1):
        name = f"layers.{index}.self_attn.q_proj.weight"
        assert (values(checkpoint, name) - STATE[name]).norm() < 0.03 * STATE[name].norm()


def changed(name: str, **changes: Tensor | None) -> Tensors:
    """A layout's tensors with others of one expert's down projection; None: it is missing."""
    tensors = dict(tensors_of(name))
    for leaf, value in changes.items():
        tensors.pop(f"{EXPERT}down_proj.{leaf}", None)
        if value is not None:
            tensors[f"{EXPERT}down_proj.{leaf}"] = value
    return tensors


FP8 = torch.ones(256, 32).to(torch.float8_e4m3fn)
INT4 = torch.zeros(256, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("fp8", {"weight": None, "weight_scale": None}, "1 missing: .*experts.3.down_proj.weight"),
        ("fp8", {"weight": None}, r"experts.3.down_proj.weight' is missing"),
        ("fp8", {"weight_scale": None}, r"down_proj.weight_scale' is missing"),
        ("fp8", {"weight": torch.ones(256, 32).bfloat16()}, "is BF16, where .* has F8_E4M3: mixed"),
        ("fp8", {"weight": FP8[:128]}, r"down_proj.weight_scale' has the shape \[256, 1\], where"),
        ("fp8", {"weight": FP8[None]}, r"has the shape \[1, 256, 32\], and is no matrix"),
        ("fp8", {"weight_scale": torch.ones(256, 2)}, r"has the shape \[256, 2\]"),
        ("fp8", {"weight_scale": torch.ones(256, 1).int()}, "weight_scale' is I32, where"),
        ("fp8", {"weight_zero_point": torch.ones(256, 1)}, "weight_zero_point' is left over"),
        ("fp8", {"weight": FP8[:, :16]}, r"FP8 \[256, 16\], beside .* FP8 \[256, 32\]: mixed"),
        ("int4", {"weight_packed": INT4[:, :3]}, r"weight_scale' has the shape \[256, 1\], where"),
        ("int4", {"weight_packed": INT4.to(torch.uint8)}, "is U8, where .* has I32"),
        ("int4", {"weight_scale": torch.ones(256, 2)}, r"has \[256, 32 / 32\] for 32 columns"),
        ("int4", {"weight_shape": None}, "weight_shape' is missing"),
        ("int4", {"weight_shape": torch.ones(3).long()}, r"is I64 \[3\], and not two integers"),
        ("nvfp4", {"weight_global_scale": None}, "weight_global_scale' is missing"),
        ("nvfp4", {"weight_global_scale": torch.ones(2)}, r"is F32 \[2\], and not one float"),
        ("nvfp4", {"weight_scale": torch.ones(256, 2)}, "weight_scale' is F32, where .* F8_E4M3"),
        ("modelopt-nvfp4", {"weight_scale_2": None}, "weight_scale_2' is missing"),
        ("modelopt-nvfp4", {"weight_scale_2": torch.ones(1).int()}, r"is I32 \[1\], and not one"),
        ("modelopt-nvfp4", {"weight_scale": FP8[:, :1]}, r"has \[256, 32 / 16\] for 32 columns"),
        ("modelopt-nvfp4", {"pre_quant_scale": torch.ones(32)}, "pre_quant_scale' is left over"),
        ("modelopt-fp8", {"weight_scale": None}, "weight_scale' is missing"),
        ("int8", {"weight_scale": None}, "weight_scale' is missing"),
        ("int8", {"weight": FP8}, "is F8_E4M3, where .* has I8: mixed formats"),
        ("int8", {"weight_scale": torch.ones(32, 1)}, r"has the shape \[32, 1\], where"),
        ("int4", {"weight_scale": None}, "weight_scale' is missing"),
        ("int4", {"weight_g_idx": torch.zeros(32).int()}, "weight_g_idx' is left over"),
        ("nvfp4", {"weight_packed": None}, "weight_packed' is missing"),
        # Of one expert otherwise than of the others.
        ("fp8", {"weight_scale": torch.ones(1)}, r"weight_scale' is \S+ \[1\], beside .*: mixed"),
        ("int8", {"weight_scale": torch.ones(256, 1).half()}, r"is F16 \[256, 1\], beside .*mixed"),
        ("int4", {"weight_shape": torch.tensor([256, 32]).int()}, "is I32 .* which is I64"),
        ("nvfp4", {"weight_global_scale": torch.ones(1).half()}, "is F16 .* which is F32"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        opened(tmp_path, changed(name, **changes), LAYOUTS[name])
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "leaf", "value", "words"),
    [
        ("fp8", "weight_scale", torch.full((256, 1), torch.nan), "holds NaN or infinity"),
        ("fp8", "weight_scale", torch.full((256, 1), torch.inf), "holds NaN or infinity"),
        ("fp8", "weight_scale", torch.full((256, 1), -1.0), "holds negative scales"),
        ("fp8", "weight_scale", torch.zeros(256, 1), "holds zeros for codes that are not zero"),
        ("int8", "weight_scale", torch.full((256, 1), torch.nan), "holds NaN or infinity"),
        ("int8", "weight_scale", torch.eye(256)[:, :1], "holds zeros for codes that are not zero"),
        ("int4", "weight_scale", torch.full((256, 1), torch.inf), "holds NaN or infinity"),
        ("int4", "weight_scale", torch.full((256, 1), -1.0), "holds negative scales"),
        ("int4", "weight_scale", torch.eye(256)[:, :1], "holds zeros for codes that are not zero"),
        ("nvfp4", "weight_scale", torch.full((256, 2), torch.nan), "holds NaN or infinity"),
        ("nvfp4", "weight_scale", torch.full((256, 2), -1.0), "holds negative scales"),
        ("nvfp4", "weight_scale", torch.zeros(256, 2), "holds zeros for codes that are not zero"),
        ("modelopt-fp8", "weight_scale", torch.tensor(-1.0), "holds negative scales"),
        ("modelopt-fp8", "weight_scale", torch.tensor(0.0), "holds zeros for codes that are not"),
        ("fp8", "weight", torch.full((256, 32), torch.nan).to(torch.float8_e4m3fn), "holds NaN"),
        ("int4", "weight_shape", torch.tensor([256, 31]), r"says \[256, 31\], and the codes are"),
        ("int4", "weight_scale", torch.full((256, 1), 1e9), "too large for a block's float16"),
        ("nvfp4", "weight_global_scale", torch.zeros(1), "is zero"),
        ("nvfp4", "weight_global_scale", torch.tensor([1e-44]), "makes scales infinite"),
        ("nvfp4", "weight_global_scale", torch.tensor([-1.0]), "holds negative scales"),
        ("nvfp4", "weight_global_scale", torch.tensor([torch.inf]), "holds NaN or infinity"),
        ("modelopt-nvfp4", "weight_scale_2", torch.tensor(0.0), "is zero"),
        ("modelopt-nvfp4", "weight_scale_2", torch.tensor(-1.0), "holds negative scales"),
        ("modelopt-nvfp4", "weight_scale_2", torch.tensor(torch.nan), "holds NaN or infinity"),
    ],
)
def test_values_that_are_none(
    tmp_path: Path, name: str, leaf: str, value: Tensor, words: str
) -> None:
    """Known when the tensor is read, and named."""
    value = value.to(tensors_of(name)[f"{EXPERT}down_proj.{leaf}"].dtype)
    checkpoint = opened(tmp_path, changed(name, **{leaf: value}), LAYOUTS[name])
    stem = f"tensor '{EXPERT}down_proj.*{words}"
    with pytest.raises(CheckpointError, match=stem):
        checkpoint.read("layers.1.experts.down_proj")
    checkpoint.read("layers.0.experts.down_proj")


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_experts_that_are_left_over_or_missed(tmp_path: Path, name: str) -> None:
    tensors, up = dict(tensors_of(name)), f"{EXPERT}up_proj."
    leaves = [tensor.removeprefix(up) for tensor in tensors if tensor.startswith(up)]
    assert len(leaves) >= 2
    for leaf in leaves:
        tensors[f"{DECODER}layers.1.experts.8.up_proj.{leaf}"] = tensors[up + leaf]
    with pytest.raises(CheckpointError, match=r"1 left over: \S*layers.1.experts.8.up_proj.weight"):
        opened(tmp_path, tensors, LAYOUTS[name])
    rest = {n: t for n, t in tensors_of(name).items() if not n.startswith(up)}
    with pytest.raises(CheckpointError, match=r"1 missing: \S*layers.1.experts.3.up_proj.weight"):
        opened(tmp_path / "other", rest, LAYOUTS[name])


def test_a_scale_of_the_matrix_that_makes_others_zero(tmp_path: Path) -> None:
    scales = torch.ones(256, 2)
    scales[5, 1] = 2.0**-9
    changes = {"weight_scale": scales.to(torch.float8_e4m3fn)}
    tensors = changed("modelopt-nvfp4", **changes, weight_scale_2=torch.tensor(1e-45))
    checkpoint = opened(tmp_path, tensors, LAYOUTS["modelopt-nvfp4"])
    with pytest.raises(CheckpointError, match="weight_scale_2' makes scales zero"):
        checkpoint.read("layers.1.experts.down_proj")


@pytest.mark.parametrize(
    ("name", "leaf"),
    [("modelopt-fp8", "input_scale"), ("nvfp4", "input_global_scale"), ("fp8", "output_scale")],
)
def test_a_left_over_scale_of_activations(tmp_path: Path, name: str, leaf: str) -> None:
    tensors = dict(tensors_of(name))
    tensors[f"{DECODER}layers.1.self_attn.k_scale"] = torch.ones(1)  # stands beside no weight
    opened(tmp_path / "sound", tensors, LAYOUTS[name])
    tensors[f"{DECODER}layers.1.experts.8.up_proj.{leaf}"] = torch.ones(1)
    with pytest.raises(CheckpointError, match=rf"experts.8.up_proj.{leaf}' is left over"):
        opened(tmp_path / "other", tensors, LAYOUTS[name])


def test_a_left_over_module(tmp_path: Path) -> None:
    tensors = dict(tensors_of("fp8"))
    for leaf in ("weight", "weight_scale"):
        tensors[f"{DECODER}layers.7.mlp.up_proj.{leaf}"] = tensors[f"{EXPERT}up_proj.{leaf}"]
    with pytest.raises(CheckpointError, match=r"1 left over: layers.7.mlp.up_proj.weight"):
        opened(tmp_path, tensors, LAYOUTS["fp8"]).check_tensors(SHAPES)


@pytest.mark.parametrize("module", ["layers.0.router.proj", "embed_tokens"])
def test_what_is_read_in_full_precision_alone(tmp_path: Path, module: str) -> None:
    tensors = dict(tensors_of("fp8"))
    encoded = LAYOUTS["fp8"].encode(STATE[f"{module}.weight"])
    tensors |= {f"{DECODER}{module}.{leaf}": value for leaf, value in encoded.items()}
    layout = with_config(LAYOUTS["fp8"], ignore=[])
    with pytest.raises(CheckpointError, match=f"{module}.weight' is FP8, and is read in full"):
        opened(tmp_path, tensors, layout)


@pytest.mark.parametrize("rule", [r"re:.*layers\.2\.mlp", f"{ENCODER}layers.1.mlp.up_proj"])
def test_an_ignored_module_that_is_narrow(tmp_path: Path, rule: str) -> None:
    layout = with_config(LAYOUTS["fp8"], ignore=["lm_head", rule])
    with pytest.raises(CheckpointError, match=r"ignore: has '\S*mlp.\S*', which is stored as FP8"):
        opened(tmp_path, tensors_of("fp8"), layout)


def test_a_config_without_narrow_tensors(tmp_path: Path) -> None:
    plain = {n: t for n, t in tensors_of("fp8").items() if "_proj" not in n}
    with pytest.raises(CheckpointError, match="but no tensor of the network is stored so"):
        opened(tmp_path, plain, LAYOUTS["fp8"])


def test_the_config_is_refused_before_the_files_are_opened(tmp_path: Path) -> None:
    layout = with_config(LAYOUTS["fp8"], quant_method="gptq")
    write_narrow(tmp_path, {"a": torch.ones(1)}, layout, hf_config(CONFIG, "bfloat16"), shards=1)
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="quant_method is 'gptq'"):
        open_checkpoint(tmp_path)


def test_headers_that_are_too_large_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_narrow(
        tmp_path, tensors_of("fp8"), LAYOUTS["fp8"], hf_config(CONFIG, "bfloat16"), shards=3
    )
    sizes = [struct.unpack("<Q", f.read_bytes()[:8])[0] for f in folder.glob("*.safetensors")]
    monkeypatch.setattr(safetensors, "MAX_HEADERS", sum(sizes))
    open_checkpoint(folder)
    monkeypatch.setattr(safetensors, "MAX_HEADERS", sum(sizes) - 1)
    with pytest.raises(CheckpointError, match=f"header length: {sum(sizes)} bytes together"):
        open_checkpoint(folder)


def test_reading_takes_one_matrix_at_a_time(tmp_path: Path) -> None:
    """A stack's parts are converted one after another, whatever its size."""
    checkpoint = opened(tmp_path, tensors_of("fp8"), LAYOUTS["fp8"])
    joined = checkpoint.tensors["layers.0.experts.gate_up_proj"]
    assert isinstance(joined, JoinedTensor)
    parts = joined._parts(checkpoint.files, FORMATS[joined.format])
    assert [part.shape[0] for part in parts] == [CONFIG.expert_size] * 2 * CONFIG.num_experts


def test_a_scale_of_the_matrix_whose_inverse_is_no_number(tmp_path: Path) -> None:
    """Where the scales that it divides are small enough for their own quotients."""
    small = torch.full((256, 2), 2.0**-9).to(torch.float8_e4m3fn)
    tensors = changed("nvfp4", weight_scale=small, weight_global_scale=torch.tensor([1e-39]))
    checkpoint = opened(tmp_path, tensors, LAYOUTS["nvfp4"])
    with pytest.raises(CheckpointError, match="weight_global_scale' makes scales infinite"):
        checkpoint.read("layers.1.experts.down_proj")


def test_plain_experts_of_no_format_that_is_read(tmp_path: Path) -> None:
    """Beside narrow matrices."""
    tensors = {name: t for name, t in tensors_of("fp8").items() if ".experts." not in name}
    weights = (
        name for name in tensors_of("fp8") if ".experts." in name and name.endswith("weight")
    )
    tensors |= {name: tensors_of("fp8")[name].double() for name in weights}
    with pytest.raises(CheckpointError, match="is stored as F64, which is not supported"):
        opened(tmp_path, tensors, LAYOUTS["fp8"])
