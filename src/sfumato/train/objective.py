"""The training objective of block diffusion.

A clean context goes through the encode phase, a noised canvas through the denoise phase, and the
loss asks for the clean canvas: at every position, or where the canvas is not pinned.  Knows no
optimiser, and of the data only how rows are packed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato import ops
from sfumato.model.transformer import Transformer
from sfumato.train.canvas_rows import KINDS, CanvasBatch

LEAST_NOISE = 0.001
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


class PrefixAttention:
    """Attention over padded batches that keeps gradients: encode first, then denoise.

    Calls of the encode phase leave each layer's keys and values here; those of the denoise phase
    look at them and at the canvas.  Pads lie on the right of the context.
    """

    def __init__(
        self, network: Transformer, lengths: Tensor, width: int, filled: Tensor | None = None
    ) -> None:
        """lengths int64 [batch]: how much of each row's context, padded to `width`, its canvas
        sees; filled bool [batch, length]: which positions of the canvases there are (None: all)."""
        self.config = network.config
        self.lengths, self.width, self.encoding = lengths, width, True
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.looking: tuple[Tensor, Tensor, Tensor] | None = None
        places = torch.arange(width, device=lengths.device)
        causal = (places <= places[:, None]).expand(len(lengths), -1, -1)
        window = self.config.sliding_window
        near = places > places[:, None] - window
        # Pads come after every real token, so causality alone hides them from those.
        # Additive masks: attention would otherwise convert bools once per layer and pass.
        self.encode_masks = {False: additive(causal), True: additive(causal & near)}
        real = places < lengths[:, None]
        last = real & (places > lengths[:, None] - window)
        self.denoise_masks = {False: additive(real), True: additive(last)}
        self.canvas_mask = None if filled is None else additive(filled)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [batch, tokens, heads, d]; k, v [batch, tokens, kv_heads, d] → like q."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        sliding = self.config.layers[layer].sliding
        if self.encoding:
            self.kept[layer] = k, v
            mask = self.encode_masks[sliding]
        else:
            k, v, mask = behind_prefix(
                self.kept[layer], self.denoise_masks[sliding], k, v, self.canvas_mask
            )
        if layer == COPYING_LAYER:
            self.looking = q[:, COPYING_HEAD], k[:, COPYING_HEAD * k.shape[1] // q.shape[1]], mask
        return ops.attention(q, k, v, mask).transpose(1, 2)

    def copy_loss(self, row: Tensor, place: Tensor, source: Tensor) -> Tensor:
        """Cross-entropy in nats of where COPYING_HEAD looked in the last pass, from places of its
        queries, at `source` in the context, where that may be seen; all int64 [n]."""
        assert self.looking is not None
        queries, keys, mask = self.looking
        seen = mask[row, place, source].isfinite()  # a window may end before a far source
        row, place, source = row[seen], place[seen], source[seen]
        return looking_loss(queries[row, place], keys[row], mask[row, place], source)


def behind_prefix(
    kept: tuple[Tensor, Tensor], prefix: Tensor, k: Tensor, v: Tensor, own: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The keys, the values and the mask of canvases that see the kept ones and their own.

    prefix [batch, kept], own [batch, tokens] (None: all seen): additive masks."""
    own = prefix.new_zeros(len(k), k.shape[2]) if own is None else own
    mask = torch.cat((prefix, own), dim=1)[:, None].expand(-1, k.shape[2], -1)
    return torch.cat((kept[0], k), 2), torch.cat((kept[1], v), 2), mask


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
    raw = ops.linear(hidden, network.embed_tokens.weight).float()
    return (raw / cap).tanh() * cap


def noised(target: Tensor, vocab_size: int, generator: torch.Generator | None) -> Tensor:
    """target int64 [batch, length] with each token replaced, with its row's probability
    t ~ U(LEAST_NOISE, 1), by a uniform draw of the vocabulary."""
    t = torch.rand(len(target), 1, generator=generator) * (1 - LEAST_NOISE) + LEAST_NOISE
    hit = torch.rand(target.shape, generator=generator) < t
    return torch.where(hit, torch.randint(0, vocab_size, target.shape, generator=generator), target)


def loss(
    network: Transformer,
    context: Tensor,
    lengths: Tensor,
    target: Tensor,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Cross-entropies in nats: "canvas", and "encoder" of the encoder's next tokens.

    context int64 [batch, width], right-padded: prompt and clean earlier canvases; lengths int64
    [batch]; target int64 [batch, length]: the clean canvas.  With probability one half a first
    pass without gradient gives the soft embedding for the pass that counts.  No 1/t weight.
    """
    attend = PrefixAttention(network, lengths, context.shape[1])
    encoded = _encoded(network, context, attend)
    canvas = noised(target, network.config.vocab_size, generator)
    soft = None
    if torch.rand((), generator=generator) < 0.5:
        with torch.no_grad():
            soft = _soft(_scores(network, canvas, None, attend), network)
    scores = _scores(network, canvas, soft, attend)
    real = torch.arange(1, context.shape[1]) < lengths[:, None]
    return {
        "canvas": F.cross_entropy(scores.flatten(0, 1), target.flatten()),
        "encoder": _next_token_loss(network, encoded, context, real),
    }


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
                soft = _soft(scores, network) * batch.open[:, :, None]
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


def _encoded(network: Transformer, context: Tensor, attend: PrefixAttention) -> Tensor:
    """The encode phase's hidden states [batch, width, hidden]."""
    positions = torch.arange(context.shape[1]).expand_as(context)
    return network.encode(context, positions, attend, network.norm.weight.dtype)


def _scores(
    network: Transformer, canvas: Tensor, soft: Tensor | None, attend: PrefixAttention
) -> Tensor:
    """The denoise phase's scores [batch, length, vocab]."""
    attend.encoding = False
    positions = attend.lengths[:, None] + torch.arange(canvas.shape[1])
    dtype = network.norm.weight.dtype
    return logits(network, network.denoise(canvas, soft, positions, attend, dtype))


def _soft(scores: Tensor, network: Transformer) -> Tensor:
    """The soft embedding [batch, length, hidden] of scores [batch, length, vocab]."""
    weight = network.embed_tokens.weight
    return scores.softmax(dim=-1).to(weight.dtype) @ weight * weight.shape[1] ** 0.5


def _next_token_loss(
    network: Transformer, encoded: Tensor, context: Tensor, which: Tensor
) -> Tensor:
    """The mean over those tokens of the context, of which `which` [batch, width - 1] says what
    comes next; 0 if there are none."""
    hidden, wanted = encoded[:, :-1][which], context[:, 1:][which]
    of_tokens = F.cross_entropy(logits(network, hidden), wanted, reduction="sum")
    return of_tokens / max(1, len(wanted))


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
