"""The training objective of reads: what a pinned canvas's slot should predict, and where heads
should look.

Questions that share an encoded state are packed without pads.  Knows no data and no optimiser.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato import ops
from sfumato.model.transformer import Transformer, rotary_key
from sfumato.train.objective import additive, behind_prefix, logits, looking_loss
from sfumato.train.vocabulary import MASK, UNK

MATCHING_LAYER = 2  # the first one that sees the whole prompt
LINKING_LAYER = 3
NUMBER_LAYER = 1
FITS, FITS_NOT = MASK, UNK
"""Two tokens that no text has."""


class ReadAttention:
    """Attention of packed states and questions, then of the questions' canvases, with gradients.

    Packed tokens are those of all states, then those of all questions.  Calls of the encode phase
    leave the keys and values that a canvas sees, calls of the denoise phase look at them.
    """

    def __init__(
        self, network: Transformer, states: Tensor, questions: Tensor, owner: Tensor
    ) -> None:
        """states int64 [G] and questions int64 [N]: how many tokens each has; owner int64 [N]: the
        state of each question."""
        self.config, self.owner, self.encoding = network.config, owner, True
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.taught: dict[int, tuple[Tensor, Tensor]] = {}
        self.state_index, state_real = _padded_index(states, 0)
        self.question_index, question_real = _padded_index(questions, int(states.sum()))
        self.back_of_states = state_real.flatten().nonzero()[:, 0]
        self.back_of_questions = question_real.flatten().nonzero()[:, 0]
        self.row_of = torch.repeat_interleave(torch.arange(len(questions)), questions)
        self.row_of = F.pad(self.row_of, (int(states.sum()), 0))  # of a packed token
        starts = torch.where(question_real, torch.arange(question_real.shape[1]), 0)
        self.place_of = F.pad(starts[question_real], (int(states.sum()), 0))
        first = torch.arange(self.state_index.shape[1]).expand_as(self.state_index)
        own = states[owner, None] + torch.arange(self.question_index.shape[1])
        self.positions = torch.cat((first[state_real], own[question_real]))
        self.lengths, self.last = states[owner] + questions, questions - 1
        keys = torch.cat((first[owner], own), 1)
        real = torch.cat((state_real[owner], question_real), 1)
        window = self.config.sliding_window
        self.state_masks, self.question_masks, self.canvas_masks = {}, {}, {}
        for sliding in (False, True):
            # No result of a pad as query is used, but a row that sees no key would be NaN.
            masks = []
            for queries, at, is_token in ((first, first, state_real), (own, keys, real)):
                seen = is_token[:, None] & (at[:, None] <= queries[..., None])
                if sliding:
                    seen = seen & (at[:, None] > queries[..., None] - window)
                seen[..., 0] |= ~seen.any(-1)
                masks.append(additive(seen))
            self.state_masks[sliding], self.question_masks[sliding] = masks
            near = keys > self.lengths[:, None] - window if sliding else real
            self.canvas_masks[sliding] = additive(real & near)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [tokens, heads, d] of packed tokens or [N, width, heads, d] of canvases → like q."""
        sliding = self.config.layers[layer].sliding
        if self.encoding:
            return self._encode(layer, q, k, v, sliding)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v, mask = behind_prefix(self.kept[layer], self.canvas_masks[sliding], k, v)
        if layer == len(self.config.layers) - 1:
            self.looking = q[:, 0, 0], k[:, 0], mask[:, 0]
        return ops.attention(q, k, v, mask).transpose(1, 2)

    def _encode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sliding: bool) -> Tensor:
        """Attends within the packed tokens; a q of one token a question holds the last ones."""
        sk, sv = (_padded(x, self.state_index) for x in (k, v))
        qk, qv = (_padded(x, self.question_index) for x in (k, v))
        keys = torch.cat((sk[self.owner], qk), 2)
        values = torch.cat((sv[self.owner], qv), 2)
        self.kept[layer] = keys, values
        if layer in (NUMBER_LAYER, MATCHING_LAYER, LINKING_LAYER):
            self.taught[layer] = q, keys
        if layer == NUMBER_LAYER:
            self.number_keys = sk
        mask = self.question_masks[sliding]
        if len(q) < len(k):
            mask = mask[torch.arange(len(mask)), self.last]
            return ops.attention(q.unsqueeze(2), keys, values, mask[:, None])[:, :, 0]
        sq, qq = _padded(q, self.state_index), _padded(q, self.question_index)
        of_states = ops.attention(sq, sk, sv, self.state_masks[sliding])
        of_questions = ops.attention(qq, keys, values, mask)
        return torch.cat(
            (
                of_states.transpose(1, 2).flatten(0, 1).index_select(0, self.back_of_states),
                of_questions.transpose(1, 2).flatten(0, 1).index_select(0, self.back_of_questions),
            )
        )

    def look_loss(self, layer: int, head: int, looks: Tensor, in_question: bool = False) -> Tensor:
        """Cross-entropy in nats of where a head looks from a place in a question: at a place in its
        state, or in the question itself. looks int64 [n, 3]: question, place in it, place to look
        at."""
        owner, place, target = looks.unbind(1)
        target = target + self.state_index.shape[1] * in_question
        return self._attention_loss(layer, head, owner, place, target)

    def number_loss(self, numbers: Tensor) -> Tensor:
        """Computes `look_loss` within states, of the first head of NUMBER_LAYER. numbers int64
        [K, 3]: state, place in it, another place in it."""
        state, place, target = numbers.unbind(1)
        at = self.taught[NUMBER_LAYER][0][self.state_index[state, place], 0]
        sliding = self.config.layers[NUMBER_LAYER].sliding
        mask = self.state_masks[sliding][state, place]
        return looking_loss(at, self.number_keys[state, 0], mask, target)

    def label_loss(self, options: Tensor, starts: Tensor) -> Tensor:
        """Computes `look_loss` of the last head of LINKING_LAYER. options and starts int64 [O]:
        where each option's line ends and where its label is, as places in the packed tokens."""
        row, target = self.row_of[options], self.state_index.shape[1] + self.place_of[starts]
        last = self.config.num_heads - 1
        return self._attention_loss(LINKING_LAYER, last, row, self.place_of[options], target)

    def _attention_loss(
        self, layer: int, head: int, owner: Tensor, place: Tensor, target: Tensor
    ) -> Tensor:
        queries, keys = self.taught[layer]
        at = queries[self.question_index[owner, place], head]
        keys = keys[:, head * keys.shape[1] // queries.shape[1]]
        mask = self.question_masks[self.config.layers[layer].sliding][owner, place]
        return looking_loss(at, keys[owner], mask, target)

    def slot_loss(self, options: Tensor, fits: Tensor) -> Tensor:
        """Cross-entropy in nats of where the first head of the last layer looks from the slot: at
        the ends of the options' lines, at each as much as it fits. options int64 [O], as places in
        the packed tokens; fits float32 [O], which sum to 1 for each question."""
        row, place = self.row_of[options], self.place_of[options]
        queries, keys, mask = self.looking
        scores = (keys @ queries[:, :, None])[..., 0] + mask
        log_shares = scores.log_softmax(-1)[row, self.state_index.shape[1] + place]
        return -(fits * log_shares).sum() / len(queries)


def _padded_index(lengths: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """The place of each token of rows of these lengths, packed from `offset` on, int64 [rows,
    longest] (of a pad: `offset`), and which are tokens, bool."""
    places = torch.arange(int(lengths.max()))
    real = places < lengths[:, None]
    starts = lengths.cumsum(0) - lengths
    return torch.where(real, starts[:, None] + places, 0) + offset, real


def _padded(packed: Tensor, index: Tensor) -> Tensor:
    """[tokens, heads, d] → [rows, heads, longest, d]."""
    rows = packed.index_select(0, index.flatten())
    return rows.view(*index.shape, *packed.shape[1:]).transpose(1, 2)


def slot_scores(
    network: Transformer,
    ids: Tensor,
    states: Tensor,
    questions: Tensor,
    owner: Tensor,
    canvas: Tensor,
) -> tuple[Tensor, Tensor, Tensor, ReadAttention]:
    """Softcapped scores float32 [N, vocab] of each read's slot, the first position of its canvas,
    and of the encoder's next token after the prompt; what the encoder's last layer reads, [tokens,
    hidden]; and the attention.

    ids int64 [tokens]: states, then questions, packed; states, questions and owner as
    ReadAttention takes them; canvas int64 [N, width], given as it is.  First pass: no soft
    embedding.
    """
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
    which words decide: with "slot" alone nothing was learnt in 350 steps.  So "end" asks the
    prompt's last position for the same truth as the slot, and "options" asks the end of each
    option's line, one layer before the last, for the option's label if it fits, and for FITS_NOT
    if not (labels False: for FITS if it fits).  The others say where heads look: "looks" from the
    slot at the options; "labels" from an option to its label; "words" from a word of a question to
    the same word in its state, or to the prompt's first token if the state lacks the word;
    "evidence" from options to what decides in the state; "turns" from the line of "yes" or "no" to
    the word that is asked for; "numbers" from a word of a state to its number.
    """
    *rows, truth, options, fits, starts, matches, evidence, links, numbers = reads
    slot, last, inside, attend = slot_scores(network, *rows)
    of_options = logits(network, network.norm(inside[options]))
    wanted = torch.zeros_like(of_options)
    wanted[:, FITS_NOT] = 1 - fits
    wanted[torch.arange(len(starts)), rows[0][starts] if labels else FITS] = fits
    return {
        "slot": F.cross_entropy(slot, truth),
        "end": F.cross_entropy(last, truth),
        "options": F.cross_entropy(of_options, wanted),
        "words": attend.look_loss(MATCHING_LAYER, 0, matches),
        "looks": attend.slot_loss(options, fits),
        "labels": attend.label_loss(options, starts),
        "evidence": attend.look_loss(MATCHING_LAYER, 1, evidence),
        "turns": attend.look_loss(LINKING_LAYER, 0, links, in_question=True),
        "numbers": attend.number_loss(numbers),
    }


def _encoded(
    network: Transformer, ids: Tensor, attend: ReadAttention, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes `network.encode`, in the last layer only for the positions `ends`, besides the keys
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
