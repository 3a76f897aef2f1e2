"""A tiny untrained vision tower: `transformers` builds one whatever the checkpoint.

One layer, 16 wide: its part of `config.json`, and its tensors with `transformers`' names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sfumato.model.model_config import ModelConfig

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
