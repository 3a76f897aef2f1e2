"""Random networks that settle: what a trajectory needs to stop early, now and then."""

from __future__ import annotations

import torch
from tests.support.oracle import random_oracle, tiny_config
from transformers import DiffusionGemmaForBlockDiffusion


def calm_oracle(seed: int = 0, sharp: float = 2.0, calm: float = 0.75) -> (
    DiffusionGemmaForBlockDiffusion
):  # fmt: skip
    """A tiny network that mostly repeats the canvas it reads.

    sharp scales the embedding, and so the logits; calm scales what attention and feed-forward
    add to the residual: at 1 the argmax canvas never comes to rest.
    """
    model = random_oracle(tiny_config(), seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(
                ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
            ):
                tensor.mul_(calm)
        model.model.decoder.embed_tokens.weight.mul_(sharp)
    return model


def inverse_cdf(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulated probability exceeds the uniform: probs [n, vocab] → [n]."""
    mass = probs.double()
    ends = mass.cumsum(dim=-1)
    target = uniforms.double() * ends[:, -1]
    last = (mass > 0).long().cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(torch.searchsorted(ends, target[:, None], right=True)[:, 0], last)
