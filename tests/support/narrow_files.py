"""Checkpoints in narrow formats, written as the publishers' config and index files describe them.

Eight bits are rounded to nearest; scales of four bits are those of several with the least squared
error, as the publishers' recipes choose them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sfumato.model.families.diffusion_gemma import TENSOR_NAMES

Tensors = dict[str, Tensor]
FP8_MOST, FP4_MOST = 448.0, 6.0
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_STACK = re.compile(r"(.*)experts\.(gate_up|down)_proj")


def _fp8(weight: Tensor) -> Tensors:
    scale = (weight.abs().amax(1, keepdim=True) / FP8_MOST).clamp(min=1e-12).bfloat16()
    # Some versions of torch give NaN beyond the largest number, and some the largest number.
    codes = (weight / scale.float()).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}


def _int8(weight: Tensor) -> Tensors:
    scale = (weight.abs().amax(1, keepdim=True) / 127.5).clamp(min=1e-12).bfloat16()
    codes = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}


def _least_error(
    groups: Tensor, most: float, rounded: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Scales [rows, groups] of groups [rows, groups, columns]: the greatest value is `most` codes,
    or fewer. rounded: the values that groups have with some scales."""
    best = groups.abs().amax(2) / most
    least = torch.full_like(best, torch.inf)
    for share in torch.linspace(0.6, 1.1, 11):
        scale = groups.abs().amax(2) / most * share
        error = (rounded(groups, scale) - groups).square().sum(2)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _int4_rounded(groups: Tensor, scale: Tensor) -> Tensor:
    step = scale.clamp(min=1e-12)[:, :, None]
    return (groups / step).round().clamp(-8, 7) * step


def _fp4_rounded(groups: Tensor, scale: Tensor) -> Tensor:
    step = scale.clamp(min=1e-12)[:, :, None]
    edges = (_FP4[1:] + _FP4[:-1]) / 2
    return _FP4[torch.bucketize((groups / step).abs(), edges)] * groups.sign() * step


def _int4(weight: Tensor, group: int = 32) -> Tensors:
    rows, columns = weight.shape
    groups = weight.view(rows, columns // group, group)
    scale = _least_error(groups, 7.5, _int4_rounded).clamp(min=1e-12).bfloat16()
    codes = (groups / scale.float()[:, :, None]).round().clamp(-8, 7).view(rows, -1, 8) + 8
    shifts = torch.arange(0, 32, 4)
    packed = (codes.long() << shifts).sum(2)
    return {
        "weight_packed": packed.to(torch.int32),  # keeps the low 32 bits
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }


def _fp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, two columns a byte; scales of 16 columns, in e4m3; the scale of all."""
    rows, columns = weight.shape
    total = weight.abs().max().clamp(min=1e-12) / (FP8_MOST * FP4_MOST)
    groups = weight.view(rows, columns // 16, 16)
    best = _least_error(groups, FP4_MOST, _fp4_rounded)
    scales = (best / total).clamp(max=FP8_MOST).to(torch.float8_e4m3fn)
    steps = (scales.float() * total)[:, :, None]
    scaled = torch.where(steps > 0, groups / steps, 0).view(rows, columns)
    nearest = (scaled.abs()[:, :, None] - _FP4).abs().argmin(2) + 8 * (scaled < 0)
    codes = nearest.to(torch.uint8).view(rows, -1, 2)
    return codes[:, :, 0] | (codes[:, :, 1] << 4), scales, total


def _nvfp4(weight: Tensor) -> Tensors:
    codes, scales, total = _fp4(weight)
    return {
        "weight_packed": codes,
        "weight_scale": scales,
        "weight_global_scale": (1 / total).view(1),
        "input_global_scale": torch.tensor([256.0]),
    }


def _modelopt_nvfp4(weight: Tensor) -> Tensors:
    codes, scales, total = _fp4(weight)
    others = {"weight_scale_2": total, "input_scale": torch.tensor(0.01)}
    return {"weight": codes, "weight_scale": scales, **others}


def _modelopt_fp8(weight: Tensor) -> Tensors:
    scale = weight.abs().max().clamp(min=1e-12) / FP8_MOST
    codes = (weight / scale).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.01)}


_LISTED = ["lm_head", "re:.*embed.*", "re:.*router", "re:.*vision_tower.*", "re:.*self_cond.*"]


def _compressed(format: str, weights: Mapping[str, Any], ignore: list[str]) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors, with the keys that it writes."""
    activations = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True}
    defaults = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None}
    group = {
        "format": format,
        "input_activations": None if "group_size" in weights else activations,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**defaults, "symmetric": True, "observer": "minmax", **weights},
    }
    return {
        "config_groups": {"group_0": group},
        "format": format,
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.15.0",
    }


