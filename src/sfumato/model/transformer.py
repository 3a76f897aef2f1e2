"""The network: embeddings, blocks and the final norm; one set of weights for both phases.

The encode phase reads the prompt and finished canvases, the denoise phase a canvas.  They differ
in which keys a token sees (an `Attend`), in their input, and in one scalar per layer.  Module and
parameter names are the checkpoint's, so a weight's path here is its canonical name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from sfumato import ops
from sfumato.model.attention import Attend, Attention, KeepingAttend
from sfumato.model.experts import Experts, Router
from sfumato.model.layers import (
    GatedMLP,
    RMSNorm,
    Rotary,
    RotaryKey,
    SelfConditioning,
    rotary_key,
    rounded,
)
from sfumato.model.model_config import LayerConfig, ModelConfig
from sfumato.model.streamed_layers import StreamedLayers


class Block(nn.Module):
    """One layer: attention, then a dense MLP and a mixture of experts side by side."""

    def __init__(self, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.eps = eps
        self.device: torch.device | None = None  # where it is not that of the embedding
        # Within it the layer's weights can be computed with; streamed ones come for that.
        self.present: Callable[[], AbstractContextManager[None]] = nullcontext
        self.self_attn = Attention(config, layer)
        self.mlp = GatedMLP(hidden, config.intermediate_size)
        self.router = Router(config)
        self.experts = Experts(config)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm_1 = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm_2 = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm_2 = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))
        self.encoder_layer_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        index: int,
        encoding: bool | Tensor,
        only: Tensor | None = None,
    ) -> Tensor:
        """x [..., tokens, hidden] → the same; encoding: of all tokens, or bool [tokens, 1]; only
        int64 [n]: of which tokens, packed, results are wanted (None: of all)."""
        attended = self.self_attn(self.input_layernorm(x), rotary, attend, index, only)
        if only is not None:
            x = x.index_select(0, only)
        post, dense = self.post_attention_layernorm, self.pre_feedforward_layernorm
        expert = self.pre_feedforward_layernorm_2
        x, dense_in, expert_in = ops.after_attention(
            x, attended, post.weight, dense.weight, expert.weight, self.eps
        )
        return self._feed_forward(x, dense_in, expert_in, self._scalar(encoding))

    def _scalar(self, encoding: bool | Tensor) -> Tensor:
        if isinstance(encoding, bool):
            return self.encoder_layer_scalar if encoding else self.layer_scalar
        return torch.where(encoding, self.encoder_layer_scalar, self.layer_scalar)

    def _feed_forward(
        self, x: Tensor, dense_in: Tensor, expert_in: Tensor, scalar: Tensor
    ) -> Tensor:
        """The residual after the layer; dense_in and expert_in: norms of the residual x."""
        dense = self.mlp(dense_in)
        # The router reads the residual itself; the experts read it through their own norm.
        routed = self.router(x.reshape(-1, x.shape[-1]))
        mixed = self.experts(expert_in.reshape(-1, x.shape[-1]), *routed).view_as(dense)
        first, second = self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2
        weights = first.weight, second.weight, self.post_feedforward_layernorm.weight
        return ops.after_layer(x, dense, mixed, *weights, scalar, self.eps)


class Embedding(nn.Module):
    """The tied token embedding, read here as input; `model/head.py` reads it as output."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """ids int64 [...] → [..., hidden], scaled by sqrt(hidden) as rounded to `dtype`."""
        rows = ops.embed(ids, self.weight, dtype)
        return rows * rounded(rows.shape[-1] ** 0.5, dtype)


class Transformer(nn.Module):
    """Token ids (and a soft embedding) to final hidden states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.streams: tuple[StreamedLayers, ...] = ()  # one for each card that has such layers
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in config.layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.layers)
        self.self_conditioning = SelfConditioning(
            config.hidden_size, config.intermediate_size, config.rms_norm_eps
        )

    def encode(self, ids: Tensor, positions: Tensor, attend: Attend, dtype: torch.dtype) -> Tensor:
        """Encode phase: ids and positions int64 [..., tokens] → hidden [..., tokens, hidden]."""
        return self._blocks(self.embed_tokens(ids, dtype), positions, attend, encoding=True)

    def encode_keys(
        self, ids: Tensor, positions: Tensor, attend: KeepingAttend, dtype: torch.dtype
    ) -> None:
        """Encode phase of ids and positions int64 [tokens] of which only keys and values are
        wanted: of the last layer nothing else is computed."""
        x = self.embed_tokens(ids, dtype)
        tables = _Tables(self.rotary, positions, dtype)
        *others, (last, layer) = zip(self._on_devices(x.device), self.config.layers, strict=True)
        for index, ((block, at), each) in enumerate(others):
            x = x.to(at)
            with block.present():
                x = block(x, tables.of(each, at), attend, index, True)
        block, at = last
        with block.present():
            normed = block.input_layernorm(x.to(at))
            attend.keep(*block.self_attn.keys_values(normed, tables.of(layer, at)))

    def denoise(
        self,
        canvas: Tensor,
        soft: Tensor | None,
        positions: Tensor,
        attend: Attend,
        dtype: torch.dtype,
        only: Tensor | None = None,
        encoding: Tensor | None = None,
    ) -> Tensor:
        """Denoise phase: canvas and positions int64 [..., length], soft [..., length, hidden] or
        None → hidden [..., length, hidden], ready for the vocabulary head; only int64 [n]: of which
        tokens, packed, hidden states are wanted (None: of all); encoding bool [tokens, 1]: which
        tokens are in the encode phase, without self-conditioning and with that phase's scalars."""
        embedded = self.embed_tokens(canvas, dtype)
        x = self.self_conditioning(embedded, soft)
        if encoding is None:
            return self._blocks(x, positions, attend, encoding=False, only=only)
        return self._blocks(torch.where(encoding, embedded, x), positions, attend, encoding)

    def _blocks(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        encoding: bool | Tensor,
        only: Tensor | None = None,
    ) -> Tensor:
        """Hidden states go to the device of each layer in turn, and back to where they began."""
        home, last = x.device, len(self.config.layers) - 1
        tables = _Tables(self.rotary, positions, x.dtype)
        layers = zip(self._on_devices(home), self.config.layers, strict=True)
        for index, ((block, at), layer) in enumerate(layers):
            # The last layer needs keys and values of all tokens, and the rest of the wanted ones.
            wanted = only.to(at) if only is not None and index == last else None
            phase = encoding if isinstance(encoding, bool) else encoding.to(at)
            with block.present():
                x = block(x.to(at), tables.of(layer, at), attend, index, phase, wanted)
        return self.norm(x.to(home))

    def _on_devices(self, home: torch.device) -> Iterator[tuple[Block, torch.device]]:
        for block in self.layers:
            assert isinstance(block, Block)
            yield block, home if block.device is None else block.device


class _Tables:
    """The rotary tables of one forward, made on each device that it comes to."""

    def __init__(self, rotary: Rotary, positions: Tensor, dtype: torch.dtype) -> None:
        self._rotary, self._positions, self._dtype = rotary, positions, dtype
        self._made: dict[torch.device, dict[RotaryKey, tuple[Tensor, Tensor]]] = {}

    def of(self, layer: LayerConfig, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of the layer's kind, on the device."""
        if device not in self._made:
            positions = self._positions.to(device)
            self._made[device] = self._rotary.tables(positions, self._dtype)
        return self._made[device][rotary_key(layer)]
