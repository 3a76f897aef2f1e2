"""`VisionConfig`: the shape of a vision tower, and its readers: `vision_config` of config.json and
the metadata of an mmproj GGUF file.

A field that is absent takes `transformers`' default where there is one that does not change with
the tower's size; one that is given must make sense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sfumato.model.families.family import MOST_LAYERS, FieldReader, shortest_float, shown
from sfumato.model.model_config import ConfigError

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each tensor of a file, in torch order."""

_SOFT_TOKENS = "default_soft_tokens"  # a key of our own; published towers have the usual 280
LARGEST = 1 << 20  # of any side of a tensor: the skeleton of a larger one cannot be made


@dataclass(frozen=True)
class VisionConfig:
    """Sizes and constants of one tower and its projector."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    patch: int  # pixels across and down
    pool: int  # patches across and down that become one soft token
    positions: int  # patches across or down, at most
    text_size: int  # of a soft token, as the text network reads it
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100.0
    clamps: bool = False  # inputs and outputs of linear maps are clamped, by learned bounds
    standardizes: bool = False  # soft tokens are shifted and scaled
    soft_tokens: int = 280  # how many a picture takes at most, unless a request says otherwise

    def __post_init__(self) -> None:
        largest = max(
            self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim,
            self.patch * self.pool, self.positions, self.text_size,
        )  # fmt: skip
        if self.num_layers > MOST_LAYERS or largest > LARGEST:
            size = f"{self.num_layers} layers, {largest} wide"
            raise ConfigError(f"the vision tower has {size}; that is no real checkpoint")
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"num_attention_heads: {self.num_heads} query heads cannot share {self.kv_heads} "
                "key-value heads evenly"
            )
        if self.positions < self.pool:
            raise ConfigError(
                f"{self.positions} positions, fewer than a soft token has patches ({self.pool})"
            )
        if self.head_dim < 4 or self.head_dim % 4:
            raise ConfigError(
                f"head_dim: {self.head_dim} is no multiple of 4: half of it turns with each axis"
            )


def vision_from_hf(config: Mapping[str, Any], text_size: int) -> VisionConfig | None:
    """From config.json; text_size: the text network's hidden size. None where the model has no
    tower. Raises ConfigError, naming the field, for what is missing or not supported."""
    if config.get("vision_config") is None:
        return None
    read = FieldReader("config.json", config).child("vision_config")
    rope = read.child("rope_parameters", {})
    read.only("model_type", "gemma4_vision")
    read.only("hidden_activation", "gelu_pytorch_tanh")
    read.only("attention_bias", False, None)
    # Older checkpoints say "default" of the same axial rotation.
    rope.only("rope_type", "axial", "default")
    return VisionConfig(
        hidden_size=read.integer("hidden_size"),
        intermediate_size=read.integer("intermediate_size"),
        num_layers=read.integer("num_hidden_layers"),
        num_heads=read.integer("num_attention_heads"),
        kv_heads=read.integer("num_key_value_heads"),
        head_dim=read.integer("head_dim"),
        patch=read.integer("patch_size", 16),
        pool=read.integer("pooling_kernel_size", 3),
        positions=read.integer("position_embedding_size", 10240),
        text_size=text_size,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6, below=0.1),
        rope_theta=rope.number("rope_theta", 100.0),
        clamps=_flag(read, "use_clipped_linears"),
        standardizes=_flag(read, "standardize"),
        soft_tokens=read.integer("default_output_length", 280),
    )


def vision_to_hf(config: VisionConfig) -> dict[str, Any]:
    """`vision_config` of config.json, of which `vision_from_hf` reads the same."""
    return {
        "model_type": "gemma4_vision",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "patch_size": config.patch,
        "pooling_kernel_size": config.pool,
        "position_embedding_size": config.positions,
        "rms_norm_eps": shortest_float(config.rms_norm_eps),
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.rope_theta},
        "use_clipped_linears": config.clamps,
        "standardize": config.standardizes,
        "default_output_length": config.soft_tokens,
    }


def vision_from_gguf(metadata: Mapping[str, Any], shapes: Shapes) -> VisionConfig:
    """From the metadata of an mmproj file, and the shapes of its tensors by their canonical names
    (`loading.py`), which alone say the rest. Raises ConfigError, naming the key or tensor."""
    read = FieldReader("GGUF metadata", metadata, prefix="clip.vision.")
    projector = metadata.get("clip.projector_type", metadata.get("clip.vision.projector_type"))
    kind, name = shown(metadata.get("general.architecture")), shown(projector)
    if (kind, name) != (shown("clip"), shown("gemma4v")):  # values may be arrays
        which = " (a model without a vision tower)" if name == shown("gemma4uv") else ""
        raise ConfigError(
            f"GGUF metadata: clip.projector_type is {name}{which}; only 'gemma4v' is "
            "supported: use the mmproj file of DiffusionGemma or of Gemma 4 26B-A4B"
        )

    def size(name: str, axis: int) -> int:
        if name not in shapes or len(shapes[name]) <= axis:
            raise ConfigError(f"{name} is missing; this is no mmproj file of the projector gemma4v")
        return shapes[name][axis]

    heads = read.integer("attention.head_count")
    head_dim = size("layers.0.self_attn.q_norm.weight", 0)
    return VisionConfig(
        hidden_size=read.integer("embedding_length"),
        intermediate_size=read.integer("feed_forward_length"),
        num_layers=read.integer("block_count"),
        num_heads=heads,
        kv_heads=max(1, size("layers.0.self_attn.k_proj.weight", 0) // max(1, head_dim)),
        head_dim=head_dim,
        patch=read.integer("patch_size"),
        pool=read.integer("projector.scale_factor", 3),
        positions=size("position_embedding", 1),
        text_size=size("projection.weight", 0),
        rms_norm_eps=shortest_float(read.number("attention.layer_norm_epsilon", 1e-6, below=0.1)),
        clamps=any(name.endswith(".input_max") for name in shapes),
        standardizes="std_bias" in shapes or "std_scale" in shapes,
        soft_tokens=read.integer(_SOFT_TOKENS, 280),
    )


def vision_to_gguf(config: VisionConfig) -> dict[str, Any]:
    """The `clip` keys of an mmproj file, of which `vision_from_gguf` reads the same. Raises
    ConfigError for what they cannot say."""
    if config.rope_theta != 100.0:
        raise ConfigError(
            f"rope_theta: {config.rope_theta:g} is not 100, all that mmproj files know"
        )
    usual = config.soft_tokens == 280
    return {
        "clip.projector_type": "gemma4v",
        "clip.has_vision_encoder": True,
        **{
            f"clip.vision.{key}": value
            for key, value in {
                "projection_dim": config.text_size,
                "image_size": 224,  # no tower of this kind reads it, but programs ask for it
                "patch_size": config.patch,
                "embedding_length": config.hidden_size,
                "feed_forward_length": config.intermediate_size,
                "block_count": config.num_layers,
                "attention.head_count": config.num_heads,
                "attention.layer_norm_epsilon": config.rms_norm_eps,
                "projector.scale_factor": config.pool,
                "image_mean": np.zeros(3, np.float32),
                "image_std": np.ones(3, np.float32),
                **({} if usual else {_SOFT_TOKENS: config.soft_tokens}),
            }.items()
        },
    }


def _flag(read: FieldReader, key: str) -> bool:
    value = read.values.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{read.where}: {key} is {shown(value)}, not true or false")
    return value