@dataclass(frozen=True)
class Layout:
    """A publisher's form. narrows: canonical names of what is narrow; beside: of ModelOpt, the
    content of hf_quant_config.json."""

    encode: Callable[[Tensor], Tensors]
    config: Mapping[str, Any] | None
    narrows: re.Pattern[str]
    beside: Mapping[str, Any] | None = None


_LINEAR = re.compile(r"layers\.\d+\.(self_attn|mlp|experts)\..*_proj(\.weight)?")
_EXPERTS = re.compile(r"layers\.\d+\.experts\..*")
_NOT_DENSE = re.compile(r"layers\.\d+\.(self_attn|experts)\..*_proj(\.weight)?")
_MODELOPT = {"producer": {"name": "modelopt", "version": "0.45.0"}}
_EXCLUDED = ["lm_head", "model.decoder.layers.*.self_attn*", "model.decoder.layers.*.mlp*"]
_EXCLUDED += ["model.decoder.layers.*.router*", "model.encoder.vision_tower*"]
_FP8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "channel"}
_INT8_SCHEME = {"num_bits": 8, "type": "int", "strategy": "channel"}
_INT4_SCHEME = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_FP4_SCHEME = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}

LAYOUTS: dict[str, Layout] = {
    "fp8": Layout(_fp8, _compressed("float-quantized", _FP8_SCHEME, _LISTED), _LINEAR),
    "int8": Layout(_int8, _compressed("int-quantized", _INT8_SCHEME, _LISTED), _LINEAR),
    "int4": Layout(
        _int4,
        _compressed("pack-quantized", _INT4_SCHEME, [*_LISTED, r"re:.*layers\.\d+\.mlp\."]),
        _NOT_DENSE,
    ),
    "nvfp4": Layout(_nvfp4, _compressed("nvfp4-pack-quantized", _FP4_SCHEME, _LISTED), _LINEAR),
    "modelopt-nvfp4": Layout(
        _modelopt_nvfp4,
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_scheme": None,
            "ignore": _EXCLUDED,
            **_MODELOPT,
        },
        _EXPERTS,
        {
            **_MODELOPT,
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": _EXCLUDED,
            },
        },
    ),
    "modelopt-fp8": Layout(
        _modelopt_fp8,
        None,
        _LINEAR,
        {**_MODELOPT, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    ),
}


def narrow_tensors(state: Mapping[str, Tensor], layout: Layout) -> Tensors:
    """A state by canonical names, float32, as the tensors of the files: what is not narrow in
    bfloat16, experts one by one where they are narrow."""
    tensors: Tensors = {}
    for name, value in state.items():
        theirs = TENSOR_NAMES.transformers_name(name)
        for module, matrix in _matrices(theirs, value):
            # Rows that do not divide stay as they are, which the list of ignored modules says.
            if layout.narrows.fullmatch(name) and matrix.shape[-1] % _columns(layout) == 0:
                encoded = layout.encode(matrix.float())
                tensors |= {f"{module}.{leaf}": part for leaf, part in encoded.items()}
            elif layout.narrows.fullmatch(name) and module != theirs:
                tensors[f"{module}.weight"] = matrix.bfloat16().contiguous()
        if not layout.narrows.fullmatch(name):
            tensors[theirs] = value.bfloat16()
    return tensors


def _columns(layout: Layout) -> int:
    return 32 if layout.encode is _int4 else 16


def _matrices(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """Modules of a tensor and their matrices: of a stack of experts, one by one."""
    if not (match := _STACK.fullmatch(name)):
        return [(name.removesuffix(".weight"), value)]
    matrices = []
    for index, expert in enumerate(value):
        where = f"{match[1]}experts.{index}."
        if match[2] == "down":
            matrices.append((f"{where}down_proj", expert))
        else:
            gate, up = expert.chunk(2)
            matrices += [(f"{where}gate_proj", gate), (f"{where}up_proj", up)]
    return matrices


def write_narrow(
    folder: Path,
    tensors: Mapping[str, Tensor],
    layout: Layout,
    config: Mapping[str, Any],
    shards: int = 2,
) -> Path:
    """A folder of these tensors, in shards with an index, and a config.json that names the layout;
    returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    named = dict(config)
    if layout.config is not None:
        named["quantization_config"] = layout.config
    (folder / "config.json").write_text(json.dumps(named))
    if layout.beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(layout.beside))
    names = [f"model-{part + 1:05}-of-{shards:05}.safetensors" for part in range(shards)]
    placed = {name: names[index % shards] for index, name in enumerate(tensors)}
    for file in names:
        part = {
            name: tensors[name].clone().contiguous() for name in tensors if placed[name] == file
        }
        save_file(part, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def with_config(layout: Layout, **changes: Any) -> Layout:
    """A layout whose `quantization_config` has other values."""
    return replace(layout, config={**(layout.config or {}), **changes})
