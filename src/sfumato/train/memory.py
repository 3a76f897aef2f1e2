"""The memory of a tuning step, predicted from sizes before anything is loaded.

Predicted are bytes of tensors, as they are counted in `benchmarks/tuning_memory.py`: what torch and
its libraries take besides, and what an allocator holds back, comes on top.  The numbers of tensors
are those that the backward pass of `model/transformer.py` and `objective.loss` asks for.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import torch

from sfumato.model.adapter_files import adaptable
from sfumato.model.model_config import LayerConfig, ModelConfig
from sfumato.ops.reference import GROUP, SLICE
from sfumato.train.objective import MOST_SCORES

WIDE = 4
"""Bytes of float32: what learns, what norms compute in, and scores are."""


class StepMemory(NamedTuple):
    """Bytes of a step at its highest."""

    weights: int  # as loaded
    learned: int  # what learns, its gradients, and the two means of AdamW
    kept: int  # activations between the forward and the backward pass
    moment: int  # what one layer, or a chunk of scores, takes beside these

    @property
    def total(self) -> int:
        return sum(self)


def targeted(config: ModelConfig, targets: Collection[str]) -> dict[str, tuple[int, ...]]:
    """The shape of every weight that an adapter of these targets changes, by its path."""

    def part(path: str) -> str:
        return path.split(".")[-2].replace("self_attn", "attention").replace("_", "-")

    return {path: shape for path, shape in adaptable(config).items() if part(path) in targets}


def adapter_size(config: ModelConfig, targets: Collection[str], rank: int) -> int:
    """How many numbers an adapter has."""
    shapes = targeted(config, targets).values()
    return sum(math.prod(lead) * rank * (out + inputs) for *lead, out, inputs in shapes)


def step_memory(
    config: ModelConfig,
    weights: int,
    learned: int,
    context: int,
    rows: int,
    dtype: torch.dtype,
    recompute: bool,
) -> StepMemory:
    """The memory of a step.

    weights: bytes of the loaded network; learned: how many numbers learn; context: tokens of a
    row's prefix with its text; rows: that are computed together; dtype: of activations; recompute:
    whether layers are computed again in the backward pass.
    """
    size, hidden, canvas = dtype.itemsize, config.hidden_size, config.canvas_length
    tokens = rows * (context + canvas)
    # Of each phase the tokens, and the keys that all of them see.
    phases = (rows * context, rows * context), (rows * canvas, tokens)
    layers = [
        [_of_layer(config, layer, *each, rows, size) for each in phases] for layer in config.layers
    ]
    # The input of the last norm, the self-conditioning of the canvases, and two masks.
    kept = size * (tokens * hidden + rows * canvas * (5 * hidden + 4 * config.intermediate_size))
    kept += 2 * rows * context**2 * WIDE
    if recompute:
        cached = sum(2 * layer.kv_heads * layer.head_dim for layer in config.layers)
        kept += size * (len(layers) * tokens * hidden + rows * context * cached)
    else:
        kept += sum(map(sum, layers))
    # A layer's products find it computed again, or release what it has kept.
    sign = 1 if recompute else -1
    moment = max(
        _of_products(config, layer, count, size) + sign * of_phase
        for layer, each in zip(config.layers, layers, strict=True)
        for (count, _), of_phase in zip(phases, each, strict=True)
    )
    chunk = max(1, MOST_SCORES // config.vocab_size)
    for count, _ in phases:
        # As they come and as probabilities; and two gradients of the same size.
        scores = 2 * min(count, chunk) * config.vocab_size * WIDE
        kept += scores if count <= chunk else 0
        floats = size * min(SLICE, config.vocab_size * hidden)
        moment = max(moment, floats + (scores if count <= chunk else 2 * scores))
    return StepMemory(weights, 4 * WIDE * learned, kept, moment)


def _of_layer(
    config: ModelConfig, layer: LayerConfig, tokens: int, keys: int, rows: int, size: int
) -> int:
    """Bytes that the operations of a layer keep, of tokens and keys in so many rows."""
    heads, kv = config.num_heads * layer.head_dim, layer.kv_heads * layer.head_dim
    # What is kept in the activations' dtype, and what in float32: what norms and adapters read.
    # Where the dtype is float32 itself, these share what they read.
    narrow = 2 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
    wide = 7 * config.hidden_size + heads + 2 * kv + config.intermediate_size
    if size < WIDE:
        wide += 6 * config.hidden_size + heads
    if not config.design.post_norms:
        wide -= 5 * config.hidden_size
    wide += 3 * config.num_experts
    # Of one row, or for one key head, the mask is a view.
    masks = layer.kv_heads * tokens * keys // rows * WIDE if min(layer.kv_heads, rows) > 1 else 0
    return tokens * (size * narrow + WIDE * wide) + size * 2 * kv * keys + masks


def _of_products(config: ModelConfig, layer: LayerConfig, tokens: int, size: int) -> int:
    """Bytes that the largest product of a layer takes in the backward pass, less what the layer's
    last norms have released by then."""
    hidden, heads = config.hidden_size, config.num_heads * layer.head_dim
    widest = max(heads, config.intermediate_size)
    matrix = min(SLICE, widest * hidden) + 2 * tokens * widest
    # The tokens of each expert, padded, are computed once more with all that lies between products.
    assigned = tokens * config.experts_per_token
    padded = assigned + (GROUP - 1) * min(config.num_experts, assigned)
    inner = config.expert_size
    experts = 2 * inner * hidden + padded * (9 * hidden // 2 + 3 * inner)
    released = 3 * tokens * hidden if config.design.post_norms else 0
    return size * max(matrix, experts) - WIDE * released
