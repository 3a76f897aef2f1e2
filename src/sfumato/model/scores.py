"""How probable named tokens are: the labels of a read, tokens that a caller names, and those that
stand at the positions of a prompt.  One pass over the vocabulary, never [positions, vocabulary].

Knows hidden states and ids; the caller knows of which phase the hidden states are.  In the encode
phase a position's scores are those of the token that follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.devices import DeviceResult, to_device
from sfumato.model.head import HeadStats, VocabularyHead
from sfumato.model.most_probable import MoreTop
from sfumato.ops.online_softmax import BLOCK, TOP, SoftmaxState
from sfumato.ops.registry import operation
from sfumato.weights.formats import QuantizedTensor, Weight


def label_scores(
    head: VocabularyHead, hidden: Tensor, labels: Sequence[Sequence[int]]
) -> DeviceResult[list[list[float]]]:
    """The softcapped logits, at temperature 1, of each position's labels: hidden [n, hidden].

    Only the labels' rows of the embedding are read. Positions are scored in groups whose shape
    depends on the number of labels alone: on a CPU no position's scores depend on the others.
    """
    groups: dict[int, list[int]] = {}
    for position, ids in enumerate(labels):
        groups.setdefault(-(-len(ids) // BLOCK) * BLOCK, []).append(position)
    scored = []
    for width, positions in groups.items():
        padded = [[*labels[at], *[labels[at][-1]] * (width - len(labels[at]))] for at in positions]
        which, wanted = (to_device(torch.tensor(x), hidden.device) for x in (positions, padded))
        # In float32 whatever the dtype: a logit of 8 in bfloat16 would be off by up to 0.016.
        scored.append(head.own_scores(hidden.index_select(0, which).float(), wanted))

    def rows(on_host: Sequence[Tensor]) -> list[list[float]]:
        scores: list[list[float]] = [[] for _ in labels]
        for positions, group in zip(groups.values(), on_host, strict=True):
            for position, row in zip(positions, group.tolist(), strict=True):
                scores[position] = row[: len(labels[position])]
        return scores

    return DeviceResult(tuple(scored), rows)


@dataclass(frozen=True)
class VocabularyMass:
    """The probability of each position's labels together, and the most probable token."""

    labels: list[float]
    argmax: list[int]


def label_mass(
    head: VocabularyHead, hidden: Tensor, labels: Sequence[Sequence[int]]
) -> DeviceResult[VocabularyMass]:
    """One pass over the vocabulary, at temperature 1: hidden [n, hidden], and the labels of each
    position, no label twice.

    The labels' scores are of the pass's own products: with packed weights these round otherwise
    than those of `label_scores`, and the mass of all tokens would not be 1.
    """
    most = max(map(len, labels), default=1)
    padded = [[*own, *[own[-1]] * (most - len(own))] for own in labels]
    ids = to_device(torch.tensor(padded), hidden.device)
    arguments = ids, head.softcap, head.chunk, head.output
    of_head = vocabulary_mass(hidden, head.embedding, *arguments)

    def mass(on_host: Sequence[Tensor]) -> VocabularyMass:
        rows, peaks, totals, argmax = (tensor.tolist() for tensor in on_host)
        masses = [
            math.fsum(math.exp(score - peak) for score in row[: len(own)]) / total
            for own, row, peak, total in zip(labels, rows, peaks, totals, strict=True)
        ]
        return VocabularyMass(masses, argmax)

    return DeviceResult(of_head, mass)


