"""The shape of a DiffusionGemma network, read from either kind of metadata.

`ModelConfig` is the one description that the rest of the house uses; it knows where its
numbers come from (a Hugging Face `config.json` or GGUF keys), but no tensors and no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

ARCHITECTURE = "diffusion-gemma"
MOST_LAYERS = 10_000  # beyond it a layer count is garbage, and would become allocations


class ConfigError(ValueError):
    """The metadata describe something that this network cannot be; the message says which field."""


@dataclass(frozen=True)
class LayerConfig:
    """What differs from layer to layer.

    `sliding` layers see a window and have a V projection; full layers see everything, and their
    V is the raw K projection.  `rope_pairs` is how many of the `head_dim / 2` rotary pairs turn.
    """

    sliding: bool
    kv_heads: int
    head_dim: int
    rope_theta: float
    rope_pairs: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one network; token ids are None where the checkpoint names none."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    sliding_window: int
    canvas_length: int
    context_length: int
    rms_norm_eps: float
    logit_softcap: float
    layers: tuple[LayerConfig, ...]
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float") and not value > 0:
                raise ConfigError(f"{field.name}: must be positive, got {value}")
        if not self.layers:
            raise ConfigError("num_hidden_layers: a network needs at least one layer")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"top_k_experts: {self.experts_per_token} active experts of {self.num_experts}"
            )
        for index, layer in enumerate(self.layers):
            if layer.kv_heads < 1 or self.num_heads % layer.kv_heads:
                raise ConfigError(
                    f"layer {index}: {self.num_heads} query heads cannot share "
                    f"{layer.kv_heads} key-value heads evenly"
                )
            if layer.head_dim < 2 or layer.head_dim % 2:
                raise ConfigError(f"layer {index}: head_dim {layer.head_dim} is not even")

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """From `config.json` (and `generation_config.json`, which names the end tokens).

        Raises ConfigError, naming the field, for what is missing or not supported.
        """
        kind = config.get("model_type")
        if kind != "diffusion_gemma":
            raise ConfigError(
                f"config.json: model_type is {kind!r}; Sfumato runs 'diffusion_gemma' checkpoints"
            )
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError("config.json: text_config is missing")
        _refuse_unsupported(config, text)
        read = _Reader("config.json: text_config", text)
        eos = (generation or {}).get("eos_token_id", text.get("eos_token_id"))
        return cls(
            vocab_size=read.integer("vocab_size"),
            hidden_size=read.integer("hidden_size"),
            intermediate_size=read.integer("intermediate_size"),
            num_heads=read.integer("num_attention_heads"),
            num_experts=read.integer("num_experts"),
            experts_per_token=read.integer("top_k_experts"),
            expert_size=read.integer("moe_intermediate_size"),
            sliding_window=read.integer("sliding_window"),
            canvas_length=_Reader("config.json", config).integer("canvas_length", 256),
            context_length=read.integer("max_position_embeddings", 131072),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            logit_softcap=read.number("final_logit_softcapping", 30.0),
            layers=_hf_layers(text, read),
            bos_id=text.get("bos_token_id"),
            eos_ids=_ids(eos),
            pad_id=text.get("pad_token_id"),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], vocab_size: int) -> ModelConfig:
        """From GGUF keys; `vocab_size` is the number of rows of `token_embd.weight`.

        Raises ConfigError, naming the key, for what is missing or not supported.
        """
        read = _Reader("GGUF metadata", metadata, prefix=f"{ARCHITECTURE}.")
        count = read.integer("block_count")
        kv_heads = read.per_layer("attention.head_count_kv", count)
        sliding = read.per_layer("attention.sliding_window_pattern", count, scalar=False)
        if metadata.get(f"{ARCHITECTURE}.attention.shared_kv_layers", 0):
            raise ConfigError("GGUF metadata: shared KV layers are not part of DiffusionGemma")
        full_dim = read.integer("attention.key_length")
        sliding_dim = read.integer("attention.key_length_swa", full_dim)
        theta = read.number("rope.freq_base", 1e6), read.number("rope.freq_base_swa", 1e4)
        layers = tuple(
            LayerConfig(True, int(heads), sliding_dim, theta[1], sliding_dim // 2)
            if window
            # The published files' rope_freqs.weight stills all but the first quarter of the pairs.
            else LayerConfig(False, int(heads), full_dim, theta[0], full_dim // 8)
            for heads, window in zip(kv_heads, sliding, strict=True)
        )
        token = "tokenizer.ggml."
        return cls(
            vocab_size=vocab_size,
            hidden_size=read.integer("embedding_length"),
            intermediate_size=read.integer("feed_forward_length"),
            num_heads=read.integer("attention.head_count"),
            num_experts=read.integer("expert_count"),
            experts_per_token=read.integer("expert_used_count"),
            expert_size=read.integer("expert_feed_forward_length"),
            sliding_window=read.integer("attention.sliding_window"),
            canvas_length=_Reader("GGUF metadata", metadata).integer(
                "diffusion.canvas_length", 256
            ),
            context_length=read.integer("context_length", 131072),
            rms_norm_eps=read.number("attention.layer_norm_rms_epsilon", 1e-6),
            logit_softcap=read.number("final_logit_softcapping", 30.0),
            layers=layers,
            bos_id=metadata.get(token + "bos_token_id"),
            eos_ids=_ids(metadata.get(token + "eos_token_id")),
            pad_id=metadata.get(token + "padding_token_id"),
        )


class _Reader:
    """Typed access to one mapping, with errors that say where the field should have been."""

    def __init__(self, where: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self.where, self.values, self.prefix = where, values, prefix

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(self.prefix + key, default)
        if value is None:
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} is missing; the checkpoint is incomplete"
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        # Sizes become allocations: an absurd one must stop here and not in the allocator.
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} is {value!r}, not a positive integer"
            )
        return value

    def number(self, key: str, default: float) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} is {value!r}, not a positive number"
            )
        return float(value)

    def per_layer(self, key: str, count: int, scalar: bool = True) -> list[Any]:
        """One value a layer; with `scalar`, a single integer stands for all layers."""
        value = self._get(key, None)
        if count > MOST_LAYERS:
            raise ConfigError(f"{self.where}: {count} layers; that is no real checkpoint")
        if scalar and isinstance(value, int):
            return [value] * count
        if isinstance(value, int | float | str) or len(value) != count:
            raise ConfigError(f"{self.where}: {self.prefix}{key} must list {count} values")
        return list(value)


def _refuse_unsupported(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    if text.get("use_bidirectional_attention") not in (None, "vision"):
        raise ConfigError(
            "config.json: use_bidirectional_attention is "
            f"{text['use_bidirectional_attention']!r}; only None and 'vision' are supported"
        )
    for where in (config, text):
        if where.get("tie_word_embeddings", True) is not True:
            raise ConfigError("config.json: untied word embeddings are not supported")
    if text.get("attention_bias"):
        raise ConfigError("config.json: attention_bias is not supported")
    activation = text.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise ConfigError(f"config.json: hidden_activation {activation!r} is not supported")


def _hf_layers(text: Mapping[str, Any], read: _Reader) -> tuple[LayerConfig, ...]:
    """Accepts both spellings: `global_head_dim` and friends, and newer `per_layer_config`."""
    count = read.integer("num_hidden_layers")
    if count > MOST_LAYERS:
        raise ConfigError(f"config.json: num_hidden_layers is {count}; that is no real checkpoint")
    kinds = text.get("layer_types")
    if kinds is None:
        kinds = [
            "full_attention" if (i + 1) % 6 == 0 or i == count - 1 else "sliding_attention"
            for i in range(count)
        ]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ConfigError(f"config.json: layer_types must list {count} layers")
    head_dim, kv_heads = read.integer("head_dim"), read.integer("num_key_value_heads")
    # Present, it alone says what differs, even where it is empty because nothing does.
    newer = text.get("per_layer_config") is not None
    overrides = {str(k).lstrip("0") or "0": v for k, v in _mapping(text, "per_layer_config")}
    rope = dict(_mapping(text, "rope_parameters"))
    layers = []
    for index, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"config.json: layer_types[{index}] is {kind!r}")
        sliding = kind == "sliding_attention"
        heads, dim = kv_heads, head_dim
        if not (sliding or newer):
            dim = text.get("global_head_dim") or 512
            heads = text.get("num_global_key_value_heads") or kv_heads
        own = overrides.get(str(index), {})
        dim, heads = own.get("head_dim", dim), own.get("num_key_value_heads", heads)
        if not isinstance(dim, int) or not isinstance(heads, int):
            raise ConfigError(f"config.json: per_layer_config of layer {index} is not numeric")
        layers.append(
            LayerConfig(sliding, heads, dim, *_hf_rope(rope.get(kind) or {}, sliding, dim))
        )
    return tuple(layers)


def _mapping(text: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    value = text.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {key} must be an object")
    return list(value.items())


def _hf_rope(rope: Mapping[str, Any], sliding: bool, head_dim: int) -> tuple[float, int]:
    kind = rope.get("rope_type", "default" if sliding else "proportional")
    theta = float(rope.get("rope_theta", 1e4 if sliding else 1e6))
    if kind == "default" and rope.get("partial_rotary_factor", 1.0) == 1.0:
        return theta, head_dim // 2
    if kind == "proportional":
        return theta, int(rope.get("partial_rotary_factor", 0.25) * head_dim // 2)
    raise ConfigError(f"config.json: rope_type {kind!r} is not supported")


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(int(v) for v in value)
