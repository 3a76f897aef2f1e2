"""The training objectives: canvases to denoise, and reads.

A clean context goes through the encode phase, a noised canvas through the denoise phase, and the
loss asks for the clean canvas: at every position, or where the canvas is not pinned.  A read's loss
asks for what the slot of a pinned canvas should predict, and where heads should look.  Knows no
optimiser, and of the data only how rows are packed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sfumato import ops
from sfumato.model.adapters import Adapted
from sfumato.model.head import VocabularyHead
from sfumato.model.transformer import Transformer, rotary_key
from sfumato.model.vision.tower import VisionTower, rotary_of
from sfumato.ops.frozen import stored_cross_entropies
from sfumato.ops.registry import PANELS, form_of
from sfumato.train.canvas_rows import KINDS, CanvasBatch, Reads
from sfumato.train.pictures import PictureBatch
from sfumato.train.vocabulary import EOS, MASK, UNK
from sfumato.weights.formats import Stored

LEAST_NOISE = 0.001
CONDITIONED = 0.5
"""The probability of a first pass, whose soft embedding the pass that counts reads."""
MOST_SCORES = 2**25
"""Scores of the vocabulary that exist at once: those of more positions are computed in chunks, and
once more for their gradients."""
ENCODER_WEIGHT = 0.1
"""Weight of the encoder's next-token loss, against 1 for the canvas. The embedded model's prompts
are mostly random digits, which cannot be predicted; a full weight would spend the network on
them."""
COPYING_LAYER, COPYING_HEAD = 3, 1
"""The head that training may ask to look at what a text repeats; others serve reads."""
TEMPERATURE, BOUND = 0.8, 0.1
"""The product's at its first step: of the tokens drawn, and of the positions accepted."""
MOST_STEPS = 4
"""Steps of the product that may come before the one that is trained."""
MATCHING_LAYER = 2  # the first one that sees the whole prompt
LINKING_LAYER = 3
NUMBER_LAYER = 1
Part = Literal["state", "question"]
LOOKING_HEADS: dict[str, tuple[int, int, Part, Part]] = {
    "labels": (LINKING_LAYER, -1, "question", "question"),
    "numbers": (NUMBER_LAYER, 0, "state", "state"),
    "words": (MATCHING_LAYER, 0, "question", "state"),
    "evidence": (MATCHING_LAYER, 1, "question", "state"),
    "subjects": (LINKING_LAYER, 0, "question", "question"),
}
"""The layer and the head that look, from where, and at what."""
LETTER_SHARPNESS = 20.0
"""By how many nats a soft token at the middle of all embeddings is surer of the nearest one, about,
than at a place where embeddings are far away."""
FITS, FITS_NOT = MASK, UNK
"""Two tokens that no text has."""


