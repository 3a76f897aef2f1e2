"""The memory that a pass over the vocabulary takes, beside its results."""

from __future__ import annotations

import torch

from sfumato.model.model_config import ModelConfig
from sfumato.model.output_embedding import CHUNK
from sfumato.ops.online_softmax import BLOCK


def head_bytes(
    config: ModelConfig, dtype: torch.dtype, rows: int = 1, compiled: bool = False
) -> int:
    """The most that the pass of `rows` canvases holds at a time, but for what processors of logits
    copy: the masses of the draw's blocks, and beside them first four float32 buffers of a chunk's
    scores (raw, in work, shifted, exponential) and the chunk of the embedding, in `dtype` and,
    while it is dequantized, in float32; then, for the draw, the masses three times in float64, and
    the chunk in `dtype`.

    compiled: by the compiled operations, which have two buffers of scores, and no float32 chunk."""
    chunk, positions = min(CHUNK, config.vocab_size), rows * config.canvas_length
    scores = (2 if compiled else 4) * positions * chunk
    embedding = chunk * config.hidden_size
    masses = positions * -(-config.vocab_size // BLOCK)
    first = (scores if compiled else scores + embedding) * torch.float32.itemsize
    then = 3 * masses * torch.float64.itemsize
    return masses * torch.float32.itemsize + embedding * dtype.itemsize + max(first, then)