@operation
def vocabulary_mass(
    hidden: Tensor,
    weight: Tensor | QuantizedTensor,
    ids: Tensor,
    softcap: float,
    chunk: int,
    packed: Sequence[Weight] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One pass over the vocabulary at temperature 1: scores of given ids, and the mass of all.

    hidden [positions, hidden], weight [vocab, hidden], ids int64 [positions, n]; chunk and packed
    as in `vocabulary_pass` → the scores s of each position's ids float32 [positions, n]; and of all
    ids the highest score and Σ e^(s - highest) float32, and the argmax int64 [positions].
    """
    output = VocabularyHead(weight, softcap, chunk, packed)
    state, products = _pass_over(output, hidden, ids)
    return output.capped(products), state.max, state.sum_exp, state.argmax


def _pass_over(
    head: VocabularyHead, hidden: Tensor, ids: Tensor, more: MoreTop | None = None
) -> tuple[SoftmaxState, Tensor]:
    """The softmax of the whole vocabulary at temperature 1, and the products float32 [n, m] with
    each position's ids int64 [n, m]; more: is offered all products."""
    state = SoftmaxState.empty(len(hidden), hidden.device)
    temperature = torch.ones(len(hidden), device=hidden.device)
    # Which chunks have given ids is not worth a host read.
    on_host, every = ids.device.type == "cpu", range(len(head.chunks()))
    chunks = set((ids // head.chunk).unique().tolist() if on_host else every)
    products = torch.zeros(ids.shape, device=hidden.device)
    for number, (start, _) in enumerate(head.chunks()):
        raw = head.raw(hidden, start)
        if number in chunks:
            products = _filled(products, ids, raw, start)
        if more is not None:
            more.offer(raw, start)
        # Last, since it may overwrite the products.
        ops.update_softmax(state, raw, start, temperature, head.softcap or None, hidden.dtype)
    return state, products


def named_log_probs(
    head: VocabularyHead, hidden: Tensor, temperature: Tensor, stats: HeadStats, ids: Sequence[int]
) -> Tensor:
    """The log probabilities float32 [n, m] of m tokens at each position: hidden [n, hidden],
    temperature float32 [n], stats: of a pass over the vocabulary that changed no score.

    Their mass together is Σ e^((z_i - z_best) / temperature) · p(best), with products as the pass
    has them: the chunks that have one of these tokens are multiplied again. Its shares are of
    products in float32, as in `label_scores`.
    """
    named = torch.tensor(ids, device=hidden.device)
    wanted = torch.cat((stats.top_ids[:, :1], named.expand(len(hidden), -1)), dim=1)
    scores = torch.zeros(wanted.shape, device=hidden.device)
    for number in (wanted // head.chunk).unique().tolist():
        start = number * head.chunk
        scores = _filled(scores, wanted, head.raw(hidden, start), start)
    scores, over = head.capped(scores), temperature[:, None]
    logs = (scores[:, 1:] - scores[:, :1]) / over + stats.top_probs[:, :1].log()
    exact = head.capped(hidden.float() @ ops.embed(named, head.embedding, torch.float32).T)
    return (exact / over).log_softmax(dim=1) + logs.logsumexp(dim=1, keepdim=True)


def _filled(scores: Tensor, ids: Tensor, raw: Tensor, start: int) -> Tensor:
    """The scores float32 [n, m] with those of the ids int64 [n, m] that a chunk's products raw [n,
    chunk] hold, which begin at `start`."""
    columns = ids - start
    inside = (columns >= 0) & (columns < raw.shape[1])
    picked = raw.gather(1, columns.clamp(0, raw.shape[1] - 1)).float()
    return torch.where(inside, picked, scores)


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
        """The scores of some of the positions."""
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
    head: VocabularyHead,
    hidden: Tensor,
    ids: Tensor,
    top: int = 0,
    ranks: bool = False,
    together: int = TOGETHER,
) -> TokenScores:
    """Scores of the token that stands at each position, int64 [n], of hidden states [n, hidden].
    top: how many of the most probable tokens are wanted; ranks: whether the rank of each token is
    wanted, which takes a second pass where a token is not among the most probable ones; together:
    positions of a pass. No position's results depend on the others, on a CPU to the bit."""
    pairs = zip(hidden.split(together), ids.split(together), strict=True)
    return TokenScores.joined([_scores(head, *pair, top, ranks) for pair in pairs])


def _scores(
    head: VocabularyHead, hidden: Tensor, ids: Tensor, top: int, ranks: bool
) -> TokenScores:
    more = MoreTop.of(torch.full_like(ids, top), head.chunk, head.vocab_size)
    state, products = _pass_over(head, hidden, ids[:, None], more)
    own = products[:, 0]
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
    is_listed = same.any(dim=1)
    rank = torch.zeros_like(ids)
    if ranks:
        rank = same.int().argmax(dim=1) + 1
        # Elsewhere than on a CPU, products of fewer positions round otherwise than those of all.
        others = ~is_listed if hidden.device.type == "cpu" else ~is_listed.all().expand(len(ids))
        if others.any():
            above = _above(head, hidden[others], own[others]) + 1
            rank[others] = torch.where(is_listed[others], rank[others], above)
    # Last, since it may overwrite the products.
    log_probs = torch.where(is_listed, listed, head.capped(own) - total)
    return TokenScores(log_probs, top_ids, top_logs, rank)


def _above(head: VocabularyHead, hidden: Tensor, own: Tensor) -> Tensor:
    """How many tokens have a product over a position's own, float32 [n] → int64 [n]. The softcap
    keeps the order."""
    above = torch.zeros(len(own), dtype=torch.int64, device=own.device)
    for start, _ in head.chunks():
        above += (head.raw(hidden, start).float() > own[:, None]).sum(dim=1)
    return above
