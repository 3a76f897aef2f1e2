"""The kernels of a denoising step or of a prefill, each with its bytes and operations.

From shapes alone.  Every weight must be read once a step; the vocabulary head reads the embedding
twice for each GROUP of positions.  The experts' weights that are read are those of the experts that
some token chose: of independent, even choices the expected number.  Launches are those of a
denoising step, kernels and operations of torch; a test counts them in one.  Knows no device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from sfumato.model.loading import expected_shapes
from sfumato.model.model_config import LayerConfig, ModelConfig
from sfumato.model.quantization import TARGETS, formats
from sfumato.model.transformer import rotary_key
from sfumato.ops.triton.planes import plane_bytes, refusal
from sfumato.ops.triton.workspaces import GROUP, head_chunk
from sfumato.refused import Refused
from sfumato.weights.checkpoint import TensorInfo
from sfumato.weights.formats import FORMATS, KINDS

Part = Literal["layers", "outside"]
"""Within the layers of the network, or outside: self-conditioning, head, sampler."""
Products = Literal["bf16", "float32", "FP8", "INT8"]


@dataclass(frozen=True)
class KernelCost:
    """The work of one kernel, or of the same kernel in several layers, in a step."""

    name: str
    part: Part
    stored: float
    """Bytes of weights, keys and values: read from the device's memory in every step."""
    passed: float
    """Bytes that kernels pass to each other; a cache may hold them between two kernels."""
    flop: float
    """Floating-point operations of matrix products: two for each multiply-add."""
    launches: float = 1
    products: Products = "bf16"
    """What the matrix units multiply: FP8 and INT8 where weights are 8-bit codes."""
    again: float = 0.0
    """Bytes of `stored` that are read once more: of the prediction, not of the floor."""

    def __add__(self, other: KernelCost) -> KernelCost:
        """Both, under the name of the first."""
        return replace(
            self,
            stored=self.stored + other.stored,
            passed=self.passed + other.passed,
            flop=self.flop + other.flop,
            launches=self.launches + other.launches,
            again=self.again + other.again,
        )


def merged(costs: list[KernelCost]) -> list[KernelCost]:
    """One entry for each name and kind of products, in the order in which they first come."""
    joined: dict[tuple[str, Products], KernelCost] = {}
    for cost in costs:
        key = cost.name, cost.products
        joined[key] = joined[key] + cost if key in joined else cost
    return list(joined.values())


_ACTIVATION = 2  # bytes of a bfloat16 number
_EXACT = 4  # bytes of a float32 number
MATRICES = {
    "q, k, v projections": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "output projection": ("self_attn.o_proj.weight",),
    "dense MLP": tuple(f"mlp.{leaf}_proj.weight" for leaf in ("gate", "up", "down")),
    "experts, gate and up": ("experts.gate_up_proj",),
    "experts, down and sum": ("experts.down_proj",),
}
"""What kernels multiply with, of a layer; those that are not here multiply no weights."""
_PIECE = 4096  # positions of a prefix that a program of full layers reads; see `tiles.toml`


@dataclass(frozen=True)
class StepShape:
    """How much a step works on. rows: canvases; width: positions of each."""

    rows: int = 1
    width: int = 256
    prefix: int = 512  # positions that each row's slot holds
    encodes: bool = False  # a prefill or commit: causal, writes the cache, has no head
    reads: bool = False  # a forward of reads, without what follows it

    @property
    def tokens(self) -> int:
        return self.rows * self.width


def stored_bytes(config: ModelConfig, format: str = "bf16") -> dict[str, int]:
    """Bytes of every tensor of a checkpoint in a format of `sfumato convert`, by canonical name.
    Raises ValueError for another format."""
    if format not in TARGETS:
        raise Refused("format", f"{format!r} is none of {', '.join(TARGETS)}")
    shapes = expected_shapes(config)
    return {
        name: FORMATS[kind].nbytes(shapes[name])
        for name, kind in formats(shapes, TARGETS[format]).items()
    }


