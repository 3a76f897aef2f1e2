"""The network: layers, embeddings and the final norm; one set of weights for both phases.

The encode phase reads the prompt and finished canvases, the denoise phase a canvas.  They differ
in which keys a token sees, in their input, and in one scalar per layer.  Which keys a token sees,
where they come from and where they go, is an `Attend`: inference has kinds that use the cache, on
packed tokens of several rows (`segments.py`); training has its own, on padded batches with
gradients.

Modules hold weights and nothing else; a weight is a parameter, or a `Stored` one that
`model/loading.py` puts in its place.  Module and parameter names are the checkpoint's, so a
weight's path here is its canonical name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sfumato import ops
from sfumato.model.adapters import NONE, Adapted, Adapter, LowRank, chosen_by, moved, narrowed
from sfumato.model.model_config import LayerConfig, ModelConfig
from sfumato.model.segments import PackedRows
from sfumato.model.streamed_layers import StreamedLayers
from sfumato.refused import Refused


class Linear(nn.Module):
    """`x @ weight.T` without bias, and what adapters add: [..., inputs] → [..., outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.changes: dict[int, LowRank] = {}  # by the number of the adapter

    def forward(self, x: Tensor, adapted: Sequence[Adapted] = ()) -> Tensor:
        return self.adapt(ops.linear(x, self.weight), x, adapted)

    def adapt(self, y: Tensor, x: Tensor, adapted: Sequence[Adapted]) -> Tensor:
        """y, the product of x with the weight, with what adapters add to it."""
        for number, tokens in adapted:
            if (change := self.changes.get(number)) is not None:
                y = chosen_by(tokens, change.added(y, x), y)
        return y


def each_of(maps: Sequence[Linear], x: Tensor, adapted: Sequence[Adapted]) -> list[Tensor]:
    """The results of one to three linear maps of x."""
    if len(maps) == 1:
        return [maps[0](x, adapted)]
    products = ops.linear_each(x, *(each.weight for each in maps))
    return [each.adapt(y, x, adapted) for each, y in zip(maps, products, strict=True)]


class RMSNorm(nn.Module):
    """RMS norm over the last axis with a learned scale (`x · w`, not `1 + w`)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class GatedMLP(nn.Module):
    """`down(f(gate(x)) · up(x))`, where f is what the gating says."""

    def __init__(self, hidden: int, inner: int, gating: ops.Gating = "gelu") -> None:
        super().__init__()
        self.gating: ops.Gating = gating
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: Tensor, adapted: Sequence[Adapted] = ()) -> Tensor:
        return self.down_proj(self._gated(x, adapted), adapted)

    def _gated(self, x: Tensor, adapted: Sequence[Adapted]) -> Tensor:
        """`f(gate(x)) · up(x)`. The gate stands between the products, so tokens that an adapter
        changes have a pass of their own."""
        maps = self.gate_proj, self.up_proj
        weights = self.gate_proj.weight, self.up_proj.weight
        passes = [each for each in adapted if any(each.number in part.changes for part in maps)]
        if not passes:
            return ops.linear_gated(x, *weights, self.gating)
        gate, up = each_of(maps, x, passes)
        own = ops.gated(gate, up, self.gating)
        # Without kernels the bits of all other tokens are those of the one operation too.
        if not ops.kernels_on(x.device) or any(tokens is None for _, tokens in passes):
            return own
        y = ops.linear_gated(x, *weights, self.gating)
        for _, tokens in passes:
            y = chosen_by(tokens, own, y)
        return y


class SelfConditioning(GatedMLP):
    """Adds the previous step's soft embedding to the canvas embeddings, then normalises the sum."""

    def __init__(self, hidden: int, inner: int, eps: float) -> None:
        super().__init__(hidden, inner)
        self.pre_norm = RMSNorm(hidden, eps)

    def forward(  # type: ignore[override]
        self, embedded: Tensor, soft: Tensor | None = None, adapted: Sequence[Adapted] = ()
    ) -> Tensor:
        """embedded [..., hidden] and soft [..., hidden] (None: zeros) → [..., hidden]."""
        if soft is not None:  # the MLP has no bias: zeros in, zeros out
            embedded = embedded + super().forward(self.pre_norm(soft), adapted)
        return ops.rms_norm(embedded, None, self.pre_norm.eps)


RotaryKey = tuple[float, int, int]
"""What the rotary tables of a layer depend on: theta, turning pairs, head_dim."""


def rotary_key(layer: LayerConfig) -> RotaryKey:
    return layer.rope_theta, layer.rope_pairs, layer.head_dim


class Rotary:
    """Rotary tables for any positions; the frequencies are computed once for each device."""

    def __init__(self, layers: Sequence[LayerConfig]) -> None:
        self._keys = tuple(dict.fromkeys(rotary_key(layer) for layer in layers))
        self._frequencies: dict[tuple[RotaryKey, torch.device], Tensor] = {}

    def tables(
        self, positions: Tensor, dtype: torch.dtype
    ) -> dict[RotaryKey, tuple[Tensor, Tensor]]:
        """cos and sin [..., head_dim / 2] for int positions [...], one pair per kind of layer.

        Angles are float32; the tables are rounded to `dtype`, as the reference does.
        """
        tables, wide = {}, positions.unsqueeze(-1).float()
        for key in self._keys:
            angles = wide * self._frequencies_of(key, positions.device)
            tables[key] = angles.cos().to(dtype), angles.sin().to(dtype)
        return tables

    def _frequencies_of(self, key: RotaryKey, device: torch.device) -> Tensor:
        """float32 [head_dim / 2]: pair i turns by position · theta^(-2i / head_dim); pairs from
        `rope_pairs` on stay still ("proportional" RoPE)."""
        if (key, device) not in self._frequencies:
            theta, pairs, head_dim = key
            steps = torch.arange(0, 2 * pairs, 2, device=device).float()
            frequencies = torch.zeros(head_dim // 2, device=device)
            frequencies[:pairs] = 1.0 / theta ** (steps / head_dim)
            self._frequencies[key, device] = frequencies
        return self._frequencies[key, device]


def rounded(value: float, dtype: torch.dtype) -> float:
    """The value as a tensor of that dtype would hold it, rounded to nearest even.  No tensor is
    made: making one on an accelerator would be a copy to it."""
    fraction, exponent = math.frexp(value)
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)


class Attend(Protocol):
    """Attention of one layer over the keys and values that each query sees, and which adapters
    change the tokens of the forward."""

    @property
    def adapted(self) -> Sequence[Adapted]: ...

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [..., tokens, heads, d]; k, v [..., tokens, kv_heads, d] → like q."""


class RecomputedAttend(Attend, Protocol):
    """Attention whose layers a training computes a second time."""

    def recomputing(self, encoding: bool) -> AbstractContextManager[None]:
        """Within it a layer of that phase attends as it did, and leaves nothing behind."""


class Attention(nn.Module):
    """Projections, per-head norms and rotary embedding of one layer."""

    def __init__(self, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__()
        hidden, eps, design = config.hidden_size, config.rms_norm_eps, config.design
        self.head_dim, self.eps = layer.head_dim, eps
        self.norms_values = not design.own_values
        self.query_scale = layer.head_dim**-0.5 if design.scaled_queries else 1.0
        has_values = layer.sliding or design.own_values
        self.q_proj = Linear(hidden, config.num_heads * layer.head_dim)
        self.k_proj = Linear(hidden, layer.kv_heads * layer.head_dim)
        self.v_proj = Linear(hidden, layer.kv_heads * layer.head_dim) if has_values else None
        self.o_proj = Linear(config.num_heads * layer.head_dim, hidden)
        self.q_norm = RMSNorm(layer.head_dim, eps)
        self.k_norm = RMSNorm(layer.head_dim, eps)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        layer: int,
        only: Tensor | None = None,
        adapted: Sequence[Adapted] = (),
    ) -> Tensor:
        """x [..., tokens, hidden] → [..., tokens, hidden]; only int64 [n]: of which tokens, packed,
        results are wanted (None: of all); adapted: of all tokens."""
        if only is None:
            q, k, *values = self._heads((self.q_proj, *self._stored), x, adapted)
            v = values[0] if values else None
            weights = self._query_weight(), self.k_norm.weight
            q, k, v = ops.prepare_heads(q, k, v, *weights, *rotary, self.eps, self.norms_values)
        else:
            k, v = self.keys_values(x, rotary, adapted)
            x, adapted = x.index_select(0, only), narrowed(adapted, only)
            rotary = rotary[0].index_select(0, only), rotary[1].index_select(0, only)
            (q,) = self._heads((self.q_proj,), x, adapted)
            q = ops.rotate(ops.rms_norm(q, self._query_weight(), self.eps), *rotary)
        return self.o_proj(attend(layer, q, k, v).reshape(*x.shape[:-1], -1), adapted)

    def keys_values(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], adapted: Sequence[Adapted] = ()
    ) -> tuple[Tensor, Tensor]:
        """x [..., tokens, hidden] → keys and values [..., tokens, kv_heads, d]."""
        k, *values = self._heads(self._stored, x, adapted)
        v = values[0] if values else k
        v = ops.rms_norm(v, None, self.eps) if self.norms_values else v
        return ops.rotate(self.k_norm(k), *rotary), v

    @property
    def _stored(self) -> tuple[Linear, ...]:
        """The maps to keys, and to values where these are not the keys."""
        return (self.k_proj,) if self.v_proj is None else (self.k_proj, self.v_proj)

    def _heads(self, maps: Sequence[Linear], x: Tensor, adapted: Sequence[Adapted]) -> list[Tensor]:
        """The results of maps of x [..., tokens, hidden], each [..., tokens, heads, d]."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        return [each.view(heads) for each in each_of(maps, x, adapted)]

    def _query_weight(self) -> Tensor:
        """The weight of the queries' norm, [d], with the scale of attention, whose operation has
        scale 1; in float32 where there is one: rounded, it would be off for all tokens alike."""
        weight = self.q_norm.weight
        return weight if self.query_scale == 1 else weight.float() * self.query_scale


class Router(nn.Module):
    """Chooses experts and their shares for each token.

    Computes in float32 whatever the weights' dtype: the choice is discrete, so rounding here would
    change results more than anywhere else, and the matrix is small.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.proj = Linear(config.hidden_size, config.num_experts)
        scaled = config.design.scaled_router
        self.scale = nn.Parameter(torch.ones(config.hidden_size)) if scaled else None
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts)) if scaled else None
        self.active, self.eps = config.experts_per_token, config.rms_norm_eps
        self.shares_of_one = config.design.shares_of_one

    def forward(self, x: Tensor, adapted: Sequence[Adapted] = ()) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] → chosen int64 and shares float32, both [tokens, active]."""
        others = self.scale, self.per_expert_scale, self.active, self.eps, self.shares_of_one
        chosen, shares = ops.route(x, self.proj.weight, *others)
        for number, tokens in adapted:
            if (change := self.proj.changes.get(number)) is not None:
                weight = ops.dense(self.proj.weight, torch.float32) + change.change()
                own, shares_of_own = ops.route(x, weight, *others)
                chosen = chosen_by(tokens, own, chosen)
                shares = chosen_by(tokens, shares_of_own, shares)
        return chosen, shares


class Experts(nn.Module):
    """The weights of all experts of a layer, stacked."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.device: torch.device | None = None  # of the weights, where it is not that of x
        self.gating: ops.Gating = config.design.gating
        count, size, hidden = config.num_experts, config.expert_size, config.hidden_size
        self.count = count
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, size))
        self.changes: dict[str, dict[int, LowRank]] = {"gate_up_proj": {}, "down_proj": {}}

    def forward(
        self, x: Tensor, chosen: Tensor, shares: Tensor, adapted: Sequence[Adapted] = ()
    ) -> Tensor:
        """x [tokens, hidden]; chosen and shares [tokens, active] → [tokens, hidden].
        The experts compute where their weights are, and the result is where x is."""
        own = self.device or x.device
        weights = self.gate_up_proj, self.down_proj
        given = x.to(own), chosen.to(own), shares.to(own)
        passes = [
            (tokens, changes)
            for number, tokens in moved(adapted, own)
            if any(changes := [each.get(number) for each in self.changes.values()])
        ]
        is_whole = any(tokens is None for tokens, _ in passes)
        y = given[0] if is_whole else ops.experts(*given, *weights, self.gating)
        for tokens, changes in passes:
            # The gate stands between the products, so an adapter has a pass of its own.
            parts = partial(self._changed_parts, changes)
            y = chosen_by(tokens, ops.mixture(*given, self.count, parts), y)
        return y.to(x.device)

    def _changed_parts(
        self, changes: Sequence[LowRank | None], rows: Tensor, offsets: Tensor
    ) -> Tensor:
        """What experts with the changes of their two weights make of rows [n, hidden] in groups."""

        def product(x: Tensor, weight: ops.Weight, change: LowRank | None) -> Tensor:
            y = by_expert(x, weight)
            return y if change is None else change.added(y, x, by_expert)

        def by_expert(x: Tensor, weight: ops.Weight) -> Tensor:
            return ops.expert_products(x, offsets, weight)

        first, second = changes
        gate, up = product(rows, self.gate_up_proj, first).chunk(2, dim=-1)
        return product(ops.gated(gate, up, self.gating), self.down_proj, second)


class Block(nn.Module):
    """One layer: attention, then a dense MLP, a mixture of experts, or both side by side."""

    def __init__(self, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__()
        hidden, eps, design = config.hidden_size, config.rms_norm_eps, config.design
        self.eps = eps
        self.device: torch.device | None = None  # where it is not that of the embedding
        # Within it the layer's weights can be computed with; streamed ones come for that.
        self.present: Callable[[], AbstractContextManager[None]] = nullcontext
        self.self_attn = Attention(config, layer)
        width = config.intermediate_size
        self.mlp = GatedMLP(hidden, width, design.gating) if width else None
        self.router = Router(config) if config.num_experts else None
        self.experts = Experts(config) if config.num_experts else None
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        index: int,
        encoding: bool | Tensor,
        only: Tensor | None = None,
        adapted: Sequence[Adapted] = (),
    ) -> Tensor:
        """x [..., tokens, hidden] → the same; encoding: of all tokens, or bool [tokens, 1]; only
        int64 [n]: of which tokens, packed, results are wanted (None: of all); adapted: of all."""
        attended = self.self_attn(self.input_layernorm(x), rotary, attend, index, only, adapted)
        if only is not None:
            x, adapted = x.index_select(0, only), narrowed(adapted, only)
        return self._after_attention(x, attended, encoding, adapted)

    def _after_attention(
        self, x: Tensor, attended: Tensor, encoding: bool | Tensor, adapted: Sequence[Adapted]
    ) -> Tensor:
        """The residual after the layer, of the one before it and what attention gives, alike."""
        x = x + attended
        given = self.post_attention_layernorm(x)
        if self.mlp is not None:
            x = x + self.mlp(given, adapted)
        return x if self.experts is None else x + self._mixed(given, given, adapted)

    def _mixed(self, routed: Tensor, given: Tensor, adapted: Sequence[Adapted]) -> Tensor:
        """What the experts make of `given`, chosen by `routed`, both [..., tokens, hidden]."""
        assert self.router is not None and self.experts is not None
        chosen, shares = self.router(routed.reshape(-1, routed.shape[-1]), adapted)
        rows = given.reshape(-1, given.shape[-1])
        return self.experts(rows, chosen, shares, adapted).view_as(given)


class NormedBlock(Block):
    """A layer with norms of what it adds, and a scalar for each phase."""

    def __init__(self, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__(config, layer)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm_1 = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm_2 = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm_2 = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))
        self.encoder_layer_scalar = nn.Parameter(torch.ones(1))

    def _after_attention(
        self, x: Tensor, attended: Tensor, encoding: bool | Tensor, adapted: Sequence[Adapted]
    ) -> Tensor:
        post, dense = self.post_attention_layernorm, self.pre_feedforward_layernorm
        expert = self.pre_feedforward_layernorm_2
        x, dense_in, expert_in = ops.after_attention(
            x, attended, post.weight, dense.weight, expert.weight, self.eps
        )
        return self._feed_forward(x, dense_in, expert_in, self._scalar(encoding), adapted)

    def _scalar(self, encoding: bool | Tensor) -> Tensor:
        if isinstance(encoding, bool):
            return self.encoder_layer_scalar if encoding else self.layer_scalar
        return torch.where(encoding, self.encoder_layer_scalar, self.layer_scalar)

    def _feed_forward(
        self,
        x: Tensor,
        dense_in: Tensor,
        expert_in: Tensor,
        scalar: Tensor,
        adapted: Sequence[Adapted],
    ) -> Tensor:
        """The residual after the layer; dense_in and expert_in: norms of the residual x."""
        assert self.mlp is not None and self.experts is not None
        elsewhere = self.device or self.experts.device or self.present is not nullcontext
        both = ops.beside.reference if elsewhere or adapted else ops.beside
        # The router reads the residual itself; the experts read it through their own norm.
        mixture = partial(self._mixed, x, expert_in, adapted)
        dense, mixed = both(x, partial(self.mlp, dense_in, adapted), mixture)
        first, second = self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2
        weights = first.weight, second.weight, self.post_feedforward_layernorm.weight
        return ops.after_layer(x, dense, mixed, *weights, scalar, self.eps)


def make_block(config: ModelConfig, layer: LayerConfig) -> Block:
    return (NormedBlock if config.design.post_norms else Block)(config, layer)


def recomputed(
    block: Block,
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    attend: Attend,
    index: int,
    encoding: bool | Tensor,
    *others: object,
) -> Tensor:
    """What the block makes of these, its arguments; the backward pass computes it once more."""
    assert isinstance(encoding, bool)
    recomputing = cast(RecomputedAttend, attend).recomputing(encoding)
    result: Tensor = checkpoint(
        *(block, x, rotary, attend, index, encoding, *others),
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), recomputing),
        preserve_rng_state=False,  # there is none in a layer
    )
    return result


class Embedding(nn.Module):
    """The token embedding, read here as input; `model/head.py` reads a tied one as output."""

    def __init__(self, vocab: int, hidden: int, scaled: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
        self.scaled = scaled

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """ids int64 [...] → [..., hidden], maybe scaled by sqrt(hidden) as rounded to `dtype`."""
        rows = ops.embed(ids, self.weight, dtype)
        return rows * rounded(rows.shape[-1] ** 0.5, dtype) if self.scaled else rows


class Transformer(nn.Module):
    """Token ids (and a soft embedding) to final hidden states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, design = config, config.design
        # Whether a layer keeps its input alone for the backward pass, which computes it once more;
        # what attends is a `RecomputedAttend` then. For training.
        self.recomputes_layers = False
        self.streams: tuple[StreamedLayers, ...] = ()  # one for each card that has such layers
        vocabulary = config.vocab_size, config.hidden_size
        self.embed_tokens = Embedding(*vocabulary, design.scaled_embedding)
        self.blocks = [make_block(config, layer) for layer in config.layers]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.layers)
        self.self_conditioning = (
            SelfConditioning(config.hidden_size, config.intermediate_size, config.rms_norm_eps)
            if design.self_conditioning
            else None
        )
        self.lm_head = None if design.tied_head else Linear(*reversed(vocabulary))

    @property
    def output(self) -> nn.Parameter:
        """The weight of the output layer, [vocab, hidden]."""
        return (self.lm_head or self.embed_tokens).weight

    def attach(self, number: int, adapter: Adapter) -> None:
        """Lets an adapter serve the tokens that have its number, from 1. Its tensors move to where
        the weights are, in the dtype that they have. Raises Refused where the network has no such
        module, or one of other sizes; then nothing has changed."""
        assert number > NONE
        targets = {path: self._adaptable(path, change) for path, change in adapter.items()}
        self.detach(number)
        for path, (weight, changes) in targets.items():
            changes[number] = adapter[path].to(weight.device, adapter[path].down.dtype)

    def detach(self, number: int) -> None:
        """Forgets an adapter."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.changes.pop(number, None)
            if isinstance(module, Experts):
                for changes in module.changes.values():
                    changes.pop(number, None)

    def _adaptable(self, path: str, change: LowRank) -> tuple[ops.Weight, dict[int, LowRank]]:
        """The weight that a change is for, and where its changes are."""
        parent, _, leaf = path.rpartition(".")
        module = self._module(path)
        if isinstance(module, Linear) and module is not self.lm_head:
            weight, changes = module.weight, module.changes
        elif isinstance(experts := self._module(parent), Experts) and leaf in experts.changes:
            weight, changes = getattr(experts, leaf), experts.changes[leaf]
        else:
            raise Refused(path, "is no matrix of this network that an adapter can change")
        *count, out, inputs = weight.shape
        rank, shapes = change.up.shape[-1], (tuple(change.down.shape), tuple(change.up.shape))
        if shapes != ((*count, rank, inputs), (*count, out, rank)):
            down, up, fits = (" x ".join(map(str, shape)) for shape in (*shapes, weight.shape))
            raise Refused(
                path,
                f"an adapter of {down} and {up} numbers does not fit the weight, which has {fits}",
            )
        return weight, changes

    def _module(self, path: str) -> nn.Module | None:
        try:
            return self.get_submodule(path)
        except AttributeError:
            return None

    def encode(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        dtype: torch.dtype,
        soft: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Encode phase: ids and positions int64 [..., tokens] → hidden [..., tokens, hidden]; soft:
        which of all tokens are of pictures, int64 [n], and what takes the place of their scaled
        embeddings, [n, hidden]."""
        x = self.embed_tokens(ids, dtype)
        if soft is not None:
            where, values = soft
            x = x.flatten(0, -2).index_copy(0, where, values.to(dtype)).view_as(x)
        return self._blocks(x, positions, attend, encoding=True)

    def encode_keys(
        self, ids: Tensor, positions: Tensor, attend: PackedRows, dtype: torch.dtype
    ) -> None:
        """Encode phase of ids and positions int64 [tokens] of which only keys and values are
        wanted: of the last layer nothing else is computed."""
        self._blocks(self.embed_tokens(ids, dtype), positions, attend, True, keep=attend.keep)

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
        if self.self_conditioning is None:
            x = embedded
        else:
            x = self.self_conditioning(embedded, soft, attend.adapted)
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
        keep: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        """Hidden states go to the device of each layer in turn, and back to where they began. keep:
        takes the keys and values of the last layer, whose result is not wanted then."""
        home, last = x.device, len(self.blocks) - 1
        tables: dict[torch.device, dict[RotaryKey, tuple[Tensor, Tensor]]] = {}
        adapted = {home: attend.adapted}
        for index, (block, layer) in enumerate(zip(self.blocks, self.config.layers, strict=True)):
            at = block.device or home
            if at not in tables:
                tables[at] = self.rotary.tables(positions.to(at), x.dtype)
                adapted[at] = moved(adapted[home], at)
            rotary = tables[at][rotary_key(layer)]
            # The last layer needs keys and values of all tokens, and the rest of the wanted ones.
            wanted = only.to(at) if only is not None and index == last else None
            phase = encoding if isinstance(encoding, bool) else encoding.to(at)
            with block.present():
                x = x.to(at)
                if keep is not None and index == last:
                    normed = block.input_layernorm(x)
                    keep(*block.self_attn.keys_values(normed, rotary, adapted[at]))
                else:
                    given = x, rotary, attend, index, phase, wanted, adapted[at]
                    recomputes = self.recomputes_layers and torch.is_grad_enabled()
                    x = recomputed(block, *given) if recomputes else block(*given)
        return x if keep is not None else self.norm(x.to(home))
