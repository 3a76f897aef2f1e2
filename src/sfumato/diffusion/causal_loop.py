"""The plain loop of the causal mode: encode, draw one token, until the reply ends.

One request at a time. It is what the library runs, and the specification that the engine's causal
rows are tested against.
"""

from __future__ import annotations

import time
from collections.abc import Generator

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.causal_step import draw_next
from sfumato.diffusion.outcome import Outcome, SettledCanvas
from sfumato.diffusion.sequence import Sequence
from sfumato.model.cache import Slot
from sfumato.model.network import Network


def run_causal(
    network: Network, prompt: Tensor, sequence: Sequence, slot: Slot
) -> Generator[Draft | SettledCanvas, None, Outcome]:
    """Yields the draft of every token and every token that is added; returns the outcome. prompt
    int64 [n from 1]; slot: empty, with room for prompt and reply."""
    start = time.perf_counter()
    limits, stats = sequence.plan.limits, sequence.stats
    going = network.encode([prompt[:-1]], [slot], cancelled=limits.cancelled)
    hidden = None  # [1, hidden] of the last token of the prefix
    following = prompt[-1:]  # what the slot does not hold yet
    stats.prefill_s = time.perf_counter() - start
    while going and sequence.reason is None and not limits.cancelled():
        began = time.perf_counter()
        if hidden is None:
            (encoded,) = network.encode_hidden([following], [slot])
            hidden = encoded[-1:]
        canvas = Canvas.of(sequence.next_canvas(), network)
        (draft,) = draw_next(network, [canvas], hidden)
        if isinstance(draft, Exception):
            raise draft
        now = time.perf_counter()
        sequence.stepped(draft, now - began, now - start)
        ids = sequence.ids_of(draft)  # before the consumer can write into the draft
        yield draft
        assert canvas.convergence
        settled = sequence.add_canvas(ids, canvas.convergence)
        if settled is None:  # an empty answer, which is drawn again
            continue
        yield settled
        following, hidden = torch.tensor(settled.token_ids), None
    return sequence.outcome(sequence.reason or "cancelled", time.perf_counter() - start)
