"""Writes a trained network as a Hugging Face checkpoint that `transformers` loads too.

`transformers` builds a vision tower whatever the checkpoint, so a tiny one goes with it: one layer,
16 wide, untrained.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sfumato.diffusion.config import REFERENCE
from sfumato.diffusion.sampler import EntropyBound
from sfumato.diffusion.schedule import LinearTemperature
from sfumato.diffusion.stopping import StableAndConfident
from sfumato.model.config import ModelConfig
from sfumato.model.transformer import Transformer
from sfumato.weights.names import transformers_name

VISION = 16  # width of every part of the placeholder tower
PATCH, POSITIONS = 16, 8


def save_checkpoint(network: Transformer, folder: Path) -> None:
    """config.json, generation_config.json and model.safetensors (bfloat16) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {transformers_name(k): v.to(torch.bfloat16) for k, v in network.state_dict().items()}
    state |= {k: v.to(torch.bfloat16) for k, v in vision_weights(network.config).items()}
    weights = folder / "model.safetensors"
    save_file(state, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # the library leaves it to its owner alone; a package is for everybody
    _write(folder / "config.json", hf_config(network.config))
    _write(folder / "generation_config.json", generation_config(network.config))


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def vision_weights(config: ModelConfig) -> dict[str, Tensor]:
    """An untrained tower of one layer, with `transformers`' names."""
    tower = "model.encoder.vision_tower."
    layer = tower + "encoder.layers.0."
    square = torch.eye(VISION) * 0.02
    weights = {
        tower + "patch_embedder.position_embedding_table": torch.ones(2, POSITIONS, VISION),
        tower + "patch_embedder.input_proj.weight": torch.zeros(VISION, 3 * PATCH * PATCH),
        "model.encoder.embed_vision.embedding_projection.weight": torch.zeros(
            config.hidden_size, VISION
        ),
    }
    for part in ("q", "k", "v", "o"):
        weights[f"{layer}self_attn.{part}_proj.linear.weight"] = square.clone()
    for part in ("gate", "up", "down"):
        weights[f"{layer}mlp.{part}_proj.linear.weight"] = square.clone()
    for part in ("self_attn.q_norm", "self_attn.k_norm"):
        weights[f"{layer}{part}.weight"] = torch.ones(VISION)
    for part in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        weights[f"{layer}{part}_layernorm.weight"] = torch.ones(VISION)
    return weights


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """`config.json` of this configuration."""
    sliding = next(layer for layer in config.layers if layer.sliding)
    full = next(layer for layer in config.layers if not layer.sliding)
    kind = {True: "sliding_attention", False: "full_attention"}
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "dtype": "bfloat16",
        "canvas_length": config.canvas_length,
        "tie_word_embeddings": True,
        "text_config": {
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
            "layer_types": [kind[layer.sliding] for layer in config.layers],
            "sliding_window": config.sliding_window,
            "num_experts": config.num_experts,
            "top_k_experts": config.experts_per_token,
            "moe_intermediate_size": config.expert_size,
            "max_position_embeddings": config.context_length,
            "rms_norm_eps": config.rms_norm_eps,
            "final_logit_softcapping": config.logit_softcap,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": sliding.rope_theta},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": full.rope_theta,
                    "partial_rotary_factor": 2 * full.rope_pairs / full.head_dim,
                },
            },
            "use_bidirectional_attention": "vision",
            "tie_word_embeddings": True,
            "bos_token_id": config.bos_id,
            "eos_token_id": config.eos_ids[0],
            "pad_token_id": config.pad_id,
        },
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": VISION,
            "intermediate_size": VISION,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": VISION,
            "patch_size": PATCH,
            "position_embedding_size": POSITIONS,
        },
    }


def generation_config(config: ModelConfig) -> dict[str, Any]:
    """`generation_config.json`: the reference's sampler, spelt out."""
    sampler, schedule, stopping = REFERENCE.sampler, REFERENCE.schedule, REFERENCE.stopping
    assert isinstance(sampler, EntropyBound)
    assert isinstance(schedule, LinearTemperature) and isinstance(stopping, StableAndConfident)
    return {
        "max_denoising_steps": REFERENCE.max_steps,
        "sampler_config": {
            "_cls_name": "EntropyBoundSamplerConfig",
            "entropy_bound": sampler.bound,
        },
        **asdict(schedule),
        "stability_threshold": stopping.stability,
        "confidence_threshold": stopping.confidence,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
        "pad_token_id": config.pad_id,
    }
