"""The plain generate loop: encode, denoise, commit, until the reply ends.

One request at a time, short enough to read at once.  The loop is what the library runs, and the
specification that batched steps are tested against.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.causal import next_scores
from sfumato.diffusion.causal_loop import run_causal
from sfumato.diffusion.constraints.causal_writing import CausalWriting
from sfumato.diffusion.limits import Limits, ReplyPlan, plan_reply
from sfumato.diffusion.outcome import Outcome, SettledCanvas
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.diffusion.sequence import Policies, Sequence, committed_tokens
from sfumato.diffusion.step import Denoiser
from sfumato.model.cache import Slot
from sfumato.model.network import Network


def generate(
    network: Network,
    prompt: Tensor,
    config: SamplerConfig,
    limits: Limits,
    seed: int,
    policies: Policies = Policies(),  # noqa: B008  (frozen)
    opening: list[int] | None = None,
) -> Generator[Draft | SettledCanvas, None, Outcome]:
    """Yields every draft and every settled canvas; returns the outcome.

    prompt int64 [n]; config complete (see `SamplerConfig.over`); seed 0..2⁶⁴-1; policies and
    opening as in `Sequence`.  Raises ValueError, at the call and not at the first draft, for what
    this network cannot do.
    """
    plan = plan_reply(network, len(prompt), config, limits, seed)
    return run(network, prompt, plan, policies, opening)


def run(
    network: Network,
    prompt: Tensor,
    plan: ReplyPlan,
    policies: Policies = Policies(),  # noqa: B008  (frozen)
    opening: list[int] | None = None,
) -> Generator[Draft | SettledCanvas, None, Outcome]:
    """As `generate`, of a reply that has been checked."""
    sequence = Sequence(plan, policies, opening)
    slot = network.new_slot(max(1, len(prompt) + committed_tokens(plan, policies)))
    if plan.config.mode == "causal":
        return run_causal(network, prompt, sequence, slot)
    return _run(network, prompt, sequence, slot)


def _run(
    network: Network, prompt: Tensor, sequence: Sequence, slot: Slot
) -> Generator[Draft | SettledCanvas, None, Outcome]:
    start = time.perf_counter()
    limits, stats = sequence.plan.limits, sequence.stats
    denoiser = Denoiser(network, rows=1)
    going, stats.prefill_s = _encode(network, prompt, slot, limits)
    while going and sequence.reason is None:
        canvas = Canvas.of(sequence.next_canvas(), network)
        ids: list[int] = []
        last: Draft | None = None
        for draft, seconds in _denoise(denoiser, canvas, slot, limits):
            sequence.stepped(draft, seconds, time.perf_counter() - start)
            sequence.guide(canvas, draft)
            ids = sequence.ids_of(draft)  # before the consumer can write into the draft
            last = draft
            yield draft
        if canvas.convergence is None:
            break
        settled, encoded = sequence.add_canvas(ids, canvas.convergence), 0
        if sequence.writing is not None:
            encoded = _write(network, sequence, sequence.writing, slot)
            settled = sequence.add_written() if sequence.writing.done else None
            going = settled is not None
        if settled is None:  # drawn again
            continue
        assert last is not None
        if (draft := sequence.as_settled(last, settled)) is not last:
            yield draft
        yield settled
        if settled.stop_reason is None:  # only a canvas that another follows goes into the cache
            committed = torch.tensor(settled.token_ids[encoded:])
            going, seconds = _encode(network, committed, slot, limits)
            stats.commit_s += seconds
    return sequence.outcome(sequence.reason or "cancelled", time.perf_counter() - start)


def _encode(network: Network, ids: Tensor, slot: Slot, limits: Limits) -> tuple[bool, float]:
    """Appends ids to the prefix; returns whether it was not cancelled, and the seconds it took."""
    began = time.perf_counter()
    finished = network.encode([ids], [slot], cancelled=limits.cancelled)
    network.synchronize()
    return finished, time.perf_counter() - began


def _write(network: Network, sequence: Sequence, writing: CausalWriting, slot: Slot) -> int:
    """Finishes a canvas token by token; returns how many of its tokens are in the cache then. Ends
    early where the reply is cancelled."""
    encoded = 0
    while not writing.done and not sequence.plan.limits.cancelled():
        began = time.perf_counter()
        scores = next_scores(network, slot, torch.tensor(writing.ids[encoded:]))
        encoded = len(writing.ids)
        writing.write(scores, sequence.config.processors, sequence.reply)
        sequence.stats.commit_s += time.perf_counter() - began
    return encoded


def _denoise(
    denoiser: Denoiser, canvas: Canvas, slot: Slot, limits: Limits
) -> Iterator[tuple[Draft, float]]:
    """Steps a canvas until it settles or the reply is cancelled; each draft with its seconds, in
    which what the consumer does with drafts has no part."""
    while not canvas.done and not limits.cancelled():
        began = time.perf_counter()
        (draft,) = denoiser.step([canvas], [slot])
        yield draft, time.perf_counter() - began
