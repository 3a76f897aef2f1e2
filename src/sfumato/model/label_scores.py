"""What a read needs of the vocabulary: the scores of its labels, and the mass of all tokens; and
the log probabilities of tokens that a caller names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.head_stats import HeadStats
from sfumato.model.output_embedding import OutputEmbedding
from sfumato.ops.online_softmax import BLOCK, SoftmaxState


def label_scores(
    head: OutputEmbedding, hidden: Tensor, labels: Sequence[Sequence[int]]
) -> list[list[float]]:
    """The softcapped logits, at temperature 1, of each position's labels: hidden [n, hidden].

    Only the labels' rows of the embedding are read. Positions are scored in groups whose shape
    depends on the number of labels alone: on a CPU no position's scores depend on the others.
    """
    scores: list[list[float]] = [[] for _ in labels]
    groups: dict[int, list[int]] = {}
    for position, ids in enumerate(labels):
        groups.setdefault(-(-len(ids) // BLOCK) * BLOCK, []).append(position)
    for width, positions in groups.items():
        padded = [[*labels[at], *[labels[at][-1]] * (width - len(labels[at]))] for at in positions]
        which = torch.tensor(positions, device=hidden.device)
        wanted = torch.tensor(padded, device=hidden.device)
        # In float32 whatever the dtype: a logit of 8 in bfloat16 would be off by up to 0.016.
        rows = head.own_scores(hidden.index_select(0, which).float(), wanted).tolist()
        for position, row in zip(positions, rows, strict=True):
            scores[position] = row[: len(labels[position])]
    return scores


@dataclass(frozen=True)
class VocabularyMass:
    """Of each position: the logarithm of Σ e^logit over the vocabulary, and the best token."""

    log_sum_exp: list[float]
    argmax: list[int]


def vocabulary_mass(head: OutputEmbedding, hidden: Tensor) -> VocabularyMass:
    """One pass over the vocabulary, at temperature 1: hidden [n, hidden]."""
    state = SoftmaxState.empty(len(hidden), hidden.device)
    temperature = torch.ones(len(hidden), device=hidden.device)
    for start, _ in head.spans():
        raw = head.raw(hidden, start)
        ops.update_softmax(state, raw, start, temperature, head.softcap, hidden.dtype)
    sums = state.max.double() + state.sum_exp.double().log()
    return VocabularyMass(sums.tolist(), state.argmax.tolist())


def named_log_probs(
    head: OutputEmbedding, hidden: Tensor, temperature: Tensor, stats: HeadStats, ids: Sequence[int]
) -> Tensor:
    """The log probabilities float32 [n, m] of m tokens at each position: hidden [n, hidden],
    temperature float32 [n], stats: of a pass over the vocabulary that changed no score.

    log p(i) = (z_i - z_best) / temperature + log p(best), with products in float32.
    """
    wide = hidden.float()
    rows = ops.embed(torch.tensor(ids, device=hidden.device), head.embedding, wide.dtype)
    best = ops.embed(stats.top_ids[:, 0], head.embedding, wide.dtype)
    scores = head.capped(wide @ rows.T)
    peak = head.capped((wide * best).sum(dim=1))
    return (scores - peak[:, None]) / temperature[:, None] + stats.top_probs[:, :1].log()
