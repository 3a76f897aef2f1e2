"""The tied embedding as the output layer reads it: chunk by chunk, and softcapped; and the memory
that a pass over the vocabulary takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.model_config import ModelConfig
from sfumato.ops.online_softmax import BLOCK
from sfumato.weights.formats import QuantizedTensor, Weight

CHUNK = 4096  # vocabulary rows at a time: with their scores, about what a CPU's caches hold

ROWS_AT_A_TIME = 512
"""Rows of the embedding that are measured together: some megabytes in float32."""


@dataclass(frozen=True)
class OutputEmbedding:
    """The tied embedding [vocab, hidden], read as output layer.

    output: the same, cut into `chunk` rows each, in the form in which it is multiplied fastest
    (see `ops.pack`); None where that is the embedding's own.
    rounding: by how much what reads a soft embedding rounds it, relative to its norm; 0 for not at
    all (see `ops.rounding`).
    """

    embedding: Tensor | QuantizedTensor
    softcap: float
    chunk: int = CHUNK
    output: Sequence[Weight] | None = None
    rounding: float = 0.0

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    def rows(
        self, start: int, stop: int, dtype: torch.dtype, spare: Tensor | None = None
    ) -> Tensor:
        """Rows start..stop of the embedding as a float tensor, maybe in `spare` [chunk, hidden]."""
        room = None if spare is None else spare[: stop - start]
        return ops.dense(self.embedding[start:stop], dtype, room)

    @property
    def _by_bytes(self) -> bool:
        """Whether masses are multiplied by the embedding in int8: where its products with hidden
        states are, and the processor has nothing better."""
        first = self.output[0] if self.output else None
        return ops.packs_columns(self.embedding, first)

    def room(self, dtype: torch.dtype) -> Tensor:
        """Memory that `columns` may take for a chunk."""
        shape = min(self.chunk, self.vocab_size), self.embedding.shape[1]
        if self._by_bytes:
            return torch.empty(ops.column_bytes(shape), dtype=torch.uint8)
        return torch.empty(shape, dtype=dtype, device=self.embedding.device)

    def columns(self, start: int, stop: int, dtype: torch.dtype, spare: Tensor) -> Weight:
        """Rows start..stop of the embedding, transposed [hidden, n], as a sum of rows is multiplied
        fastest: a float tensor, or packed; maybe in `spare`, see `room`."""
        if self._by_bytes:
            return ops.pack_columns(cast(QuantizedTensor, self.embedding[start:stop]), spare)
        return self.rows(start, stop, dtype, spare).T

    def raw(self, hidden: Tensor, start: int, rows: Tensor | None = None) -> Tensor:
        """The products [..., n] of hidden [..., hidden] with the chunk that begins at `start`,
        in the dtype in which they come; rows: the chunk, where the caller has it already."""
        if self.output is not None:
            return ops.linear(hidden, self.output[start // self.chunk])
        if rows is None:
            rows = self.rows(start, min(start + self.chunk, self.vocab_size), hidden.dtype)
        return ops.linear(hidden, rows)

    def scores(self, hidden: Tensor, start: int, rows: Tensor | None = None) -> Tensor:
        """Softcapped logits float32 [..., n] of the chunk that begins at `start`."""
        return self.capped(self.raw(hidden, start, rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """All softcapped logits, before temperature: float32 [..., vocab]. For tests and samplers
        that cannot do without; its size is what `__call__` avoids."""
        return torch.cat([self.scores(hidden, start) for start, _ in self.chunks()], dim=-1)

    def soft_embedding(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """softmax(logits) @ embedding · sqrt(hidden): [..., vocab] → [..., hidden] in `dtype`."""
        p = logits.softmax(dim=-1, dtype=torch.float32)
        soft = p.new_zeros(*p.shape[:-1], self.embedding.shape[1])
        for start, stop in self.chunks():
            soft += (p[..., start:stop].to(dtype) @ self.rows(start, stop, dtype)).float()
        return (soft * soft.shape[-1] ** 0.5).to(dtype)

    def chunks(self) -> list[tuple[int, int]]:
        """The chunks' bounds."""
        size = self.vocab_size
        return [(a, min(a + self.chunk, size)) for a in range(0, size, self.chunk)]

    def own_scores(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """The softcapped logits of each position's own ids: hidden [n, hidden], ids int64 [n, m],
        of which those past the vocabulary stand for its last → float32 [n, m]."""
        ids = ids.clamp(max=self.vocab_size - 1)
        return self.capped(ops.own_scores(hidden, self.embedding, ids))

    @cached_property
    def longest(self) -> Tensor:
        """The norm of the longest row of the embedding, float32 []: computed once."""
        size = self.vocab_size
        parts = [
            self.rows(start, min(start + ROWS_AT_A_TIME, size), torch.float32).norm(dim=1).amax()
            for start in range(0, size, ROWS_AT_A_TIME)
        ]
        return torch.stack(parts).amax()

    def capped(self, raw: Tensor) -> Tensor:
        """softcap · tanh(raw / softcap), float32, maybe in place."""
        return raw.float().mul_(1 / self.softcap).tanh_().mul_(self.softcap)


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