class TwoPhases(ABC):
    """Attention that keeps gradients: encode first, then denoise.

    Calls of the encode phase leave the keys and values here that canvases see; those of the denoise
    phase look at them and at the canvas.
    """

    def __init__(
        self,
        network: Transformer,
        lengths: Tensor,
        masks: dict[bool, Tensor],
        watched: tuple[int, int],
        canvas_mask: Tensor | None = None,
        adapted: Sequence[Adapted] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        """lengths int64 [batch]: where the canvases begin; masks, by whether the window slides, of
        what is kept, and canvas_mask of the canvases (None: all is seen): added, [batch, length];
        watched: the layer and the head whose queries, keys and mask `looking` has; adapted: see
        `Attend`; dtype: of activations (None: that of the network's norms)."""
        self.config, self.lengths, self.encoding = network.config, lengths, True
        self.denoise_masks, self.canvas_mask, self.watched = masks, canvas_mask, watched
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.adapted, self.dtype = tuple(adapted), dtype or network.norm.weight.dtype
        self.looking: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [batch, tokens, heads, d]; k, v [batch, tokens, kv_heads, d] → like q."""
        sliding = self.config.layers[layer].sliding
        if self.encoding:
            return self._encode(layer, q, k, v, sliding)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        (keys, values), prefix = self.kept[layer], self.denoise_masks[sliding]
        own = prefix.new_zeros(len(k), k.shape[2]) if self.canvas_mask is None else self.canvas_mask
        mask = torch.cat((prefix, own), dim=1)[:, None].expand(-1, k.shape[2], -1)
        return self._attend(layer, q, torch.cat((keys, k), 2), torch.cat((values, v), 2), mask)

    @contextmanager
    def recomputing(self, encoding: bool) -> Iterator[None]:
        """See `RecomputedAttend`."""
        before = self.encoding, self.kept, self.looking
        self.encoding, self.kept = encoding, dict(self.kept)
        try:
            yield
        finally:
            self.encoding, self.kept, self.looking = before

    @abstractmethod
    def _encode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sliding: bool) -> Tensor:
        """Attends in the encode phase, and keeps the keys and values."""

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        at, head = self.watched
        if layer == at:
            self.looking = q[:, head], k[:, head * k.shape[1] // q.shape[1]], mask
        return ops.attention(q, k, v, mask).transpose(1, 2)


class PrefixAttention(TwoPhases):
    """Attention over padded batches. Pads lie on the right of the context."""

    def __init__(
        self,
        network: Transformer,
        lengths: Tensor,
        width: int,
        filled: Tensor | None = None,
        pictured: Tensor | None = None,
        block: int | None = None,
        adapted: Sequence[Adapted] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        """lengths int64 [batch]: how much of each row's context, padded to `width`, its canvas
        sees; filled bool [batch, length]: which positions of the canvases there are (None: all);
        pictured int64 [batch, width]: which tokens of the context are soft tokens of a picture, by
        its number from 1 (0: no picture), and see each other in sliding layers (None: none);
        block: tokens that see each other in both directions, counted back from where the canvas
        begins (None: a token sees those up to itself)."""
        places = torch.arange(width, device=lengths.device)
        at = places.expand(len(lengths), -1)
        if block is not None:
            at = (at - lengths[:, None]).div(block, rounding_mode="floor")
        causal = at[:, None] <= at[:, :, None]
        window = network.config.sliding_window
        near = places > places[:, None] - window
        sliding = causal & near
        if pictured is not None:
            both = (places - places[:, None]).abs() < window
            same = (pictured[:, None] == pictured[:, :, None]) & (pictured > 0)[:, None]
            sliding = sliding | (same & both)
        # Pads come after every real token, so causality alone hides them from those.
        # Additive masks: attention would otherwise convert bools once per layer and pass.
        self.encode_masks = {False: additive(causal), True: additive(sliding)}
        real = places < lengths[:, None]
        last = real & (places > lengths[:, None] - window)
        masks = {False: additive(real), True: additive(last)}
        of_canvas = None if filled is None else additive(filled)
        watched = COPYING_LAYER, COPYING_HEAD
        super().__init__(network, lengths, masks, watched, of_canvas, adapted, dtype)

    def _encode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sliding: bool) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        self.kept[layer] = k, v
        return self._attend(layer, q, k, v, self.encode_masks[sliding])

    def copy_loss(self, row: Tensor, place: Tensor, source: Tensor) -> Tensor:
        """Cross-entropy in nats of where COPYING_HEAD looked in the last pass, from places of its
        queries, at `source` in the context, where that may be seen; all int64 [n]."""
        assert self.looking is not None
        queries, keys, mask = self.looking
        seen = mask[row, place, source].isfinite()  # a window may end before a far source
        row, place, source = row[seen], place[seen], source[seen]
        return looking_loss(queries[row, place], keys[row], mask[row, place], source)


def looking_loss(queries: Tensor, keys: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy in nats of where queries [n, d] look: each has its keys [n, length, d], mask
    [n, length] added, and target int64 [n], a place among its keys."""
    if not len(queries):
        return queries.new_zeros(())
    scores = (keys @ queries[:, :, None])[..., 0]
    return F.cross_entropy(scores + mask, target)


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, float("-inf"))


