"""Attention of reads in training: questions that share an encoded state, packed without pads.

It also says where some heads look, so that training can ask them to look where the answer is.
Knows no loss of an answer, no data and no optimiser.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato import ops
from sfumato.model.transformer import Transformer
from sfumato.train.objective import additive

MATCHING_LAYER = 2  # the first one that sees the whole prompt
LINKING_LAYER = 3
NUMBER_LAYER = 1


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
            # Of a pad as query nothing is used, but a row that sees no key would be NaN.
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
        old_k, old_v = self.kept[layer]
        prefix = self.canvas_masks[sliding]
        mask = torch.cat((prefix, prefix.new_zeros(len(k), k.shape[2])), dim=1)
        mask = mask[:, None].expand(-1, k.shape[2], -1)
        k, v = torch.cat((old_k, k), 2), torch.cat((old_v, v), 2)
        if layer == len(self.config.layers) - 1:
            self.looking = q[:, 0, 0], k[:, 0], mask[:, 0]
        return ops.attention(q, k, v, mask).transpose(1, 2)

    def _encode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sliding: bool) -> Tensor:
        """Where q has a token for each question only, these are the questions' last ones."""
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

    def word_loss(self, matches: Tensor) -> Tensor:
        """Cross-entropy in nats of where the first head of MATCHING_LAYER looks from the end of a
        word of a question: at the end of the same word in its state, or at the prompt's first token
        if the state lacks it. matches int64 [M, 3]: question, place in it, place in its state."""
        owner, place, target = matches.unbind(1)
        return self._attention_loss(MATCHING_LAYER, 0, owner, place, target)

    def turn_loss(self, links: Tensor) -> Tensor:
        """Likewise of the first head of LINKING_LAYER, from where the line of "yes" or "no" ends to
        where the word ends that is asked for. links int64 [L, 3]: question, place in it, another
        place in it."""
        owner, place, target = links.unbind(1)
        target = self.state_index.shape[1] + target
        return self._attention_loss(LINKING_LAYER, 0, owner, place, target)

    def evidence_loss(self, evidence: Tensor) -> Tensor:
        """Likewise of the second head of MATCHING_LAYER, from a place in a question to one in its
        state. evidence int64 [E, 3]: question, place in it, place in its state."""
        owner, place, target = evidence.unbind(1)
        return self._attention_loss(MATCHING_LAYER, 1, owner, place, target)

    def number_loss(self, numbers: Tensor) -> Tensor:
        """Likewise of the first head of NUMBER_LAYER, from where a word of a state ends to where
        its number does. numbers int64 [K, 3]: state, place in it, another place in it."""
        state, place, target = numbers.unbind(1)
        at = self.taught[NUMBER_LAYER][0][self.state_index[state, place], 0]
        sliding = self.config.layers[NUMBER_LAYER].sliding
        mask = self.state_masks[sliding][state, place]
        return _looking_loss(at, self.number_keys[state, 0], mask, target)

    def label_loss(self, options: Tensor, starts: Tensor) -> Tensor:
        """Likewise of the last head of LINKING_LAYER, from where each option's line ends to the
        label with which it starts. options and starts int64 [O], as places in the packed tokens."""
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
        return _looking_loss(at, keys[owner], mask, target)

    def slot_loss(self, options: Tensor, fits: Tensor) -> Tensor:
        """Cross-entropy in nats of where the first head of the last layer looks from the slot: at
        the ends of the options' lines, at each as much as it fits. options int64 [O], as places in
        the packed tokens; fits float32 [O], which sum to 1 for each question."""
        row, place = self.row_of[options], self.place_of[options]
        queries, keys, mask = self.looking
        scores = (keys @ queries[:, :, None])[..., 0] + mask
        log_shares = scores.log_softmax(-1)[row, self.state_index.shape[1] + place]
        return -(fits * log_shares).sum() / len(queries)


def _looking_loss(queries: Tensor, keys: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    """queries [n, d], each with its keys [n, length, d], mask [n, length] added, target int64 [n] a
    place among them."""
    if not len(queries):
        return queries.new_zeros(())
    scores = (keys @ queries[:, :, None])[..., 0]
    return F.cross_entropy(scores + mask, target)


def _padded_index(lengths: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Of rows of these lengths, packed from `offset` on: the place of each token, int64 [rows,
    longest] (of a pad: `offset`), and which are tokens, bool."""
    places = torch.arange(int(lengths.max()))
    real = places < lengths[:, None]
    starts = lengths.cumsum(0) - lengths
    return torch.where(real, starts[:, None] + places, 0) + offset, real


def _padded(packed: Tensor, index: Tensor) -> Tensor:
    """[tokens, heads, d] → [rows, heads, longest, d]."""
    rows = packed.index_select(0, index.flatten())
    return rows.view(*index.shape, *packed.shape[1:]).transpose(1, 2)
