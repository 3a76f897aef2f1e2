"""The shape of a DiffusionGemma network, read from either kind of metadata.

`ModelConfig` is the one description that the rest of the house uses; it knows where its
numbers come from (a Hugging Face `config.json` or GGUF keys), but no tensors and no files.

A field that is absent takes `transformers`' default where there is one that does not change with
the model's size. A field that is given must make sense: null is refused too, except where it has
a meaning to `transformers` (`layer_types`, `num_global_key_value_heads`, the token ids,
`use_bidirectional_attention`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sfumato.weights.errors import quoted
from sfumato.weights.names import ARCHITECTURE

MOST_LAYERS = 512  # building the skeleton of more would take longer than a bad file may
LARGEST = 1e30  # beyond it a float is garbage, and float32 near its end
LARGEST_EPS = 0.1  # a norm's epsilon is 1e-5 or 1e-6; one that outweighs the variance is garbage
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
}
"""The rotary parameters of each kind of layer where `config.json` has no `rope_parameters`."""


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
        if self.sliding_window < 2:
            raise ConfigError(
                f"sliding_window: {self.sliding_window} leaves a canvas no prefix to look at"
            )
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
            if layer.rope_pairs > layer.head_dim // 2:
                raise ConfigError(
                    f"layer {index}: {layer.rope_pairs} rotary pairs cannot turn in a head_dim of "
                    f"{layer.head_dim}"
                )

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
                f"config.json: model_type is {quoted(kind)}; Sfumato runs 'diffusion_gemma' "
                "checkpoints"
            )
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError("config.json: text_config is missing or not an object")
        _refuse_unsupported(config, text)
        read = _Reader("config.json: text_config", text)
        vocab_size = read.integer("vocab_size")
        own_ends = read.tokens("eos_token_id", vocab_size)
        ends = _Reader("generation_config.json", generation or {}).tokens(
            "eos_token_id", vocab_size
        )
        return cls(
            vocab_size=vocab_size,
            hidden_size=read.integer("hidden_size"),
            intermediate_size=read.integer("intermediate_size"),
            num_heads=read.integer("num_attention_heads"),
            num_experts=read.integer("num_experts"),
            experts_per_token=read.integer("top_k_experts"),
            expert_size=read.integer("moe_intermediate_size"),
            sliding_window=read.integer("sliding_window"),
            canvas_length=_Reader("config.json", config).integer("canvas_length", 256),
            context_length=read.integer("max_position_embeddings", 131072),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6, below=LARGEST_EPS),
            logit_softcap=read.number("final_logit_softcapping", 30.0),
            layers=_hf_layers(read),
            bos_id=read.token("bos_token_id", vocab_size),
            eos_ids=ends or own_ends,
            pad_id=read.token("pad_token_id", vocab_size),
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], vocab_size: int, full_pairs: int | None = None
    ) -> ModelConfig:
        """From GGUF keys; `vocab_size` is the number of rows of `token_embd.weight`, and
        `full_pairs` how many rotary pairs of full layers turn (None: a quarter, as published).

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
            LayerConfig(True, heads, sliding_dim, theta[1], sliding_dim // 2)
            if window
            else LayerConfig(False, heads, full_dim, theta[0], full_pairs or full_dim // 8)
            for heads, window in zip(kv_heads, sliding, strict=True)
        )
        token = _Reader("GGUF metadata", metadata, prefix="tokenizer.ggml.")
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
            rms_norm_eps=read.number("attention.layer_norm_rms_epsilon", 1e-6, below=LARGEST_EPS),
            logit_softcap=read.number("final_logit_softcapping", 30.0),
            layers=layers,
            bos_id=token.token("bos_token_id", vocab_size),
            eos_ids=token.tokens("eos_token_id", vocab_size),
            pad_id=token.token("padding_token_id", vocab_size),
        )