def held_bytes(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Bytes of a checkpoint's tensors as a GPU holds them: blocks in planes."""
    return {
        name: info.nbytes
        if refusal(info.format, info.shape)
        else plane_bytes(info.format, info.shape)
        for name, info in tensors.items()
    }


def codes_of(formats: Mapping[str, str]) -> dict[str, Products]:
    """The products of the tensors that are codes; formats: "FP8", "BF16", … of each."""
    return {name: KINDS[format] for name, format in formats.items() if format in KINDS}


def experts_touched(config: ModelConfig, tokens: int) -> float:
    """The expected number of experts of a layer that at least one of the tokens chooses."""
    missed = 1 - config.experts_per_token / config.num_experts
    return config.num_experts * (1 - missed**tokens)


def step_costs(
    config: ModelConfig,
    shape: StepShape,
    stored: Mapping[str, int],
    touched: float | None = None,
    codes: Mapping[str, Products] = MappingProxyType({}),
) -> list[KernelCost]:
    """All kernels of a step, layers joined.

    stored: bytes of each tensor, by canonical name; touched: how many experts of a layer some token
    chose, where it was counted (None: the expected number); codes: what multiplies the tensors that
    are codes.
    """
    if touched is None:
        touched = experts_touched(config, shape.tokens)
    costs = []
    for index, layer in enumerate(config.layers):
        prefix = f"layers.{index}."
        own = {
            name.removeprefix(prefix): nbytes
            for name, nbytes in stored.items()
            if name.startswith(prefix)
        }
        kernels = [
            *_attention(config, layer, shape, own),
            *_dense(config, shape.tokens, own, "layers"),
            *_experts(config, shape.tokens, own, touched),
        ]
        for cost in kernels:
            # Of the matrices that the layer has: a full layer's values are its keys.
            leaves = [leaf for leaf in MATRICES.get(cost.name, ()) if leaf in own]
            kinds = {codes.get(prefix + leaf) for leaf in leaves}
            kind = kinds.pop() if len(kinds) == 1 else None  # one of bfloat16 counts for all
            costs.append(replace(cost, products=kind) if kind else cost)
        costs.append(_norms(config, shape.tokens))
    if not shape.encodes:
        costs += _outside(config, shape, stored)
    return merged(_of_reads(costs, config, shape) if shape.reads else costs)


def _of_reads(costs: list[KernelCost], config: ModelConfig, shape: StepShape) -> list[KernelCost]:
    """What a forward of reads has of these: all but what follows the layers, and a copy of the
    hidden states."""
    rest = [cost for cost in costs if cost.name not in ("vocabulary head", "sampler")]
    fewer = [replace(cost, launches=4) if cost.name == "embedding" else cost for cost in rest]
    passed = 2.0 * shape.tokens * config.hidden_size * _ACTIVATION
    return [*fewer, KernelCost("copy of hidden states", "outside", 0.0, passed, 0.0)]


def _attention(
    config: ModelConfig, layer: LayerConfig, shape: StepShape, own: Mapping[str, int]
) -> list[KernelCost]:
    tokens, hidden, d = shape.tokens, config.hidden_size, layer.head_dim
    heads = config.num_heads * d
    kv = layer.kv_heads * d * (2 if layer.sliding else 1)  # a full layer's V is its raw K
    names = MATRICES["q, k, v projections"]
    projected, products = heads + kv, 3 if layer.sliding else 2
    # The pieces of a long prefix are merged by a launch of its own.
    launches = 1 if layer.sliding or shape.prefix + shape.width <= _PIECE else 2
    held = min(shape.prefix, config.sliding_window - 1) if layer.sliding else shape.prefix
    cached = shape.rows * 2 * held * layer.kv_heads * d * _ACTIVATION
    new = 2 * tokens * layer.kv_heads * d * _ACTIVATION
    return [
        KernelCost(
            "q, k, v projections", "layers", sum(own.get(name, 0) for name in names),
            tokens * (products * hidden + projected) * _ACTIVATION,
            2.0 * tokens * hidden * projected, products,
        ),
        KernelCost(
            "q and k norms, RoPE, cache", "layers", new if shape.encodes else 0.0,
            2 * tokens * (heads + 2 * layer.kv_heads * d) * _ACTIVATION, 0.0,
        ),
        KernelCost(
            "attention", "layers", cached, 2 * tokens * heads * _ACTIVATION + new,
            4.0 * shape.rows * _pairs(shape, config, layer) * heads, launches,
        ),
        KernelCost(
            "output projection", "layers", own["self_attn.o_proj.weight"],
            tokens * (heads + hidden) * _ACTIVATION, 2.0 * tokens * heads * hidden,
        ),
    ]  # fmt: skip


def _pairs(shape: StepShape, config: ModelConfig, layer: LayerConfig) -> float:
    """Pairs of a query and a key that it sees, in one row."""
    window = config.sliding_window if layer.sliding else math.inf
    if not shape.encodes:
        return shape.width * (min(shape.prefix, window - 1) + shape.width)
    # Token i sees min(prefix + i + 1, window) keys.
    first, last = shape.prefix + 1, shape.prefix + shape.width
    below = max(0, min(last, window) - first + 1)
    full = shape.width - below
    return below * (2 * first + below - 1) / 2 + (full * window if full else 0)


def _dense(
    config: ModelConfig, tokens: int, own: Mapping[str, int], part: Part, prefix: str = "mlp."
) -> list[KernelCost]:
    hidden, inner = config.hidden_size, config.intermediate_size
    name = "dense MLP" if part == "layers" else "self-conditioning"
    weights = sum(own[f"{prefix}{leaf}_proj.weight"] for leaf in ("gate", "up", "down"))
    # Three products, and GELU and the product with it, which torch serves.
    passed = tokens * (3 * hidden + 8 * inner) * _ACTIVATION
    flop = 6.0 * tokens * hidden * inner
    return [KernelCost(name, part, weights, passed, flop, 5)]


def _experts(
    config: ModelConfig, tokens: int, own: Mapping[str, int], touched: float
) -> list[KernelCost]:
    hidden, size, count = config.hidden_size, config.expert_size, config.num_experts
    chosen = tokens * config.experts_per_token
    share = touched / count
    names = "experts.gate_up_proj", "experts.down_proj"
    into, out = (own[name] * share for name in names)
    return [
        KernelCost(
            "router", "layers", own["router.proj.weight"],
            tokens * (hidden * _ACTIVATION + 2 * count * _EXACT), 2.0 * tokens * hidden * count,
            launches=2, products="float32",
        ),
        # Counts, offsets and places of the chosen experts: int32.
        KernelCost("sorting by expert", "layers", 0.0, 4.0 * chosen * _EXACT, 0.0),
        KernelCost(
            "experts, gate and up", "layers", into, chosen * (hidden + size) * _ACTIVATION,
            4.0 * chosen * hidden * size,
        ),
        # The parts of a token are written, then read and summed.
        KernelCost(
            "experts, down and sum", "layers", out,
            (chosen * (size + 2 * hidden) + tokens * hidden) * _ACTIVATION,
            2.0 * chosen * size * hidden, 2,
        ),
    ]  # fmt: skip


def _norms(config: ModelConfig, tokens: int) -> KernelCost:
    """Norms and residuals of a layer: before attention (a tensor read, one written), after it (two
    read, three written), and at the end (three read, one written)."""
    passed = (2 + 5 + 4) * tokens * config.hidden_size * _ACTIVATION
    return KernelCost("norms and residuals", "layers", 0.0, passed, 0.0, 3)


def _outside(config: ModelConfig, shape: StepShape, stored: Mapping[str, int]) -> list[KernelCost]:
    tokens, hidden, vocab = shape.tokens, config.hidden_size, config.vocab_size
    embedding = stored["embed_tokens.weight"]
    rows = tokens * embedding / vocab
    groups, chunks = math.ceil(tokens / GROUP), math.ceil(vocab / head_chunk(vocab))
    kinds = len({rotary_key(layer) for layer in config.layers})
    (conditioning,) = _dense(config, tokens, stored, "outside", "self_conditioning.")
    return [
        # Rows and their scale, the final norm, a copy of flags, and one of the ids of several rows.
        KernelCost(
            "embedding", "outside", rows, tokens * hidden * _ACTIVATION, 0.0,
            4 + (1 if shape.rows > 1 else 0),
        ),
        # One more where a forward has rows that are not read.
        KernelCost(
            "positions and rotary tables", "outside", 0.0, 0.0, 0.0, 4 + shape.reads + 6 * kinds
        ),
        # Beside the products: a norm before them, the sum, and a norm.
        replace(conditioning, launches=conditioning.launches + 3),
        # A product for the scores, then one for the soft embedding of the same chunk.
        KernelCost(
            "vocabulary head", "outside", embedding,
            tokens * hidden * (_ACTIVATION + _EXACT), 4.0 * tokens * vocab * hidden,
            groups * (2 * chunks + 1), again=(2 * groups - 1) * embedding,
        ),
        # Entropies, draws, words of noise, flags and tokens, each 8 bytes at most.
        KernelCost("sampler", "outside", 0.0, 10.0 * tokens * 8, 0.0, 3),
    ]  # fmt: skip
