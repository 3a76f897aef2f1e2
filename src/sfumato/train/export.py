"""Writes a trained network as a Hugging Face checkpoint that `transformers` loads too.

`transformers` builds a vision tower whatever the checkpoint, so a tiny one goes with it: one layer,
16 wide, untrained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sfumato.diffusion.config import REFERENCE
from sfumato.diffusion.export import to_hf
from sfumato.model.config import ModelConfig
from sfumato.model.families.diffusion_gemma.names import TENSOR_NAMES
from sfumato.model.families.diffusion_gemma.write_config import PATCH, POSITIONS, VISION, hf_config
from sfumato.model.transformer import Transformer


def save_checkpoint(network: Transformer, folder: Path) -> None:
    """config.json, generation_config.json and model.safetensors (bfloat16) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        TENSOR_NAMES.transformers_name(k): v.to(torch.bfloat16)
        for k, v in network.state_dict().items()
    }
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


def generation_config(config: ModelConfig) -> dict[str, Any]:
    """`generation_config.json`: the reference's sampler, spelt out."""
    return {
        **to_hf(REFERENCE),
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
        "pad_token_id": config.pad_id,
    }
