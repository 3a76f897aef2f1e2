"""Writes a `ModelConfig` as DiffusionGemma's `config.json`, GGUF keys and GGUF constants, with a
tiny untrained vision tower, one layer, 16 wide: `transformers` builds one whatever the checkpoint.

Knows no files and no text; token ids are all that it says of a vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.model.families.diffusion_gemma.read_config import ARCHITECTURE
from sfumato.model.families.family import shortest_float
from sfumato.model.model_config import ConfigError, LayerConfig, ModelConfig

_WIDTH = 16  # of every part
_PATCH, _POSITIONS = 16, 8


def vision_config() -> dict[str, Any]:
    """`vision_config` of config.json."""
    return {
        "model_type": "gemma4_vision",
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": _WIDTH,
        "patch_size": _PATCH,
        "position_embedding_size": _POSITIONS,
    }


def vision_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """The tower's tensors, float32."""
    tower = "model.encoder.vision_tower."
    layer = tower + "encoder.layers.0."
    square = torch.eye(_WIDTH) * 0.02
    tensors = {
        tower + "patch_embedder.position_embedding_table": torch.ones(2, _POSITIONS, _WIDTH),
        tower + "patch_embedder.input_proj.weight": torch.zeros(_WIDTH, 3 * _PATCH * _PATCH),
        "model.encoder.embed_vision.embedding_projection.weight": torch.zeros(
            config.hidden_size, _WIDTH
        ),
    }
    for part in ("q", "k", "v", "o"):
        tensors[f"{layer}self_attn.{part}_proj.linear.weight"] = square.clone()
    for part in ("gate", "up", "down"):
        tensors[f"{layer}mlp.{part}_proj.linear.weight"] = square.clone()
    for part in ("self_attn.q_norm", "self_attn.k_norm"):
        tensors[f"{layer}{part}.weight"] = torch.ones(_WIDTH)
    for part in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        tensors[f"{layer}{part}_layernorm.weight"] = torch.ones(_WIDTH)
    return tensors


_KINDS = {True: "sliding", False: "full"}


def hf_config(config: ModelConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """`config.json` of this configuration, with a tiny placeholder for the vision tower:
    `transformers` builds one whatever the checkpoint.

    Raises ConfigError for what the file cannot say.
    """
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "dtype": dtype,
        "canvas_length": config.canvas_length,
        "tie_word_embeddings": True,
        "text_config": _text_config(config),
        "vision_config": vision_config(),
    }


def _text_config(config: ModelConfig) -> dict[str, Any]:
    kinds = _uniform(config, "kv_heads")
    if config.layers[-1].sliding or True not in kinds:
        raise ConfigError(
            "config.json cannot say what this file holds: it needs sliding layers, and a full one "
            "at the end"
        )
    sliding, full = kinds[True], kinds[False]
    return {
        "model_type": "diffusion_gemma_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": sliding.kv_heads,
        "num_global_key_value_heads": full.kv_heads,
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        "layer_types": [f"{_KINDS[layer.sliding]}_attention" for layer in config.layers],
        "sliding_window": config.sliding_window,
        "num_experts": config.num_experts,
        "top_k_experts": config.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": shortest_float(config.rms_norm_eps),
        "final_logit_softcapping": shortest_float(config.logit_softcap),
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": shortest_float(sliding.rope_theta),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": shortest_float(full.rope_theta),
                "partial_rotary_factor": 2 * full.rope_pairs / full.head_dim,
            },
        },
        "use_bidirectional_attention": "vision",
        "tie_word_embeddings": True,
        "bos_token_id": config.bos_id,
        "eos_token_id": next(iter(config.eos_ids), None),
        "pad_token_id": config.pad_id,
        # Not in generation_config.json, where `transformers` refuses keys that it does not know.
        **({} if config.filler_id is None else {"canvas_filler_token_id": config.filler_id}),
    }


def gguf_config(config: ModelConfig) -> dict[str, Any]:
    """The GGUF keys of this configuration. Raises ConfigError for what they cannot say."""
    kinds = _uniform(config)
    full = kinds.get(False) or kinds[True]
    sliding = kinds.get(True) or full
    sizes: dict[str, Any] = {
        "block_count": len(config.layers),
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "expert_count": config.num_experts,
        "expert_used_count": config.experts_per_token,
        "expert_feed_forward_length": config.expert_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": np.array([layer.kv_heads for layer in config.layers], np.int32),
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": np.array([layer.sliding for layer in config.layers]),
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
    ids = {
        "bos": config.bos_id,
        "eos": next(iter(config.eos_ids), None),
        "padding": config.pad_id,
        "canvas_filler": config.filler_id,
    }
    return {
        **{f"{ARCHITECTURE}.{key}": value for key, value in sizes.items()},
        "diffusion.canvas_length": config.canvas_length,
        **{f"tokenizer.ggml.{key}_token_id": i for key, i in ids.items() if i is not None},
    }


def rotary_divisors(config: ModelConfig) -> Tensor:
    """`rope_freqs.weight`, float32 [head_dim / 2] of the full layers: 1 where a pair turns, 1e30
    where it stays."""
    kinds = _uniform(config)
    full = kinds.get(False) or kinds[True]
    divisors = torch.full((full.head_dim // 2,), 1e30)
    divisors[: full.rope_pairs] = 1
    return divisors


def gguf_constants(config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a GGUF file that are no weights."""
    return {"rope_freqs.weight": rotary_divisors(config)}


def _uniform(config: ModelConfig, *more: str) -> dict[bool, LayerConfig]:
    """The one sliding and the one full kind of layer. Raises ConfigError where layers differ."""
    kinds: dict[bool, LayerConfig] = {}
    for index, layer in enumerate(config.layers):
        kind = kinds.setdefault(layer.sliding, layer)
        for field in ("head_dim", "rope_theta", "rope_pairs", *more):
            if getattr(layer, field) != getattr(kind, field):
                raise ConfigError(
                    f"layer {index}: {field} is {getattr(layer, field)}, where another "
                    f"{_KINDS[layer.sliding]} layer has {getattr(kind, field)}; files of this kind "
                    "know one for all"
                )
        if layer.sliding and 2 * layer.rope_pairs != layer.head_dim:
            raise ConfigError(
                f"layer {index}: only {layer.rope_pairs} pairs of a sliding layer turn, which "
                "files of this kind cannot say"
            )
    return kinds
