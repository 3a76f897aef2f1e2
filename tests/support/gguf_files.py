"""GGUF files of tiny DiffusionGemmas, written with the `gguf` package (the oracle for ours)."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from sfumato.model.families.diffusion_gemma import TENSOR_NAMES
from sfumato.model.families.diffusion_gemma.config import ARCHITECTURE
from sfumato.model.model_config import LayerConfig, ModelConfig

SIMPLE_FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q5_0", "Q5_1", "Q8_0")
"""What the `gguf` package can quantize to."""

# Where the float16 scales lie in the blocks of the other formats, and the ratio of the offset's
# scale to the first that makes the values' mean zero.
_SCALES_AT = {
    "Q2_K": ((80, 1.0), (82, 1.5)),
    "Q3_K": ((108, 1.0),),
    "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)),
    "Q6_K": ((208, 1.0),),
    "IQ3_XXS": ((0, 1.0),),
    "IQ3_S": ((0, 1.0),),
    "IQ4_NL": ((0, 1.0),),
    "IQ4_XS": ((0, 1.0),),
}


def gguf_config(
    hidden_size: int = 64, intermediate_size: int = 96, expert_size: int = 32, **changes: Any
) -> ModelConfig:
    """A tiny configuration that GGUF metadata can say: two sliding layers and a full one.

    Give sizes that are multiples of 256 for tensors in K-quants.
    """
    layers = (
        LayerConfig(True, 2, 16, 1e4, 8),
        LayerConfig(True, 2, 16, 1e4, 8),
        LayerConfig(False, 1, 32, 1e6, 4),
    )
    values: dict[str, Any] = {
        "vocab_size": 97,
        "num_heads": 4,
        "num_experts": 8,
        "experts_per_token": 2,
        "sliding_window": 8,
        "canvas_length": 8,
        "context_length": 4096,
        "rms_norm_eps": 1e-6,
        "logit_softcap": 30.0,
        "layers": layers,
        "bos_id": 2,
        "eos_ids": (1,),
        "pad_id": 0,
    }
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "expert_size": expert_size,
    }
    return ModelConfig(**(values | sizes | changes))


def state_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape of every tensor of the text network."""
    hidden, wide = config.hidden_size, config.intermediate_size
    mlp = {"gate_proj.weight": (wide, hidden), "up_proj.weight": (wide, hidden)}
    mlp["down_proj.weight"] = (hidden, wide)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "norm.weight": (hidden,),
        "self_conditioning.pre_norm.weight": (hidden,),
    }
    shapes |= {f"self_conditioning.{name}": shape for name, shape in mlp.items()}
    for index, layer in enumerate(config.layers):
        query, keys = config.num_heads * layer.head_dim, layer.kv_heads * layer.head_dim
        fields: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "self_attn.q_norm.weight": (layer.head_dim,),
            "self_attn.k_norm.weight": (layer.head_dim,),
            "post_attention_layernorm.weight": (hidden,),
            "pre_feedforward_layernorm.weight": (hidden,),
            "post_feedforward_layernorm_1.weight": (hidden,),
            "pre_feedforward_layernorm_2.weight": (hidden,),
            "post_feedforward_layernorm_2.weight": (hidden,),
            "post_feedforward_layernorm.weight": (hidden,),
            "router.proj.weight": (config.num_experts, hidden),
            "router.scale": (hidden,),
            "router.per_expert_scale": (config.num_experts,),
            "experts.gate_up_proj": (config.num_experts, 2 * config.expert_size, hidden),
            "experts.down_proj": (config.num_experts, hidden, config.expert_size),
            "layer_scalar": (1,),
            "encoder_layer_scalar": (1,),
        }
        fields |= {f"mlp.{name}": shape for name, shape in mlp.items()}
        if layer.sliding:
            fields["self_attn.v_proj.weight"] = (keys, hidden)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in fields.items()}
    return shapes


