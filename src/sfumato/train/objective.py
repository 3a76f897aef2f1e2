"""The training objective of block diffusion.

A clean context goes through the encode phase, a noised canvas through the denoise phase, and the
loss asks for the clean canvas at every position.  Knows no data and no optimiser.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato import ops
from sfumato.model.transformer import Transformer

LEAST_NOISE = 0.001
ENCODER_WEIGHT = 0.1
"""Of the encoder's next-token loss, against 1 for the canvas. The embedded model's prompts are
mostly random digits, which cannot be predicted; a full weight would spend the network on them."""
COPYING_LAYER, COPYING_HEAD = 3, 1
"""The head that training may ask to look at what a text repeats; others serve reads."""


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
            old_k, old_v = self.kept[layer]
            prefix = self.denoise_masks[sliding]
            own = self.canvas_mask
            own = prefix.new_zeros(len(k), k.shape[2]) if own is None else own
            mask = torch.cat((prefix, own), dim=1)
            mask = mask[:, None].expand(-1, k.shape[2], -1)
            k, v = torch.cat((old_k, k), 2), torch.cat((old_v, v), 2)
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
        if not len(row):
            return queries.new_zeros(())
        scores = (keys[row] @ queries[row, place, :, None])[..., 0] + mask[row, place]
        return F.cross_entropy(scores, source)


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
) -> tuple[Tensor, Tensor]:
    """Cross-entropies in nats of the canvas and of the encoder's next tokens.

    context int64 [batch, width], right-padded: prompt and clean earlier canvases; lengths int64
    [batch]; target int64 [batch, length]: the clean canvas.  With probability one half a first
    pass without gradient gives the soft embedding for the pass that counts.  No 1/t weight.
    """
    attend = PrefixAttention(network, lengths, context.shape[1])
    positions = torch.arange(context.shape[1]).expand_as(context)
    dtype = network.norm.weight.dtype
    encoded = network.encode(context, positions, attend, dtype)
    attend.encoding = False

    canvas = noised(target, network.config.vocab_size, generator)
    positions = lengths[:, None] + torch.arange(target.shape[1])
    denoise: Callable[[Tensor | None], Tensor] = lambda soft: network.denoise(  # noqa: E731
        canvas, soft, positions, attend, dtype
    )
    soft = None
    if torch.rand((), generator=generator) < 0.5:
        with torch.no_grad():
            weight = network.embed_tokens.weight
            believed = logits(network, denoise(None)).softmax(dim=-1)
            soft = believed.to(weight.dtype) @ weight * weight.shape[1] ** 0.5
    scores = logits(network, denoise(soft))
    canvas_loss = F.cross_entropy(scores.flatten(0, 1), target.flatten())
    return canvas_loss, _next_token_loss(network, encoded, context, lengths)


def _next_token_loss(
    network: Transformer, encoded: Tensor, context: Tensor, lengths: Tensor
) -> Tensor:
    real = torch.arange(1, context.shape[1]) < lengths[:, None]
    return F.cross_entropy(logits(network, encoded[:, :-1][real]), context[:, 1:][real])
