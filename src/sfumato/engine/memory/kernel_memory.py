"""The buffers of the kernels for GPUs in a forward of a model, where they serve.

Knows no sizes of tiles: what each operation allocates is `ops.triton.workspaces`'s.
"""

from __future__ import annotations

import torch

from sfumato.model.cache import BLOCK, slot_sizes
from sfumato.model.model_config import ModelConfig
from sfumato.ops.triton import workspaces

ATTENTION = frozenset(("canvas_attention", "phase_attention"))
"""The operations of a step's attention: which of them a step calls depends on its rows."""


def attention_bytes(model: ModelConfig, rows: int, capacity: int, device: torch.device) -> int:
    """Of a step's attention over a pool of so many rows: that of the layer that takes most."""
    sizes = zip(model.layers, slot_sizes(model, capacity), strict=True)
    queries = rows, model.canvas_length, model.num_heads
    return max(
        workspaces.attention_bytes(*queries, layer.head_dim, size, device) for layer, size in sizes
    )


def read_bytes(model: ModelConfig, tokens: int, capacity: int, device: torch.device) -> int:
    """Of the attention of reads of so many tokens over slots: that of the layer that takes most."""
    sizes = zip(model.layers, slot_sizes(model, capacity), strict=True)
    return max(
        workspaces.read_bytes(tokens, model.num_heads, layer.head_dim, size, device)
        for layer, size in sizes
    )


def prefill_bytes(
    model: ModelConfig, tokens: int, context: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Of the attention of a chunk of so many tokens at the end of a context."""
    most = 0
    for layer in model.layers:
        keys = min(context, model.sliding_window + BLOCK) if layer.sliding else context
        shape = keys + tokens, layer.kv_heads, layer.head_dim
        most = max(most, workspaces.prefill_bytes(*shape, dtype.itemsize, device))
    return most


def expert_bytes(model: ModelConfig, tokens: int, dtype: torch.dtype) -> int:
    """Of a layer's experts, the choice of them included."""
    shape = model.num_experts, model.expert_size, model.hidden_size
    experts = workspaces.expert_bytes(tokens, model.experts_per_token, *shape, dtype.itemsize)
    return experts + workspaces.route_bytes(tokens, model.num_experts)


def head_bytes(model: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> int:
    """Of the pass over the vocabulary of so many canvases."""
    shape = rows * model.canvas_length, model.vocab_size, model.hidden_size
    return workspaces.head_bytes(*shape, dtype.itemsize, device)
