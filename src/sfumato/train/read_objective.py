"""The training objective of reads: what a pinned canvas's slot should predict.

Knows no data and no optimiser.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.model.layers import rotary_key
from sfumato.model.transformer import Transformer
from sfumato.train.objective import logits
from sfumato.train.read_attention import ReadAttention
from sfumato.train.vocabulary import MASK, UNK

FITS, FITS_NOT = MASK, UNK
"""Two tokens that no text has."""


def slot_scores(
    network: Transformer,
    ids: Tensor,
    states: Tensor,
    questions: Tensor,
    owner: Tensor,
    canvas: Tensor,
) -> tuple[Tensor, Tensor]:
    """Softcapped scores float32 [N, vocab] of each read's slot, the first position of its canvas,
    and of the encoder's next token after the prompt.

    ids int64 [tokens]: states, then questions, packed; states, questions and owner as
    ReadAttention takes them; canvas int64 [N, width], given as it is.  First pass: no soft
    embedding.
    """
    slot, last, _, _ = _scores(network, ids, states, questions, owner, canvas)
    return slot, last


def _scores(
    network: Transformer,
    ids: Tensor,
    states: Tensor,
    questions: Tensor,
    owner: Tensor,
    canvas: Tensor,
) -> tuple[Tensor, Tensor, Tensor, ReadAttention]:
    """As `slot_scores`, and what the encoder's last layer reads, [tokens, hidden]."""
    attend = ReadAttention(network, states, questions, owner)
    ends = len(ids) - int(questions.sum()) + questions.cumsum(0) - 1
    last, inside = _encoded(network, ids, attend, ends)
    attend.encoding = False
    positions = attend.lengths[:, None] + torch.arange(canvas.shape[1])
    hidden = network.denoise(canvas, None, positions, attend, network.norm.weight.dtype)[:, 0]
    return logits(network, hidden), logits(network, last), inside, attend


def read_losses(
    network: Transformer, reads: Sequence[Tensor], labels: bool = True
) -> dict[str, Tensor]:
    """Cross-entropies in nats: "slot" at the slot, and those that help to learn it.

    reads: the fields of `decisions_data.Reads`.  One answer a question teaches too little about
    which words decide: with "slot" alone nothing was learnt in 350 steps.  So "prompt" asks the
    prompt's last position for the same truth as the slot, and "options" asks the end of each
    option's line, one layer before the last, for the option's label if it fits, and for FITS_NOT
    if not (labels False: for FITS if it fits).  The others are of where heads look: see
    `ReadAttention`.
    """
    *rows, truth, options, fits, starts, matches, evidence, links, numbers = reads
    slot, last, inside, attend = _scores(network, *rows)
    of_options = logits(network, network.norm(inside[options]))
    wanted = torch.zeros_like(of_options)
    wanted[:, FITS_NOT] = 1 - fits
    wanted[torch.arange(len(starts)), rows[0][starts] if labels else FITS] = fits
    return {
        "slot": F.cross_entropy(slot, truth),
        "prompt": F.cross_entropy(last, truth),
        "options": F.cross_entropy(of_options, wanted),
        "words": attend.word_loss(matches),
        "looks": attend.slot_loss(options, fits),
        "labels": attend.label_loss(options, starts),
        "evidence": attend.evidence_loss(evidence),
        "turns": attend.turn_loss(links),
        "numbers": attend.number_loss(numbers),
    }


def _encoded(
    network: Transformer, ids: Tensor, attend: ReadAttention, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """As network.encode, but of the last layer only what the positions `ends` need, and the keys
    and values: hidden [len(ends), hidden], and what the last layer reads, [tokens, hidden]."""
    dtype = network.norm.weight.dtype
    x = network.embed_tokens(ids, dtype)
    tables = network.rotary.tables(attend.positions, dtype)
    last, inside = len(network.layers) - 1, x
    for index, layer in enumerate(network.config.layers):
        inside, wanted = x, ends if index == last else None
        key = tables[rotary_key(layer)]
        x = network.layers[index](x, key, attend, index, encoding=True, only=wanted)
    return network.norm(x), inside
