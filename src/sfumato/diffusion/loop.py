"""The plain generate loop: encode, denoise, commit, until the reply ends.

One request at a time, to be read aloud.  It is the library's path, and the specification that
batched steps are tested against.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Convergence, Draft
from sfumato.diffusion.config import SamplerConfig
from sfumato.diffusion.guards import repetition
from sfumato.diffusion.limits import (
    Limits,
    StopReason,
    check_context,
    check_seed,
    resolve,
    truncate_canvas,
)
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.step import denoise_step
from sfumato.model.cache import Slot
from sfumato.model.network import Network


@dataclass
class Stats:
    """What a reply took. Times in seconds; set-up (loading) is not in them."""

    prompt_tokens: int
    output_tokens: int = 0
    canvases: int = 0
    steps: list[int] = field(default_factory=list)  # denoising forwards of each canvas
    convergence: list[Convergence] = field(default_factory=list)
    prefill_s: float = 0.0
    denoise_s: float = 0.0
    commit_s: float = 0.0
    first_draft_s: float | None = None
    total_s: float = 0.0  # from first to last event, with what the consumer did in between

    @property
    def tokens_per_forward(self) -> float:
        """Visible tokens over denoising forwards."""
        return self.output_tokens / max(1, sum(self.steps))


@dataclass(frozen=True)
class SettledCanvas:
    """A canvas that has finished: what it adds to the reply."""

    canvas: int
    token_ids: list[int]  # without an end token and all after it
    convergence: Convergence
    stop_reason: StopReason | None  # None: another canvas follows


@dataclass(frozen=True)
class Outcome:
    """How a reply ended, as ids."""

    token_ids: list[int]
    stop_reason: StopReason
    stats: Stats
    warnings: tuple[str, ...]


def generate(
    network: Network, prompt: Tensor, config: SamplerConfig, limits: Limits, seed: int
) -> Generator[Draft | SettledCanvas, None, Outcome]:
    """Yields every draft and every settled canvas; returns the outcome.

    prompt int64 [n]; config complete (see `SamplerConfig.over`); seed 0..2⁶⁴-1.  Raises
    ValueError, at the call and not at the first draft, for what this network cannot do.
    """
    check_seed(seed)
    config = resolve(network, config, limits)
    canvases = check_context(network, len(prompt), config, limits)
    assert config.canvas_length
    # The last canvas is never committed.
    slot = network.new_slot(max(1, len(prompt) + (canvases - 1) * config.canvas_length))
    return _run(network, prompt, config, limits, seed, slot)


def _run(
    network: Network, prompt: Tensor, config: SamplerConfig, limits: Limits, seed: int, slot: Slot
) -> Generator[Draft | SettledCanvas, None, Outcome]:
    start = time.perf_counter()
    stats = Stats(prompt_tokens=len(prompt))
    reply: list[int] = []
    warnings: list[str] = []
    reason: StopReason | None = None
    vocab, device = network.config.vocab_size, network.device

    going, stats.prefill_s = _encode(network, prompt, slot, limits)
    while going and reason is None:
        canvas = Canvas(config, Noise(seed, stats.canvases), vocab, device, reply)
        for draft, seconds in _denoise(network, canvas, slot, limits):
            stats.steps[stats.canvases :] = [draft.step]
            stats.denoise_s += seconds
            if stats.first_draft_s is None:
                stats.first_draft_s = time.perf_counter() - start
            yield draft
        if canvas.convergence is None:
            break
        added, reason = truncate_canvas(canvas.argmax.tolist(), reply, config, limits)
        if warning := repetition(added, reason):
            warnings.append(f"canvas {stats.canvases}: {warning}")
        reply += added
        if reason == "stop":  # a stop string may begin in an earlier canvas
            reply = reply[: limits.cut(reply, [])]
        stats.canvases += 1
        stats.convergence.append(canvas.convergence)
        yield SettledCanvas(canvas.noise.canvas, added, canvas.convergence, reason)
        if reason is None:  # only a canvas that another follows goes into the cache
            going, seconds = _encode(network, canvas.argmax, slot, limits)
            stats.commit_s += seconds
    stats.output_tokens = len(reply)
    stats.total_s = time.perf_counter() - start
    return Outcome(reply, reason or "cancelled", stats, tuple(warnings))


def _encode(network: Network, ids: Tensor, slot: Slot, limits: Limits) -> tuple[bool, float]:
    """Appends ids to the prefix; returns whether it was not cancelled, and the seconds it took."""
    began = time.perf_counter()
    whole = network.encode([ids], [slot], cancelled=limits.cancelled)
    network.synchronize()
    return whole, time.perf_counter() - began


def _denoise(
    network: Network, canvas: Canvas, slot: Slot, limits: Limits
) -> Iterator[tuple[Draft, float]]:
    """Steps a canvas until it settles or the reply is cancelled; each draft with its seconds, in
    which what the consumer does with drafts has no part."""
    while not canvas.done and not limits.cancelled():
        began = time.perf_counter()
        (draft,) = denoise_step(network, [canvas], [slot])
        yield draft, time.perf_counter() - began
