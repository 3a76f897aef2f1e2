"""Prefixes with pictures, encoded in the plainest way: the oracle of chunks, rows and caches.

Soft tokens take the place of the embeddings of placeholders, and attention is computed in plain
torch with the masks of `model/vision/mask.py`.  A chunk never ends inside a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.cache import Slot
from sfumato.model.network import Network
from sfumato.model.vision.mask import ImageMask, Span, mask_of, seen
from sfumato.ops.attention_reference import joined


@dataclass(frozen=True)
class Pictured:
    """Tokens of a prefix: ids, and of each picture its span and its soft tokens [n, hidden]."""

    ids: Tensor
    pictures: Sequence[tuple[Span, Tensor]] = ()

    @property
    def spans(self) -> list[Span]:
        return [span for span, _ in self.pictures]


@dataclass(frozen=True)
class PicturedAttend:
    """Attention of the next tokens of one row, whose keys and values go into its slot."""

    slot: Slot
    spans: list[Span]
    rule: ImageMask

    adapted = ()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values, held = self.slot.history(layer)
        own = torch.arange(self.slot.length, self.slot.length + len(q))
        limits = seen(own, self.spans, self.slot.pool.window(layer), self.rule)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        parts = joined([*keys, k], q.dtype), joined([*values, v], q.dtype)
        mask = mask_of(*limits, torch.cat((held, own)))
        out = ops.attention.reference(q.transpose(0, 1), *parts, mask)
        self.slot.write(layer, k, v)
        return out.transpose(0, 1)


@torch.no_grad()
def encode_pictured(
    network: Network, slot: Slot, row: Pictured, rule: ImageMask, ends: Sequence[int] = ()
) -> Tensor:
    """Encodes a row into an empty slot, in chunks that end at `ends` and at its end; the hidden
    states [n, hidden]."""
    transformer, states = network.transformer, []
    embedded = transformer.embed_tokens(row.ids, network.dtype)
    for (start, end), soft in row.pictures:
        embedded[start:end] = soft.to(network.dtype)
    for start, end in zip([0, *ends], [*ends, len(row.ids)], strict=True):
        assert not any(a < start < b for a, b in row.spans), "a chunk cuts a picture"
        attend = PicturedAttend(slot, row.spans, rule)
        positions = torch.arange(start, end)
        states.append(transformer._blocks(embedded[start:end], positions, attend, encoding=True))
        slot.advance(end - start)
    return torch.cat(states)
