"""A `ModelConfig` of a Qwen3 network that denoises blocks, from its `config.json` or from the keys
of a GGUF file, and the way back.

The fields are those of `transformers`' Qwen3 and Qwen3-MoE with two more: `block_size` and
`mask_token_id`. An absent field takes the default of `transformers`, or of the project where the
field is the project's own. A GGUF file has the keys of the architectures `qwen3` and `qwen3moe`
with `diffusion.canvas_length`, `diffusion.block_borders`, `diffusion.shift_logits` and
`tokenizer.ggml.mask_token_id`. Knows no text; token ids are all that it says of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sfumato.model.families.family import (
    LARGEST_EPS,
    MOST_LAYERS,
    FieldReader,
    shortest_float,
)
from sfumato.model.model_config import Borders, ConfigError, Design, LayerConfig, ModelConfig
from sfumato.weights.checkpoint import Checkpoint

QWEN3 = Design(
    gating="silu",
    post_norms=False,
    scaled_embedding=False,
    scaled_queries=True,
    own_values=True,
    scaled_router=False,
    self_conditioning=False,
)

MASK_ID = 151669
"""The first id after Qwen3's own tokens, which both projects gave to their mask token; it counts
where the config names none."""


@dataclass(frozen=True)
class Kind:
    """A kind of config: its names in both kinds of file, and what an absent field means.

    experts: whether the layers have experts in place of a dense MLP.
    """

    model_type: str
    class_name: str
    architecture: str
    borders: Borders
    block: int
    experts: bool = False

    def from_hf(
        self, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """From `config.json` (and `generation_config.json`, which names the end tokens).

        Raises ConfigError, naming the field, for what is missing or not supported.
        """
        read = FieldReader("config.json", config)
        _refuse_unsupported(read)
        vocab_size, count = read.integer("vocab_size"), read.integer("num_hidden_layers")
        if count > MOST_LAYERS:
            raise ConfigError(f"config.json: num_hidden_layers is {count}; no real checkpoint")
        heads, size = read.integer("num_key_value_heads"), read.integer("head_dim", 128)
        context = read.integer("max_position_embeddings", 32768)
        ends = FieldReader("generation_config.json", generation or {})
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=read.integer("hidden_size"),
            num_heads=read.integer("num_attention_heads"),
            **(_hf_experts(read) if self.experts else _dense(read, "intermediate_size")),
            sliding_window=max(2, context),
            canvas_length=read.integer("block_size", self.block),
            context_length=context,
            rms_norm_eps=read.number("rms_norm_eps", 1e-6, below=LARGEST_EPS),
            logit_softcap=0.0,
            layers=(LayerConfig(False, heads, size, _hf_theta(read), size // 2),) * count,
            bos_id=read.token("bos_token_id", vocab_size),
            eos_ids=ends.tokens("eos_token_id", vocab_size)
            or read.tokens("eos_token_id", vocab_size),
            pad_id=read.token("pad_token_id", vocab_size),
            mask_id=_mask(read, vocab_size),
            design=replace(
                QWEN3,
                borders=self.borders,
                tied_head=read.flag("tie_word_embeddings", False),
                shares_of_one=not self.experts or read.flag("norm_topk_prob", False),
            ),
        )

    def to_hf(self, config: ModelConfig, dtype: str) -> dict[str, Any]:
        """`config.json` of this configuration. Raises ConfigError for what the file cannot say."""
        layer = _one_kind(config)
        experts = {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_size,
            "norm_topk_prob": config.design.shares_of_one,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "dtype": dtype,
            "block_size": config.canvas_length,
            "mask_token_id": config.mask_id,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            # Of no meaning where all layers have experts, but `transformers` wants a number.
            "intermediate_size": config.intermediate_size or config.expert_size,
            "num_hidden_layers": len(config.layers),
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
            "max_position_embeddings": config.context_length,
            "rms_norm_eps": shortest_float(config.rms_norm_eps),
            "rope_theta": shortest_float(layer.rope_theta),
            "rope_scaling": None,
            "tie_word_embeddings": config.design.tied_head,
            **(experts if self.experts else {}),
            "bos_token_id": config.bos_id,
            "eos_token_id": next(iter(config.eos_ids), None),
            "pad_token_id": config.pad_id,
        }

    @property
    def gguf_keys(self) -> dict[str, Any]:
        """What a GGUF file of this kind has beside the architecture, which others share."""
        return {"diffusion.block_borders": self.borders}

    def from_gguf(self, checkpoint: Checkpoint) -> ModelConfig:
        """From an opened GGUF file. Raises ConfigError, naming the key or tensor."""
        embedding, metadata = checkpoint.tensors.get("embed_tokens.weight"), checkpoint.metadata
        if embedding is None:
            raise ConfigError("token_embd.weight is missing; the checkpoint is incomplete")
        vocab_size, where = embedding.shape[0], "GGUF metadata"
        read = FieldReader(where, metadata, prefix=f"{self.architecture}.")
        diffusion = FieldReader(where, metadata, prefix="diffusion.")
        token = FieldReader(where, metadata, prefix="tokenizer.ggml.")
        read.only("rope.scaling.type", None, "none")
        diffusion.only("shift_logits", False)
        count, context = read.integer("block_count"), read.integer("context_length", 32768)
        if count > MOST_LAYERS:
            raise ConfigError(f"{where}: {count} layers; that is no real checkpoint")
        size = read.integer("attention.key_length", 128)
        read.only("attention.value_length", size)
        heads, theta = read.integer("attention.head_count_kv"), read.number("rope.freq_base", 1e4)
        eps = read.number("attention.layer_norm_rms_epsilon", 1e-6, below=LARGEST_EPS)
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=read.integer("embedding_length"),
            num_heads=read.integer("attention.head_count"),
            **(_gguf_experts(read) if self.experts else _dense(read, "feed_forward_length")),
            sliding_window=max(2, context),
            canvas_length=diffusion.integer("canvas_length", self.block),
            context_length=context,
            rms_norm_eps=shortest_float(eps),
            logit_softcap=0.0,
            layers=(LayerConfig(False, heads, size, shortest_float(theta), size // 2),) * count,
            bos_id=token.token("bos_token_id", vocab_size),
            eos_ids=token.tokens("eos_token_id", vocab_size),
            pad_id=token.token("padding_token_id", vocab_size),
            mask_id=_mask(token, vocab_size),
            design=replace(
                QWEN3,
                borders=self.borders,
                tied_head="lm_head.weight" not in checkpoint.tensors,
            ),
        )

    def to_gguf(self, config: ModelConfig) -> dict[str, Any]:
        """The GGUF keys of this configuration. Raises ConfigError for what they cannot say."""
        layer = _one_kind(config)
        if not config.design.shares_of_one:
            raise ConfigError(
                "norm_topk_prob: is false, which GGUF files of this architecture cannot say"
            )
        sizes: dict[str, Any] = {
            "block_count": len(config.layers),
            "context_length": config.context_length,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size or config.expert_size,
            "attention.head_count": config.num_heads,
            "attention.head_count_kv": layer.kv_heads,
            "attention.key_length": layer.head_dim,
            "attention.value_length": layer.head_dim,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "attention.causal": False,
            "rope.freq_base": layer.rope_theta,
        }
        if self.experts:
            sizes |= {
                "expert_count": config.num_experts,
                "expert_used_count": config.experts_per_token,
                "expert_feed_forward_length": config.expert_size,
            }
        ids = {
            "bos": config.bos_id,
            "eos": next(iter(config.eos_ids), None),
            "padding": config.pad_id,
            "mask": config.mask_id,
        }
        return {
            **{f"{self.architecture}.{key}": value for key, value in sizes.items()},
            "diffusion.canvas_length": config.canvas_length,
            "diffusion.shift_logits": False,
            **self.gguf_keys,
            **{f"tokenizer.ggml.{key}_token_id": i for key, i in ids.items() if i is not None},
        }


def _dense(read: FieldReader, width: str) -> dict[str, int]:
    none = dict.fromkeys(("num_experts", "experts_per_token", "expert_size"), 0)
    return {"intermediate_size": read.integer(width), **none}


def _hf_experts(read: FieldReader) -> dict[str, int]:
    read.only("decoder_sparse_step", 1)
    read.only("mlp_only_layers", None, [])
    return {
        "intermediate_size": 0,
        # Newer versions of `transformers` write the second name.
        "num_experts": read.integer(
            "num_experts" if "num_experts" in read.values else "num_local_experts"
        ),
        "experts_per_token": read.integer("num_experts_per_tok"),
        "expert_size": read.integer("moe_intermediate_size"),
    }


def _refuse_unsupported(read: FieldReader) -> None:
    read.only("hidden_act", "silu")
    read.only("attention_bias", False)
    read.only("use_sliding_window", False)
    read.only("rope_scaling", None)
    kinds = read.values.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
    ):
        raise ConfigError("config.json: layer_types: only 'full_attention' is supported")


def _hf_theta(read: FieldReader) -> float:
    """The base of the rotary frequencies, which newer files have in `rope_parameters`."""
    if read.values.get("rope_parameters") is None:
        return read.number("rope_theta", 1e4)
    rope = read.child("rope_parameters")
    rope.only("rope_type", "default")
    return rope.number("rope_theta", 1e4)


def _gguf_experts(read: FieldReader) -> dict[str, int]:
    return {
        "intermediate_size": 0,
        "num_experts": read.integer("expert_count"),
        "experts_per_token": read.integer("expert_used_count"),
        "expert_size": read.integer("expert_feed_forward_length"),
    }


def _mask(read: FieldReader, vocab_size: int) -> int:
    given = read.token("mask_token_id", vocab_size)
    if given is None and vocab_size <= MASK_ID:
        raise ConfigError(
            f"{read.where}: {read.prefix}mask_token_id is missing, and a vocabulary of "
            f"{vocab_size} has no {MASK_ID}, which is Qwen3's; name the id of the mask token"
        )
    return MASK_ID if given is None else given


def _one_kind(config: ModelConfig) -> LayerConfig:
    """The kind of all layers. Raises ConfigError where they differ."""
    first = config.layers[0]
    if any(layer != first for layer in config.layers):
        raise ConfigError("layers differ from one another, which files of this kind cannot say")
    return first
