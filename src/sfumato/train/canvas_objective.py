"""The training objective of the third stage: canvases of which some is pinned, or begun as another
text, and the encoder's next tokens of their texts.

Knows no data and no optimiser.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.model.transformer import Transformer
from sfumato.train.canvas_rows import KINDS, CanvasBatch
from sfumato.train.objective import LEAST_NOISE, PrefixAttention, logits

TEMPERATURE, BOUND = 0.8, 0.1
"""The product's at its first step: of the tokens drawn, and of the positions accepted."""
MOST_STEPS = 4
"""Of the product's, that come before the one that is trained."""


def canvas_losses(
    network: Transformer, batch: CanvasBatch, generator: torch.Generator
) -> dict[str, Tensor]:
    """Cross-entropies in nats: "canvas", the mean over rows of the mean over each row's open
    positions; the same of each kind of row in the batch; "reply" and "prompt", of the encoder's
    next tokens; "copies_of_reply" and "copies_of_canvas", of where one head looks in either phase:
    at the letter of the prompt that the text repeats.

    Half of the batches have a first pass without gradient, as in `objective.loss`; its soft
    embedding is zero at pinned positions.  In half of these, the canvas of the trained pass is what
    one to MOST_STEPS of the product's steps make of the first one: after each the positions of
    least entropy keep the token drawn, the others are noise again.
    """
    attend = PrefixAttention(network, batch.lengths, batch.context.shape[1], batch.filled)
    places = torch.arange(batch.context.shape[1]).expand_as(batch.context)
    dtype = network.norm.weight.dtype
    encoded = network.encode(batch.context, places, attend, dtype)
    row, at, source = batch.copies.unbind(1)
    losses = {"copies_of_reply": attend.copy_loss(row, at - 1, source)}
    attend.encoding = False

    t = torch.rand(len(batch.target), 1, generator=generator) * (1 - LEAST_NOISE) + LEAST_NOISE
    hit = torch.rand(batch.target.shape, generator=generator) < t
    canvas = torch.where(hit & batch.open, _noise(batch, network, generator), batch.start)
    canvas = torch.where(batch.open, canvas, batch.target)
    positions = batch.lengths[:, None] + torch.arange(batch.target.shape[1])
    soft, way = None, float(torch.rand((), generator=generator))
    if way < 0.5:
        steps = 1 + int(way * 4 * MOST_STEPS) if way < 0.25 else 0
        with torch.no_grad():
            for _ in range(max(1, steps)):
                scores = logits(network, network.denoise(canvas, soft, positions, attend, dtype))
                if steps:
                    scores /= TEMPERATURE
                    noise = _noise(batch, network, generator)
                    canvas = _stepped(scores, batch, noise, generator)
                soft = _soft(scores, network) * batch.open[:, :, None]
    scores = logits(network, network.denoise(canvas, soft, positions, attend, dtype))
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
        hidden, wanted = encoded[:, :-1][which], batch.context[:, 1:][which]
        of_token = F.cross_entropy(logits(network, hidden), wanted, reduction="sum")
        losses[name] = of_token / max(1, len(wanted))
    return losses


def _soft(scores: Tensor, network: Transformer) -> Tensor:
    """The soft embedding [B, C, hidden] of scores [B, C, vocab]."""
    weight = network.embed_tokens.weight
    return scores.softmax(dim=-1) @ weight * weight.shape[1] ** 0.5


def _noise(batch: CanvasBatch, network: Transformer, generator: torch.Generator) -> Tensor:
    return torch.randint(0, network.config.vocab_size, batch.target.shape, generator=generator)


def _stepped(
    scores: Tensor, batch: CanvasBatch, noise: Tensor, generator: torch.Generator
) -> Tensor:
    """The canvas after a step with these scores [B, C, vocab]: see `sampler.EntropyBound`."""
    chances = scores.softmax(dim=-1)
    drawn = torch.multinomial(chances.flatten(0, 1), 1, generator=generator).view(noise.shape)
    entropy = -(chances * chances.clamp(min=1e-30).log()).sum(-1)
    # What is pinned takes no part of the bound.
    entropy = entropy.masked_fill(~batch.open, 0.0)
    ascending, order = entropy.sort(dim=-1)
    inside = ascending.cumsum(dim=-1) - ascending <= BOUND
    accepted = torch.zeros_like(inside).scatter(-1, order, inside)
    return torch.where(batch.open, torch.where(accepted, drawn, noise), batch.target)
