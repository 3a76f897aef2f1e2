"""`transformers`' Qwen3 with a four-dimensional mask as the oracle of block diffusion: random tiny
networks, saved as checkpoints of the projects."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

MASK = 96  # the last token of the tiny vocabulary


def random_oracle(seed: int, experts: bool = False, **changes) -> PreTrainedModel:
    """A random network in float32: norms near 1, and attention that is neither flat nor certain."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rope_theta": 1e4,
    }
    if experts:
        sizes |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        sizes |= {"norm_topk_prob": True}
    torch.manual_seed(seed)
    classes = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if experts else (Qwen3Config, Qwen3ForCausalLM)
    config = classes[0](**sizes | changes)
    config._attn_implementation = "eager"
    model = classes[1](config).eval().requires_grad_(False)
    for name, tensor in model.state_dict().items():
        if "q_norm" in name:
            tensor.uniform_(0.8, 1.6)
        elif tensor.ndim == 1:
            tensor.uniform_(0.7, 1.3)
        else:
            tensor.normal_(0, 2 / tensor.shape[-1] ** 0.5)
    return model


def save_oracle(model: PreTrainedModel, folder: Path, model_type: str, block: int) -> Path:
    """Writes it as a checkpoint of a project."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"model_type": model_type, "block_size": block, "mask_token_id": MASK}
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder


def oracle_logits(model: PreTrainedModel, ids: Tensor, canvas: Tensor, block: int, offset: int):
    """Logits [n + canvas, vocab] of one forward without a cache: ids int64 [n] see the ends of
    their blocks, of which one begins at `offset`, and the canvas int64 [any] sees all."""
    count, total = len(ids), len(ids) + len(canvas)
    number = (torch.arange(count) - offset).div(block, rounding_mode="floor")
    seen = torch.zeros(total, total, dtype=torch.bool)
    seen[:count, :count] = number[None, :] <= number[:, None]
    seen[count:] = True
    mask = torch.zeros(total, total).masked_fill(~seen, torch.finfo(torch.float32).min)
    return model(input_ids=torch.cat((ids, canvas))[None], attention_mask=mask[None, None]).logits[
        0
    ]
