"""`ModelConfig`: the shape of a network, as the rest of the package uses it.

Knows no files and no metadata: the readers are the families'.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


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
    filler_id: int | None = None  # fills canvases that are read, where it is not the family's
    mask_id: int | None = None  # stands where no token is yet; None: that is noise

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