def random_state(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 weights by canonical name; q_norm is small, for attention has scale 1."""
    random = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in state_shapes(config).items():
        if len(shape) > 1:
            deviation = 0.3 if name == "embed_tokens.weight" else shape[-1] ** -0.5
            state[name] = torch.randn(shape, generator=random) * deviation
        else:
            low, high = (0.1, 0.3) if "q_norm" in name else (0.6, 1.4)
            state[name] = torch.rand(shape, generator=random) * (high - low) + low
    return state


def random_blocks(name: str, count: int, deviation: float = 1.0, seed: int = 0) -> np.ndarray:
    """Valid blocks uint8 [count, block bytes] of random content, for the formats that the `gguf`
    package cannot quantize to; dequantized they have mean 0 and about this deviation."""
    kind = gguf.GGMLQuantizationType[name]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    scale = 1.0
    for _ in range(2):  # the values are linear in the scales: measure at 1, then set
        for at, ratio in _SCALES_AT[name]:
            half = np.array([scale * ratio], dtype="<f2")
            blocks[:, at : at + 2] = half.view(np.uint8)
        scale = deviation / float(gguf.dequantize(blocks, kind).std())
    return blocks


def encode(tensor: Tensor, name: str, seed: int = 0) -> np.ndarray:
    """The tensor in a format: float arrays, or uint8 [..., row bytes].

    For the K and IQ formats the values are random, of the tensor's shape and deviation.
    """
    kind = gguf.GGMLQuantizationType[name]
    values = tensor.detach().float().numpy()
    if name in SIMPLE_FORMATS:
        return gguf.quantize(values, kind)
    size, _ = gguf.GGML_QUANT_SIZES[kind]
    if values.shape[-1] % size:
        raise ValueError(f"rows of {values.shape[-1]} do not divide into {name} blocks of {size}")
    blocks = random_blocks(name, values.size // size, float(values.std()), seed)
    return blocks.reshape(*values.shape[:-1], -1)


def write_gguf(
    path: Path,
    state: Mapping[str, Tensor],
    config: ModelConfig,
    formats: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
    older_names: bool = False,
) -> dict[str, Tensor]:
    """Writes a GGUF file and returns what it holds, by canonical name, dequantized to float32.

    state: by canonical name. formats: pattern of canonical names ("layers.*.experts.*") → format;
    the first that matches counts, F32 otherwise. extra: more metadata, key → str, bool, int, float
    or list. older_names: with `self_cond_norm` as in older files.
    """
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    for key, value in (gguf_metadata(config) | dict(extra or {})).items():
        _add(writer, key, value)
    pairs = config.layers[-1].head_dim // 2
    turning = config.layers[-1].rope_pairs
    factors = [1.0] * turning + [1e30] * (pairs - turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    held = {}
    for index, (name, tensor) in enumerate(state.items()):
        patterns = (formats or {}).items()
        chosen = next((kind for pattern, kind in patterns if fnmatch(name, pattern)), "F32")
        kind = gguf.GGMLQuantizationType[chosen]
        data = encode(tensor, chosen, seed=index)
        theirs = TENSOR_NAMES.gguf_name(name)
        if older_names:
            theirs = theirs.replace("self_cond_pre_norm", "self_cond_norm")
        writer.add_tensor(theirs, data, raw_dtype=kind)
        held[name] = torch.from_numpy(np.array(gguf.dequantize(data, kind))).view(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def gguf_metadata(config: ModelConfig) -> dict[str, Any]:
    """The metadata of a configuration, keys and types as in the published files."""
    full = next(layer for layer in config.layers if not layer.sliding)
    sliding = next(layer for layer in config.layers if layer.sliding)
    fields: dict[str, Any] = {
        "block_count": len(config.layers),
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "expert_count": config.num_experts,
        "expert_used_count": config.experts_per_token,
        "expert_feed_forward_length": config.expert_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": [layer.kv_heads for layer in config.layers],
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [layer.sliding for layer in config.layers],
        "attention.shared_kv_layers": 0,
        "attention.causal": False,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": full.rope_theta,
        "rope.freq_base_swa": sliding.rope_theta,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": sliding.head_dim,
        "final_logit_softcapping": config.logit_softcap,
        "embedding_length_per_layer_input": 0,
    }
    ids = {"bos": config.bos_id, "eos": (*config.eos_ids, None)[0], "padding": config.pad_id}
    return {
        **{f"{ARCHITECTURE}.{key}": value for key, value in fields.items()},
        "diffusion.canvas_length": config.canvas_length,
        **{f"tokenizer.ggml.{k}_token_id": v for k, v in ids.items() if v is not None},
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
