"""How well the causal mode predicts a text: windows of it, each token scored once.

The first window scores all of its tokens. Each later one goes on by a stride, and scores what is
new after as much of the text before it as the window holds. Knows ids alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sfumato.diffusion.causal import log_likelihoods
from sfumato.model.network import Network
from sfumato.refused import Refused


@dataclass(frozen=True)
class Perplexity:
    """Figures of one text."""

    tokens: int  # that were scored
    log_likelihood: float  # of all of them together, in nats

    @property
    def nats_per_token(self) -> float:
        return -self.log_likelihood / self.tokens

    @property
    def perplexity(self) -> float:
        """e to the nats per token; infinite where float64 ends."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    def bits_per(self, count: int) -> float:
        """Bits for each of so many parts of the text, as bytes."""
        return -self.log_likelihood / math.log(2) / count


@dataclass(frozen=True)
class Window:
    """A part of a text: tokens start..stop - 1, of which those from `scored` on are scored."""

    start: int
    scored: int
    stop: int


def windows(count: int, room: int, stride: int, first: int) -> Iterator[Window]:
    """Those of a text of `count` tokens. room: tokens of it in a window; first: how many of its
    first tokens have nothing before them, and are not scored."""
    stop = min(room, count)
    yield Window(0, first, stop)
    while stop < count:
        scored, stop = stop, min(stop + stride, count)
        yield Window(max(0, stop - room), scored, stop)


def perplexity(
    network: Network,
    ids: Sequence[int],
    begin: int | None,
    context: int,
    stride: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Of a text's tokens, 1 at least. begin: the token that stands before each window; None: there
    is none, and the first token of the text is not scored. context: tokens of a window, `begin`
    included; stride: from 1 to less than that. progress: called with the scored tokens and all.

    Raises ValueError for other numbers, ids out of range, or a text without a token to score;
    FloatingPointError where the model's scores are no numbers.
    """
    first = 0 if begin is not None else 1
    longest = network.config.context_length
    if not 2 <= context <= longest:
        raise Refused("context", f"must be from 2 to the model's {longest}, got {context}")
    if not 1 <= stride < context:
        raise Refused("stride", f"must be from 1 to {context - 1}, got {stride}")
    if len(ids) <= first:
        raise Refused("text", f"has {len(ids)} tokens, and none of them can be scored")
    opening = [] if begin is None else [begin]
    slot = network.new_slot(context)
    total, scored = 0.0, 0
    for window in windows(len(ids), context - len(opening), stride, first):
        tokens = torch.tensor([*opening, *ids[window.start : window.stop]])
        given = len(opening) + window.scored - window.start - 1  # all that the first score follows
        slot.reset()
        network.encode([tokens[:given]], [slot])
        logs = log_likelihoods(network, slot, tokens[given:])
        total += math.fsum(logs.tolist())
        scored += len(logs)
        progress(scored, len(ids) - first)
    return Perplexity(scored, total)