def logits(network: Transformer, hidden: Tensor) -> Tensor:
    """Softcapped scores with gradients: [..., hidden] → float32 [..., vocab]."""
    cap = network.config.logit_softcap
    raw = ops.linear(hidden, network.output).float()
    return (raw / cap).tanh() * cap if cap else raw


def cross_entropies(network: Transformer, hidden: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy in nats of each wanted token, float32 [n], from hidden [n, hidden] and wanted
    int64 [n]. Of the scores, MOST_SCORES exist at once, in the backward pass too."""
    output: ops.Weight = network.output
    config = network.config
    is_large = len(hidden) * config.vocab_size > MOST_SCORES
    if is_large and isinstance(output, Stored) and form_of(output) != PANELS:  # rows lie apart
        return stored_cross_entropies(hidden, output, wanted, config.logit_softcap, MOST_SCORES)

    def of_chunk(hidden: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(logits(network, hidden), wanted, reduction="none")

    size = max(1, MOST_SCORES // config.vocab_size)
    if len(hidden) <= size:
        return of_chunk(hidden, wanted)
    chunks = zip(hidden.split(size), wanted.split(size), strict=True)
    recomputed = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([recomputed(*chunk) for chunk in chunks])


def noised(target: Tensor, vocab_size: int, generator: torch.Generator | None) -> Tensor:
    """target int64 [batch, length] with each token replaced, with its row's probability
    t ~ U(LEAST_NOISE, 1), by a uniform draw of the vocabulary. The draws are a CPU's, so that they
    are the same for every device."""
    t = torch.rand(len(target), 1, generator=generator) * (1 - LEAST_NOISE) + LEAST_NOISE
    hit = torch.rand(target.shape, generator=generator) < t
    other = torch.randint(0, vocab_size, target.shape, generator=generator)
    return torch.where(hit.to(target.device), other.to(target.device), target)


class Pictures(NamedTuple):
    """Soft tokens in the contexts of a batch."""

    where: Tensor  # int64 [n]: their places in the flattened context
    values: Tensor  # [n, hidden]
    numbers: Tensor  # int64 [B, S]: of the picture in its row, from 1; 0 where there is none


def loss(
    network: Transformer,
    batch: CanvasBatch,
    generator: torch.Generator | None = None,
    *,
    each_row: bool = False,
    prompts: bool = True,
    adapted: Sequence[Adapted] = (),
    dtype: torch.dtype | None = None,
    pictures: Pictures | None = None,
) -> dict[str, Tensor]:
    """Cross-entropies in nats: "canvas", the mean over all positions of the canvases, and
    "encoder", the mean over the encoder's next tokens.

    With probability one half a first pass without gradient gives the soft embedding for the pass
    that counts.  No 1/t weight.  The objective is that of Google's fine-tuning (google-deepmind/
    gemma, diffusion/hackable_diffusion_adapter/hd/sft_model.py).
    each_row: whether each row draws if it reads a soft embedding, or the batch once; prompts:
    whether the encoder's loss is of prompts and texts, or of texts alone; adapted: see `Attend`;
    dtype: see `TwoPhases`.
    """
    width = batch.context.shape[1]
    numbers = None if pictures is None else pictures.numbers
    attend = PrefixAttention(
        network, batch.lengths, width, pictured=numbers, adapted=adapted, dtype=dtype
    )
    soft = None if pictures is None else (pictures.where, pictures.values)
    encoded = _encoded(network, batch.context, attend, soft)
    hidden = _of_noise(network, batch.target, attend, generator, each_row)
    which = batch.replies | batch.prompts if prompts else batch.replies
    if pictures is not None:  # what stands for a soft token is no text
        which = which & (pictures.numbers[:, 1:] == 0)
    return {
        "canvas": cross_entropies(network, hidden, batch.target.flatten()).mean(),
        "encoder": _next_token_loss(network, encoded, batch.context, which),
    }


def _of_noise(
    network: Transformer,
    target: Tensor,
    attend: PrefixAttention,
    generator: torch.Generator | None,
    each_row: bool = False,
) -> Tensor:
    """The hidden states [all positions, hidden] of noised canvases, maybe after a first pass; see
    `loss`."""
    canvas, soft = noised(target, network.config.vocab_size, generator), None
    chosen = torch.rand((len(target), 1, 1) if each_row else (), generator=generator) < CONDITIONED
    if chosen.any() and network.self_conditioning is not None:
        with torch.no_grad():
            first = _denoised(network, canvas, None, attend)
            size = max(1, MOST_SCORES // network.config.vocab_size)
            parts = [
                _soft(logits(network, x), network, x.dtype) for x in first.flatten(0, 1).split(size)
            ]
            soft = torch.cat(parts).view_as(first)
            if each_row:
                soft = soft * chosen.to(soft)
    return _denoised(network, canvas, soft, attend).flatten(0, 1)


def mask_loss(
    network: Transformer,
    batch: CanvasBatch,
    generator: torch.Generator | None = None,
    *,
    adapted: Sequence[Adapted] = (),
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Cross-entropy in nats of the tokens that masks hide, "canvas": the mean over rows of the mean
    over each row's masks.  A row hides each open token with a probability t ~ U(0, 1), and one at
    least: in expectation this is the bound of masked diffusion, whose weight is 1/t (Sahoo et al.
    2024, arXiv:2406.07524)."""
    target, config = batch.target, network.config
    width, block = int(batch.lengths.max()), config.canvas_length
    attend = PrefixAttention(
        network, batch.lengths, width, block=block, adapted=adapted, dtype=dtype
    )
    _encoded(network, batch.context[:, :width], attend)
    draws = torch.rand(target.shape, generator=generator)
    share = torch.rand(len(target), 1, generator=generator)
    draws = draws.to(target.device).masked_fill(~batch.open, 2.0)
    hidden = draws <= share.to(target.device).maximum(draws.min(1, keepdim=True).values)
    assert config.mask_id is not None
    states = _denoised(network, target.masked_fill(hidden, config.mask_id), None, attend)
    each = cross_entropies(network, states.flatten(0, 1), target.flatten())
    of_row = (each.view(target.shape) * hidden).sum(1) / hidden.sum(1)
    return {"canvas": of_row.mean()}


