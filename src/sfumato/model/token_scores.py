"""How probable given tokens are: one pass over the vocabulary, never [positions, vocabulary].

Knows hidden states and ids; the caller knows that the hidden states are those of the encode phase,
in which a position's scores are those of the token that follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.most_probable import MoreTop
from sfumato.model.output_embedding import OutputEmbedding
from sfumato.ops.online_softmax import TOP, SoftmaxState

TOGETHER = 256  # positions of a pass: with a chunk's scores 4 MiB for each buffer


@dataclass(frozen=True)
class TokenScores:
    """The log probabilities of one given token at each position, and of the most probable ones:
    natural logarithms, of the softcapped logits at temperature 1."""

    log_probs: Tensor  # float32 [n]; of a token among the most probable, bitwise what stands there
    top_ids: Tensor  # int64 [n, m], most probable first; m: as many as asked for, TOP at least
    top_log_probs: Tensor  # float32 [n, m]
    ranks: Tensor  # int64 [n]: 1 for the most probable token; 0 where ranks are not asked for

    def __getitem__(self, positions: slice) -> TokenScores:
        """Of some of the positions."""
        return TokenScores(*(column[positions] for column in self._columns()))

    def to(self, device: torch.device | str) -> TokenScores:
        """The same on a device."""
        return TokenScores(*(column.to(device) for column in self._columns()))

    @classmethod
    def joined(cls, parts: Sequence[TokenScores]) -> TokenScores:
        """One or more parts, one after another."""
        return cls(*map(torch.cat, zip(*(part._columns() for part in parts), strict=True)))

    def _columns(self) -> tuple[Tensor, ...]:
        return self.log_probs, self.top_ids, self.top_log_probs, self.ranks


@torch.no_grad()
def token_scores(
    head: OutputEmbedding,
    hidden: Tensor,
    ids: Tensor,
    top: int = 0,
    ranks: bool = False,
    together: int = TOGETHER,
) -> TokenScores:
    """Of hidden states [n, hidden] and the token that stands at each position, int64 [n]. top: how
    many of the most probable tokens are wanted; ranks: whether the rank of each token is wanted,
    which takes a second pass; together: positions of a pass. No position's results depend on the
    others, on a CPU to the bit."""
    pairs = zip(hidden.split(together), ids.split(together), strict=True)
    return TokenScores.joined([_scores(head, *pair, top, ranks) for pair in pairs])


def _scores(
    head: OutputEmbedding, hidden: Tensor, ids: Tensor, top: int, ranks: bool
) -> TokenScores:
    state = SoftmaxState.empty(len(ids), hidden.device)
    ones = torch.ones(len(ids), device=hidden.device)
    more = MoreTop.of(torch.full_like(ids, top), head.chunk, head.vocab_size)
    own = torch.zeros_like(ones)  # the products of the given tokens
    for start, _ in head.spans():
        raw = head.raw(hidden, start)
        columns = ids - start
        inside = (columns >= 0) & (columns < raw.shape[1])
        picked = raw.gather(1, columns.clamp(0, raw.shape[1] - 1)[:, None])[:, 0]
        own = torch.where(inside, picked.float(), own)
        if more is not None:
            more.offer(raw, start)
        # Last, since it may overwrite the products.
        ops.update_softmax(state, raw, start, ones, head.softcap, hidden.dtype)
    total = state.max + state.sum_exp.log()
    top_ids, top_logs = state.top_ids, state.top - total[:, None]
    if more is not None:
        scores, named = more.gathered()
        scores = head.capped(scores.clone())
        top_ids, probs = more.appended(state, scores, named, top_ids, top_logs.exp())
        top_logs = torch.cat((top_logs, probs[:, TOP:].log()), dim=1)
    count = min(top_ids.shape[1], head.vocab_size)
    top_ids, top_logs = top_ids[:, :count], top_logs[:, :count]
    same = top_ids == ids[:, None]
    listed = top_logs.masked_fill(~same, float("-inf")).amax(dim=1)
    rank = _above(head, hidden, own) + 1 if ranks else torch.zeros_like(ids)
    log_probs = torch.where(same.any(dim=1), listed, head.capped(own) - total)
    return TokenScores(log_probs, top_ids, top_logs, rank)


def _above(head: OutputEmbedding, hidden: Tensor, own: Tensor) -> Tensor:
    """How many tokens have a product over a position's own, float32 [n] → int64 [n]. The softcap
    keeps the order."""
    above = torch.zeros(len(own), dtype=torch.int64, device=own.device)
    for start, _ in head.spans():
        above += (head.raw(hidden, start).float() > own[:, None]).sum(dim=1)
    return above
