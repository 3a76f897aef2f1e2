"""The memory of a tuning step, predicted from sizes before anything is loaded.

Predicted are bytes of tensors, as they are counted in `benchmarks/tuning_memory.py`: what torch and
its libraries take besides, and what an allocator holds back, comes on top.  The numbers of tensors
are those that the backward pass of `model/transformer.py` and `objective.loss` asks for.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sfumato.engine.memory.estimate import tower_bytes
from sfumato.model.adapter_files import adaptable
from sfumato.model.model_config import LayerConfig, ModelConfig
from sfumato.model.vision.config import VisionConfig
from sfumato.ops.reference import GROUP, SLICE
from sfumato.train.objective import MOST_SCORES

WIDE = 4
"""Bytes of float32: what learns, what norms compute in, and scores are."""


class StepMemory(NamedTuple):
    """Bytes of a step at its highest."""

    weights: int  # as loaded
    learned: int  # what learns, its gradients, the two means of AdamW, and further copies
    kept: int  # activations between the forward and the backward pass
    working: int  # what one layer, a chunk of scores or the optimiser takes beside these

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


@dataclass(frozen=True)
class Trained:
    """What of a network learns, and in how many copies it lies in memory. targets and rank: of an
    adapter; full: all weights, which need no memory beside the loaded ones; stored: whether the
    base's experts are quantized; sums: whether a step sums the gradients of several parts; keeps:
    whether what was best at an evaluation is kept."""

    targets: Collection[str] = ("attention", "mlp", "self-conditioning")
    rank: int = 16
    full: bool = False
    stored: bool = True
    sums: bool = False
    keeps: bool = False

    @property
    def copies(self) -> int:
        """How often what learns is there: itself, its gradients, and the two means of AdamW."""
        return 4 - self.full + self.sums + self.keeps


def step_memory(
    config: ModelConfig,
    weights: int,
    learned: int,
    context: int,
    rows: int,
    dtype: torch.dtype,
    recompute: bool,
    trained: Trained = Trained(),
    tower: VisionConfig | None = None,
) -> StepMemory:
    """The memory of a step.

    weights: bytes of the loaded network; learned: how many numbers learn; context: tokens of a
    row's prefix with its text; rows: that are computed together; dtype: of activations; recompute:
    whether layers are computed again in the backward pass; tower: what reads the rows' pictures
    (None: they have none).
    """
    size, hidden, canvas = dtype.itemsize, config.hidden_size, config.canvas_length
    tokens = rows * (context + canvas)
    # Of each phase the tokens, and the keys that all of them see.
    phases = (rows * context, rows * context), (rows * canvas, tokens)
    layers = [
        [
            _of_layer(config, layer, *each, rows, size, trained)
            + _of_experts(config, each[0], size, trained)
            for each in phases
        ]
        for layer in config.layers
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
    working = max(
        _of_products(config, layer, count, size, trained) + sign * of_phase
        for layer, each in zip(config.layers, layers, strict=True)
        for (count, _), of_phase in zip(phases, each, strict=True)
    )
    vocabulary, chunk = config.vocab_size * hidden, max(1, MOST_SCORES // config.vocab_size)
    for count, _ in phases:
        # As they come and as probabilities; and two gradients of the same size.
        scores = 2 * min(count, chunk) * config.vocab_size * WIDE
        kept += scores if count <= chunk else 0
        floats = size * min(SLICE, vocabulary)
        working = max(working, floats + (scores if count <= chunk else 2 * scores))
    if trained.full:  # a gradient of the embedding, beside the sum of those of its other uses
        working += WIDE * vocabulary
    if tower is not None:
        working = max(working, tower_bytes(tower, size) - kept)
    # The optimiser's step, which comes when activations are gone, makes what learns once more.
    working = max(working, WIDE * learned - kept)
    return StepMemory(weights, trained.copies * WIDE * learned, kept, working)


def _of_experts(config: ModelConfig, tokens: int, size: int, trained: Trained) -> int:
    """Bytes that experts and a router keep of so many tokens. Quantized experts that no adapter
    changes keep nothing: all between their products is computed again."""
    hidden, inner, kept = config.hidden_size, config.expert_size, 0
    if "router" in trained.targets or trained.full:
        kept += WIDE * (3 * tokens + 2 * config.num_experts) * hidden
    is_changed = "experts" in trained.targets or trained.full
    if is_changed or not trained.stored:
        assigned, padded = _assigned(config, tokens)
        kept += size * (assigned * hidden + 3 * padded * inner)
        if is_changed:
            kept += WIDE * padded * (hidden + inner + 2 * trained.rank)
    return kept


def _assigned(config: ModelConfig, tokens: int) -> tuple[int, int]:
    """The tokens of all experts, and these padded to groups."""
    assigned = tokens * config.experts_per_token
    return assigned, assigned + (GROUP - 1) * min(config.num_experts, assigned)


def _of_layer(
    config: ModelConfig,
    layer: LayerConfig,
    tokens: int,
    keys: int,
    rows: int,
    size: int,
    trained: Trained,
) -> int:
    """Bytes that the operations of a layer keep beside its experts, of tokens and keys in so many
    rows."""
    heads, kv = config.num_heads * layer.head_dim, layer.kv_heads * layer.head_dim
    # What is kept in the activations' dtype, and what in float32: what norms and adapters read.
    # Where the dtype is float32 itself, these share what they read.
    narrow = 2 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
    wide = 7 * config.hidden_size + heads + 2 * kv + config.intermediate_size
    if size < WIDE:
        wide += 6 * config.hidden_size + heads
    # What the adapters that are not there would read, at each of their products or once.
    if not (trained.full or "attention" in trained.targets):
        wide -= heads + (1 if size == WIDE else 3) * config.hidden_size
    if not (trained.full or "mlp" in trained.targets):
        wide -= config.intermediate_size + (1 if size == WIDE else 2) * config.hidden_size
    if not config.design.post_norms:
        wide -= 5 * config.hidden_size
    wide += 3 * config.num_experts
    if trained.full:  # what norms multiply
        wide += heads + kv + (7 if config.design.post_norms else 2) * config.hidden_size
    # Of one row, or for one key head, the mask is a view.
    masks = layer.kv_heads * tokens * keys // rows * WIDE if min(layer.kv_heads, rows) > 1 else 0
    return tokens * (size * narrow + WIDE * wide) + size * 2 * kv * keys + masks


def _of_products(
    config: ModelConfig, layer: LayerConfig, tokens: int, size: int, trained: Trained
) -> int:
    """Bytes that the largest product of a layer takes in the backward pass, less what the layer's
    last norms have released by then."""
    hidden, heads = config.hidden_size, config.num_heads * layer.head_dim
    widest = max(heads, config.intermediate_size)
    matrix = min(SLICE, widest * hidden) + 2 * tokens * widest
    inner, (_, padded) = config.expert_size, _assigned(config, tokens)
    experts = 2 * inner * hidden + padded * (2 * hidden + 3 * inner)
    if trained.stored and "experts" not in trained.targets and not trained.full:
        # All that lies between products is computed once more.
        experts += 5 * padded * hidden // 2
    elif not trained.full:
        experts += WIDE * padded * hidden // size
    released = 3 * tokens * hidden if config.design.post_norms else 0
    return size * max(matrix, experts) - WIDE * released