def canvas_losses(
    network: Transformer, batch: CanvasBatch, generator: torch.Generator
) -> dict[str, Tensor]:
    """Cross-entropies in nats: "canvas", the mean over rows of the mean over each row's open
    positions; the same of each kind of row in the batch; "reply" and "prompt", of the encoder's
    next tokens; "copies_of_reply" and "copies_of_canvas", of where one head looks in either phase:
    at the letter of the prompt that the text repeats.

    Half of the batches have a first pass without gradient, as in `loss`; its soft embedding is zero
    at pinned positions.  In half of these, the canvas of the trained pass is what one to MOST_STEPS
    of the product's steps make of the first one: after each the positions of least entropy keep the
    token drawn, the others are noise again.
    """
    attend = PrefixAttention(network, batch.lengths, batch.context.shape[1], batch.filled)
    encoded = _encoded(network, batch.context, attend)
    row, at, source = batch.copies.unbind(1)
    losses = {"copies_of_reply": attend.copy_loss(row, at - 1, source)}

    canvas = noised(batch.start, network.config.vocab_size, generator)
    canvas = torch.where(batch.open, canvas, batch.target)
    soft, way = None, float(torch.rand((), generator=generator))
    if way < 0.5:
        steps = 1 + int(way * 4 * MOST_STEPS) if way < 0.25 else 0
        with torch.no_grad():
            for _ in range(max(1, steps)):
                scores = _scores(network, canvas, soft, attend)
                if steps:
                    scores /= TEMPERATURE
                    canvas = _stepped(scores, batch, generator)
                soft = _soft(scores, network, attend.dtype) * batch.open[:, :, None]
    scores = _scores(network, canvas, soft, attend)
    each = F.cross_entropy(scores.flatten(0, 1), batch.target.flatten(), reduction="none")
    of_row = (each.view(batch.open.shape) * batch.open).sum(1) / batch.open.sum(1)
    losses["canvas"] = of_row.mean()
    at = at - batch.lengths[row]
    seen = (at >= 0) & batch.open[row, at.clamp(min=0)]
    losses["copies_of_canvas"] = attend.copy_loss(row[seen], at[seen], source[seen])
    for number, kind in enumerate(KINDS):
        some = of_row[batch.kinds == number]
        if len(some):
            losses[kind] = some.mean()
    for name, which in (("reply", batch.replies), ("prompt", batch.prompts)):
        losses[name] = _next_token_loss(network, encoded, batch.context, which)
    return losses


