"""Reads DiffusionGemma's GGUF metadata keys.

A key that is absent takes `transformers`' default where there is one that does not change with
the model's size; one that is given must make sense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sfumato.model.families.diffusion_gemma.config_json import LARGEST_EPS
from sfumato.model.families.fields import FieldReader
from sfumato.model.model_config import ConfigError, LayerConfig, ModelConfig
from sfumato.weights.checkpoint import Checkpoint

ARCHITECTURE = "diffusion-gemma"
"""`general.architecture`, and the first part of most keys."""


def config_of_gguf(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of an opened GGUF file. Raises ConfigError, naming the key or tensor."""
    embedding = checkpoint.tensors.get("embed_tokens.weight")
    if embedding is None:
        raise ConfigError("token_embd.weight is missing; the checkpoint is incomplete")
    return config_from_gguf(checkpoint.metadata, embedding.shape[0], _turning_pairs(checkpoint))


def config_from_gguf(
    metadata: Mapping[str, Any], vocab_size: int, full_pairs: int | None = None
) -> ModelConfig:
    """From GGUF keys; `vocab_size` is the number of rows of `token_embd.weight`, and
    `full_pairs` how many rotary pairs of full layers turn (None: a quarter, as published).

    Raises ConfigError, naming the key, for what is missing or not supported.
    """
    read = FieldReader("GGUF metadata", metadata, prefix=f"{ARCHITECTURE}.")
    count = read.integer("block_count")
    kv_heads = read.per_layer("attention.head_count_kv", count)
    sliding = read.per_layer("attention.sliding_window_pattern", count, scalar=False)
    if metadata.get(f"{ARCHITECTURE}.attention.shared_kv_layers", 0):
        raise ConfigError("GGUF metadata: shared KV layers are not part of DiffusionGemma")
    full_dim = read.integer("attention.key_length")
    sliding_dim = read.integer("attention.key_length_swa", full_dim)
    theta = read.number("rope.freq_base", 1e6), read.number("rope.freq_base_swa", 1e4)
    layers = tuple(
        LayerConfig(True, heads, sliding_dim, theta[1], sliding_dim // 2)
        if window
        else LayerConfig(False, heads, full_dim, theta[0], full_pairs or full_dim // 8)
        for heads, window in zip(kv_heads, sliding, strict=True)
    )
    token = FieldReader("GGUF metadata", metadata, prefix="tokenizer.ggml.")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=read.integer("embedding_length"),
        intermediate_size=read.integer("feed_forward_length"),
        num_heads=read.integer("attention.head_count"),
        num_experts=read.integer("expert_count"),
        experts_per_token=read.integer("expert_used_count"),
        expert_size=read.integer("expert_feed_forward_length"),
        sliding_window=read.integer("attention.sliding_window"),
        canvas_length=FieldReader("GGUF metadata", metadata).integer(
            "diffusion.canvas_length", 256
        ),
        context_length=read.integer("context_length", 131072),
        rms_norm_eps=read.number("attention.layer_norm_rms_epsilon", 1e-6, below=LARGEST_EPS),
        logit_softcap=read.number("final_logit_softcapping", 30.0),
        layers=layers,
        bos_id=token.token("bos_token_id", vocab_size),
        eos_ids=token.tokens("eos_token_id", vocab_size),
        pad_id=token.token("padding_token_id", vocab_size),
        filler_id=token.token("canvas_filler_token_id", vocab_size),
    )


def _turning_pairs(checkpoint: Checkpoint) -> int | None:
    """How many rotary pairs of full layers turn, by the divisors of their frequencies in
    `rope_freqs.weight`: 1 turns, 1e30 stills. None where the file has no such tensor."""
    holders = [file for file in checkpoint.files.values() if "rope_freqs.weight" in file.tensors]
    if not holders:
        return None
    divisors = holders[0].read("rope_freqs.weight")
    if isinstance(divisors, Tensor) and divisors.ndim == 1:
        turning = int((divisors == 1).sum())
        if turning and (divisors[:turning] == 1).all() and (divisors[turning:] > 1e9).all():
            return turning
    raise ConfigError(
        "rope_freqs.weight does not turn the first pairs and still the "
        "others, which is all that DiffusionGemma's full layers know"
    )