class _Reader:
    """Typed access to one mapping, with errors that say where the field should have been.

    A default stands for an absent field only: what is given must be sound, and null is not.
    """

    def __init__(self, where: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self.where, self.values, self.prefix = where, values, prefix

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(self.prefix + key, default)
        if value is None and self.prefix + key not in self.values:
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} is missing; the checkpoint is incomplete"
            )
        return value

    def _refusal(self, key: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}: {self.prefix}{key} is {_shown(value)}, not {wanted}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        # Sizes become allocations: an absurd one must stop here and not in the allocator.
        if type(value) is not int or not 0 < value < 2**31:
            raise self._refusal(key, value, "a positive integer of sane size")
        return value

    def number(self, key: str, default: float | None = None, below: float = LARGEST) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value < below:
            raise self._refusal(key, value, f"a number above 0 and below {below:g}")
        return float(value)

    def tokens(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """A token id or a list of them; none where the field is absent or null."""
        value = self.values.get(self.prefix + key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            wanted = f"a token id below the vocab_size of {vocab_size}, or a list of them"
            raise self._refusal(key, value, wanted)
        return tuple(ids)

    def token(self, key: str, vocab_size: int) -> int | None:
        """The one token id, or None where the field is absent or null."""
        ids = self.tokens(key, vocab_size)
        if len(ids) > 1:
            raise self._refusal(key, ids, "one token id")
        return ids[0] if ids else None

    def child(self, key: str, default: Mapping[str, Any] | None = None) -> _Reader:
        """The object under a key."""
        value = self._get(key, default)
        if not isinstance(value, Mapping):
            raise self._refusal(key, value, "an object")
        return _Reader(f"{self.where}.{self.prefix}{key}", value)

    def per_layer(self, key: str, count: int, scalar: bool = True) -> list[int]:
        """One integer or flag a layer; with `scalar`, a single one stands for all layers."""
        value = self._get(key, None)
        if count > MOST_LAYERS:
            raise ConfigError(f"{self.where}: {count} layers; that is no real checkpoint")
        if scalar and isinstance(value, int):
            return [value] * count
        listed = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(listed, list) or len(listed) != count:
            raise ConfigError(f"{self.where}: {self.prefix}{key} must list {count} values")
        if not all(isinstance(entry, int) for entry in listed):
            raise self._refusal(key, value, "a list of integers or flags")
        return listed


def _shown(value: Any) -> str:
    return "null" if value is None else quoted(value)


def _refuse_unsupported(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    supported: tuple[tuple[Mapping[str, Any], str, tuple[Any, ...]], ...] = (
        (config, "tie_word_embeddings", (True,)),
        (text, "tie_word_embeddings", (True,)),
        (text, "use_bidirectional_attention", (None, "vision")),
        (text, "attention_bias", (False,)),
        (text, "hidden_activation", ("gelu_pytorch_tanh",)),
    )
    for where, key, values in supported:
        value = where.get(key, values[0])
        if value not in values:
            only = " or ".join(map(_shown, values))
            raise ConfigError(f"config.json: {key} is {_shown(value)}; only {only} is supported")


def _hf_layers(text: _Reader) -> tuple[LayerConfig, ...]:
    """Accepts both spellings: `global_head_dim` and friends, and newer `per_layer_config`."""
    kinds = _hf_kinds(text)
    head_dim, kv_heads = text.integer("head_dim"), text.integer("num_key_value_heads")
    # Where it is present it alone says what differs; it is empty where nothing does.
    newer = "per_layer_config" in text.values
    overrides = text.child("per_layer_config", {})
    padded = {key[:-1].lstrip("0") + key[-1:]: key for key in overrides.values}
    if strangers := padded.keys() - {str(index) for index in range(len(kinds))}:
        raise ConfigError(
            f"{overrides.where}: {quoted(min(strangers))} is none of the {len(kinds)} layers"
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
        own = overrides.child(padded.get(str(index), ""), {})
        dim, heads = own.integer("head_dim", dim), own.integer("num_key_value_heads", heads)
        layers.append(LayerConfig(sliding, heads, dim, *_hf_rope(rope.child(kind), dim)))
    return tuple(layers)


def _hf_kinds(text: _Reader) -> list[str]:
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


def _hf_rope(rope: _Reader, head_dim: int) -> tuple[float, int]:
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