def picture_losses(
    network: Transformer,
    soft: Tensor,
    batch: PictureBatch,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """What the text network makes of soft tokens [rows, n, hidden], those of the first rows of a
    batch. Cross-entropies in nats: "canvas", the mean over all positions, half of the batches with
    a first pass as in `loss`; "answer", that of what is no filler."""
    rows = len(soft)
    context, target = batch.context[:rows], batch.target[:rows]
    at = batch.places[:rows, None] + torch.arange(soft.shape[1])
    where = (at + context.shape[1] * torch.arange(rows)[:, None]).flatten()
    pictured = torch.zeros(context.numel(), dtype=torch.int64)
    pictured[where] = 1
    pictured = pictured.view_as(context)
    attend = PrefixAttention(network, batch.lengths[:rows], context.shape[1], None, pictured)
    _encoded(network, context, attend, (where, soft.flatten(0, 1)))
    each = cross_entropies(network, _of_noise(network, target, attend, generator), target.flatten())
    return {"canvas": each.mean(), "answer": each[target.flatten() != EOS].mean()}


def soft_tokens(tower: VisionTower, levels: Tensor) -> Tensor:
    """Soft tokens [batch, n, text size] with gradients, of square pictures uint8 [batch, patches,
    3 · patch²]."""
    side = math.isqrt(levels.shape[1])
    x, places = tower.embed(levels.float() / 255, side, side)
    rotary = rotary_of(places, tower.config, x.dtype)
    for block in tower.blocks:
        x = block(x, rotary)
    return tower.soft_tokens(x, side, side)


def letter_loss(known: Tensor, soft: Tensor, letters: Tensor) -> Tensor:
    """Cross-entropy in nats of which of the vectors `known` [letters, hidden] each of the soft
    tokens is nearest to."""
    squares = torch.cdist(soft, known) ** 2
    # A scale at which neighbouring letters are told apart from the start.
    scale = known.var(0).sum() / LETTER_SHARPNESS
    return F.cross_entropy((-squares / scale).flatten(0, 1), letters.flatten())


def _encoded(
    network: Transformer,
    context: Tensor,
    attend: PrefixAttention,
    soft: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The encode phase's hidden states [batch, width, hidden]; soft: see `Transformer.encode`."""
    positions = torch.arange(context.shape[1], device=context.device).expand_as(context)
    return network.encode(context, positions, attend, attend.dtype, soft)


def _denoised(
    network: Transformer,
    canvas: Tensor,
    soft: Tensor | None,
    attend: TwoPhases,
) -> Tensor:
    """The denoise phase's hidden states [batch, length, hidden]."""
    attend.encoding = False
    places = torch.arange(canvas.shape[1], device=canvas.device)
    positions = attend.lengths[:, None] + places
    return network.denoise(canvas, soft, positions, attend, attend.dtype)


def _scores(
    network: Transformer, canvas: Tensor, soft: Tensor | None, attend: PrefixAttention
) -> Tensor:
    """The denoise phase's scores [batch, length, vocab]."""
    return logits(network, _denoised(network, canvas, soft, attend))


def _soft(scores: Tensor, network: Transformer, dtype: torch.dtype) -> Tensor:
    """The soft embedding [..., hidden] of scores [..., vocab]."""
    head = VocabularyHead(network.embed_tokens.weight, network.config.logit_softcap)
    return head.soft_embedding(scores, dtype)


def _next_token_loss(
    network: Transformer, encoded: Tensor, context: Tensor, which: Tensor
) -> Tensor:
    """The mean over those tokens of the context, of which `which` [batch, width - 1] says what
    comes next; 0 if there are none."""
    hidden, wanted = encoded[:, :-1][which], context[:, 1:][which]
    return cross_entropies(network, hidden, wanted).sum() / max(1, len(wanted))


def _stepped(scores: Tensor, batch: CanvasBatch, generator: torch.Generator) -> Tensor:
    """The canvas after a step with these scores [B, C, vocab]: see `sampler.EntropyBound`."""
    noise = torch.randint(0, scores.shape[-1], batch.target.shape, generator=generator)
    chances = scores.softmax(dim=-1)
    drawn = torch.multinomial(chances.flatten(0, 1), 1, generator=generator).view(noise.shape)
    entropy = -(chances * chances.clamp(min=1e-30).log()).sum(-1)
    # What is pinned takes no part of the bound.
    entropy = entropy.masked_fill(~batch.open, 0.0)
    ascending, order = entropy.sort(dim=-1)
    inside = ascending.cumsum(dim=-1) - ascending <= BOUND
    accepted = torch.zeros_like(inside).scatter(-1, order, inside)
    return torch.where(batch.open, torch.where(accepted, drawn, noise), batch.target)


class ReadAttention(TwoPhases):
    """Attention of packed states and questions, then of the questions' canvases.

    Packed tokens are those of all states, then those of all questions.
    """

    def __init__(
        self, network: Transformer, states: Tensor, questions: Tensor, owner: Tensor
    ) -> None:
        """states int64 [G] and questions int64 [N]: how many tokens each has; owner int64 [N]: the
        state of each question."""
        self.owner, self.last = owner, questions - 1
        self.taught: dict[int, tuple[Tensor, dict[Part, Tensor]]] = {}  # queries; keys
        of_states, state_real = _padded_index(states, 0)
        of_questions, question_real = _padded_index(questions, int(states.sum()))
        self.index: dict[Part, Tensor] = {"state": of_states, "question": of_questions}
        self.real: dict[Part, Tensor] = {"state": state_real, "question": question_real}
        first = torch.arange(of_states.shape[1]).expand_as(of_states)
        own = states[owner, None] + torch.arange(of_questions.shape[1])
        self.positions = torch.cat((first[state_real], own[question_real]))
        lengths, window = states[owner] + questions, network.config.sliding_window
        keys = torch.cat((first[owner], own), 1)
        real = torch.cat((state_real[owner], question_real), 1)
        self.masks: dict[tuple[Part, bool], Tensor] = {}
        queries: dict[Part, tuple[Tensor, Tensor, Tensor]] = {
            "state": (first, first, state_real),
            "question": (own, keys, real),
        }
        # No result of a pad as query is used, but a row that sees no key would be NaN.
        for sliding in (False, True):
            for part, (places, at, is_token) in queries.items():
                seen = is_token[:, None] & (at[:, None] <= places[..., None])
                if sliding:
                    seen = seen & (at[:, None] > places[..., None] - window)
                seen[..., 0] |= ~seen.any(-1)
                self.masks[part, sliding] = additive(seen)
        near = keys > lengths[:, None] - window
        masks = {False: additive(real), True: additive(real & near)}
        super().__init__(network, lengths, masks, (len(network.layers) - 1, 0))

    def _encode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sliding: bool) -> Tensor:
        """Attends within the packed tokens; a q of one token a question holds the last ones."""
        keys, values = self._seen(k), self._seen(v)
        self.kept[layer] = keys["question"], values["question"]
        self.taught[layer] = q, keys
        if len(q) < len(k):
            mask = self.masks["question", sliding][torch.arange(len(q)), self.last]
            return ops.attention(q.unsqueeze(2), *self.kept[layer], mask[:, None])[:, :, 0]
        parts = []
        for part, index in self.index.items():
            given = _padded(q, index), keys[part], values[part], self.masks[part, sliding]
            attended = ops.attention(*given).transpose(1, 2).flatten(0, 1)
            parts.append(attended.index_select(0, self.real[part].flatten().nonzero()[:, 0]))
        return torch.cat(parts)

    def _seen(self, packed: Tensor) -> dict[Part, Tensor]:
        """What each state sees, itself, and what each question sees, its state and itself."""
        states, questions = (_padded(packed, index) for index in self.index.values())
        return {"state": states, "question": torch.cat((states[self.owner], questions), 2)}

    def look_loss(self, looks: Tensor, layer: int, head: int, of: Part, at: Part) -> Tensor:
        """Cross-entropy in nats of where a head looks from a place in a question or in a state, at
        a place in its state or in itself. looks int64 [n, 3]: question or state, place in it, place
        to look at."""
        row, place, target = looks.unbind(1)
        if of == at == "question":
            target = target + self.index["state"].shape[1]
        queries, keys = self.taught[layer]
        seen = keys[of][:, head * keys[of].shape[1] // queries.shape[1]]
        mask = self.masks[of, self.config.layers[layer].sliding][row, place]
        return looking_loss(queries[self.index[of][row, place], head], seen[row], mask, target)

    def slot_loss(self, row: Tensor, place: Tensor, fits: Tensor) -> Tensor:
        """Cross-entropy in nats of where the first head of the last layer looks from the slot: at
        the ends of the options' lines, at each as much as it fits. row and place int64 [O]: each
        option's question, and the place in it; fits float32 [O], which sum to 1 for each
        question."""
        assert self.looking is not None
        queries, keys, mask = self.looking
        scores = (keys @ queries[:, 0, :, None])[..., 0] + mask[:, 0]
        log_shares = scores.log_softmax(-1)[row, self.index["state"].shape[1] + place]
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


def slot_scores(network: Transformer, reads: Reads) -> tuple[Tensor, Tensor, Tensor, ReadAttention]:
    """Softcapped scores float32 [N, vocab] of each read's slot, and of the encoder's next token
    after the prompt; what the encoder's last layer reads, [tokens, hidden]; and the attention.
    First pass: no soft embedding."""
    attend = ReadAttention(network, reads.states, reads.questions, reads.owner)
    ends = len(reads.ids) - int(reads.questions.sum()) + reads.questions.cumsum(0) - 1
    last, inside = _encoded_reads(network, reads.ids, attend, ends)
    hidden = _denoised(network, reads.canvas, None, attend)[:, 0]
    return logits(network, hidden), logits(network, last), inside, attend


def read_losses(network: Transformer, reads: Reads, labels: bool = True) -> dict[str, Tensor]:
    """Cross-entropies in nats: "slot" at the slot, and those that help to learn it.

    One answer a question teaches too little about which words decide: with "slot" alone nothing was
    learnt in 350 steps.  So "end" asks the prompt's last position for the same truth as the slot,
    and "options" asks the end of each option's line, one layer before the last, for the option's
    label if it fits, and for FITS_NOT if not (labels False: for FITS if it fits).  The others say
    where heads look: "looks" from the slot at the options; "labels" from an option to its label;
    "words" from a word of a question to the same word in its state, or to the prompt's first token
    if the state lacks the word; "evidence" from options to what decides in the state; "subjects"
    from the line of "yes" or "no" to the word that is asked for; "numbers" from a word of a state
    to its number."""
    slot, last, inside, attend = slot_scores(network, reads)
    row, option, label = reads.looks["labels"].unbind(1)
    packed = attend.index["question"]
    of_options = logits(network, network.norm(inside[packed[row, option]]))
    wanted = torch.zeros_like(of_options)
    wanted[:, FITS_NOT] = 1 - reads.fits
    fitting = reads.ids[packed[row, label]] if labels else FITS
    wanted[torch.arange(len(row)), fitting] = reads.fits
    losses = {
        "slot": F.cross_entropy(slot, reads.truth),
        "end": F.cross_entropy(last, reads.truth),
        "options": F.cross_entropy(of_options, wanted),
        "looks": attend.slot_loss(row, option, reads.fits),
    }
    for name, how in LOOKING_HEADS.items():
        losses[name] = attend.look_loss(reads.looks[name], *how)
    return losses


def _encoded_reads(
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
