"""`ModelConfig`: the shape of a network, as the rest of the package uses it.

Knows no files and no metadata: the readers are the families'.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from sfumato.ops.reference import Gating


class ConfigError(ValueError):
    """The metadata describe something that this network cannot be; the message says which field."""


_MAY_BE_ZERO = (
    *("intermediate_size", "num_experts", "experts_per_token", "expert_size", "logit_softcap"),
)


@dataclass(frozen=True)
class LayerConfig:
    """What differs from layer to layer.

    `sliding` layers see a window, full layers everything; `Design.own_values` says which have a V
    projection.  `rope_pairs` is how many of the `head_dim / 2` rotary pairs turn.
    """

    sliding: bool
    kv_heads: int
    head_dim: int
    rope_theta: float
    rope_pairs: int


Borders = Literal["front", "back"]


@dataclass(frozen=True)
class Design:
    """What differs between networks beside their sizes. The defaults are DiffusionGemma's."""

    gating: Gating = "gelu"  # the function of the gate, in the dense MLP and in experts
    post_norms: bool = True
    """Norms of what attention and the feed-forward part add, and a scalar for each layer and phase;
    without them a layer has a norm before either and nothing after it."""
    scaled_embedding: bool = True  # by the root of the hidden size
    scaled_queries: bool = False  # by 1 / sqrt(head_dim); elsewhere attention has scale 1
    own_values: bool = False
    """Every layer has a V projection, whose result is V; elsewhere V is normed, and full layers
    have the K projection for it."""
    scaled_router: bool = True
    """The router reads a norm of its input times a learned scale, and a learned scale of each
    expert multiplies its share."""
    shares_of_one: bool = True  # the shares of the experts chosen sum to 1 before their scales
    self_conditioning: bool = True  # there are weights that read a soft embedding
    tied_head: bool = True  # the output layer is the embedding
    borders: Borders | None = None
    """Where blocks of `canvas_length` positions begin; in the encode phase a token sees its whole
    block, and all before it. "front": at the first token of a prompt, whose last block, if it is
    not full, is the first canvas with its tokens pinned; "back": at the prompt's end, back from
    which they are counted, so that the first block may be short (`Slot.offset`), and the last block
    of a reply too. None: there are no blocks, and a token sees none after itself."""


MOST_BLOCK = 4096
"""Positions of a block, of which each takes a step at most."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of tokens that see one another in the encode phase: the first `offset` positions are
    one, and each `size` positions after these. A size of 1: there are none."""

    size: int = 1
    offset: int = 0
    short_end: bool = False  # a reply's last block has only the positions that its limit leaves

    def border(self, length: int) -> int:
        """The last end of a block at or before `length`: so many of the first positions."""
        return max(0, length - (length - self.offset) % self.size)

    def together(self, start: int, count: int, most: int) -> int:
        """How many of the `most` tokens from position `start` on to encode at once, where `count`
        from 1 are wanted: as many as end a block, `count` at most if that is a block, or else the
        first block; all of them where they end before that."""
        if count >= most:
            return most
        end = self.border(start + count)
        return min(most, (end if end > start else self.border(start + self.size)) - start)


NO_BLOCKS = Blocks()


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one network; token ids are None where the checkpoint names none.

    A network without a dense MLP has `intermediate_size` 0, one without experts 0 in the three
    sizes of these. `logit_softcap` is 0 where logits are as they come. `sliding_window` counts for
    sliding layers alone.
    """

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
    design: Design = Design()

    @property
    def block(self) -> int | None:
        """Positions of a block, all of which see one another in the encode phase; None: a token
        sees none after itself there."""
        return self.canvas_length if self.design.borders else None

    def blocks(self, prompt: int) -> Blocks:
        """The blocks of what begins with a prompt of so many tokens."""
        if self.block is None:
            return NO_BLOCKS
        if self.design.borders == "back":
            return Blocks(self.block, prompt % self.block, short_end=True)
        return Blocks(self.block)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in _MAY_BE_ZERO else 1e-30
            if field.type in ("int", "float") and not value >= least:
                raise ConfigError(f"{field.name}: must be positive, got {value}")
        experts = [self.num_experts, self.experts_per_token, self.expert_size]
        if any(experts) != all(experts) or not (self.intermediate_size or self.num_experts):
            raise ConfigError(
                f"num_experts: {self.num_experts}, of {self.expert_size} and with "
                f"{self.experts_per_token} active, beside an MLP of {self.intermediate_size}; a "
                "layer has an MLP, experts of some size, or both"
            )
        if self.mask_id is not None and not 0 <= self.mask_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id: {self.mask_id} is no token of the {self.vocab_size} that there are"
            )
        if self.block is not None and not 2 <= self.block <= min(MOST_BLOCK, self.context_length):
            raise ConfigError(
                f"canvas_length: blocks of {self.block} tokens; they have 2 to {MOST_BLOCK:,}, and "
                f"no more than the context of {self.context_length:,}"
            )
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
