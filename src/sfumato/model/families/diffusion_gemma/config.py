"""A `ModelConfig` from DiffusionGemma's `config.json`, with the end tokens of
`generation_config.json`, or from the keys of a GGUF file; and the way back, with the constants of a
GGUF file and with a tiny untrained vision tower, one layer, 16 wide: `transformers` builds one
whatever the checkpoint.

A field that is absent takes `transformers`' default where there is one that does not change with
the model's size. A field that is given must make sense: null is refused too, except where it has
a meaning to `transformers` (`layer_types`, `num_global_key_value_heads`, the token ids,
`use_bidirectional_attention`). Knows no text; token ids are all that it says of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.model.families.family import LARGEST_EPS, MOST_LAYERS, FieldReader, shortest_float
from sfumato.model.model_config import ConfigError, LayerConfig, ModelConfig
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.errors import quoted

ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
}
"""The rotary parameters of each kind of layer where `config.json` has no `rope_parameters`."""


def config_from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """From `config.json` (and `generation_config.json`, which names the end tokens).

    Raises ConfigError, naming the field, for what is missing or not supported.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError("config.json: text_config is missing or not an object")
    _refuse_unsupported(config, text)
    read = FieldReader("config.json: text_config", text)
    vocab_size = read.integer("vocab_size")
    text_ends = read.tokens("eos_token_id", vocab_size)
    ends = FieldReader("generation_config.json", generation or {}).tokens(
        "eos_token_id", vocab_size
    )
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=read.integer("hidden_size"),
        intermediate_size=read.integer("intermediate_size"),
        num_heads=read.integer("num_attention_heads"),
        num_experts=read.integer("num_experts"),
        experts_per_token=read.integer("top_k_experts"),
        expert_size=read.integer("moe_intermediate_size"),
        sliding_window=read.integer("sliding_window"),
        canvas_length=FieldReader("config.json", config).integer("canvas_length", 256),
        context_length=read.integer("max_position_embeddings", 131072),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6, below=LARGEST_EPS),
        logit_softcap=read.number("final_logit_softcapping", 30.0),
        layers=_hf_layers(read),
        bos_id=read.token("bos_token_id", vocab_size),
        eos_ids=ends or text_ends,
        pad_id=read.token("pad_token_id", vocab_size),
        filler_id=read.token("canvas_filler_token_id", vocab_size),
    )


def _refuse_unsupported(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    outer, inner = (FieldReader("config.json", each) for each in (config, text))
    outer.only("tie_word_embeddings", True)
    inner.only("tie_word_embeddings", True)
    inner.only("use_bidirectional_attention", None, "vision")
    inner.only("attention_bias", False)
    inner.only("hidden_activation", "gelu_pytorch_tanh")


def _hf_layers(text: FieldReader) -> tuple[LayerConfig, ...]:
    """Accepts both spellings: `global_head_dim` and friends, and newer `per_layer_config`."""
    kinds = _hf_kinds(text)
    head_dim, kv_heads = text.integer("head_dim"), text.integer("num_key_value_heads")
    # Where it is present it alone says what differs; it is empty where nothing does.
    newer = "per_layer_config" in text.values
    overrides = text.child("per_layer_config", {})
    padded = {key[:-1].lstrip("0") + key[-1:]: key for key in overrides.values}
    if unknown := padded.keys() - {str(index) for index in range(len(kinds))}:
        raise ConfigError(
            f"{overrides.where}: {quoted(min(unknown))} is none of the {len(kinds)} layers"
        )
    rope = text.child("rope_parameters", ROPE)
    layers = []
    for index, kind in enumerate(kinds):
        sliding = kind == "sliding_attention"
        dim, heads = head_dim, kv_heads
        if not (sliding or newer):
            dim = text.integer("global_head_dim", 512)
            if text.values.get("num_global_key_value_heads") is not None:
                heads = text.integer("num_global_key_value_heads")
        changed = overrides.child(padded.get(str(index), ""), {})
        dim, heads = changed.integer("head_dim", dim), changed.integer("num_key_value_heads", heads)
        layers.append(LayerConfig(sliding, heads, dim, *_hf_rope(rope.child(kind), dim)))
    return tuple(layers)


def _hf_kinds(text: FieldReader) -> list[str]:
    count, kinds = text.integer("num_hidden_layers"), text.values.get("layer_types")
    if count > MOST_LAYERS:
        raise ConfigError(f"{text.where}: num_hidden_layers is {count}; that is no real checkpoint")
    if kinds is None:
        return [
            "full_attention" if (i + 1) % 6 == 0 or i == count - 1 else "sliding_attention"
            for i in range(count)
        ]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ConfigError(f"{text.where}: layer_types must list {count} layers")
    for index, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"{text.where}: layer_types[{index}] is {quoted(kind)}")
    # As the reference does: whatever the list says of it, the last layer is a full one.
    return [*kinds[:-1], "full_attention"]


def _hf_rope(rope: FieldReader, head_dim: int) -> tuple[float, int]:
    """theta, and how many pairs turn. What is absent means what it means to `transformers`, which
    has a default for everything but theta."""
    kind, theta = rope.values.get("rope_type", "default"), rope.number("rope_theta")
    part, scale = rope.number("partial_rotary_factor", 1.0), rope.number("factor", 1.0)
    if scale != 1 or part > 1 or not (kind == "proportional" or (kind == "default" and part == 1)):
        raise ConfigError(
            f"{rope.where}: rope_type {quoted(kind)} with partial_rotary_factor {part} and factor "
            f"{scale} is not supported"
        )
    return theta, int(part * head_dim // 2)


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
