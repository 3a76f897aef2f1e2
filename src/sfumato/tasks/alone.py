"""The plain driver: one task, one slot, one work after another.

It is the library's path, and the oracle of the engine, which runs many tasks in batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.causal import draw_next
from sfumato.diffusion.constraints.read import run_chunks
from sfumato.diffusion.limits import Limits, Outcome, SettledCanvas, Times, plan_reply
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.diffusion.step import Denoiser
from sfumato.model.adapters import NONE
from sfumato.model.network import PREFILL_CHUNK, Network, prefill_chunk
from sfumato.model.vision.mask import SoftTokens, ahead_of_pictures
from sfumato.tasks.reply import Policies, ReplyTask
from sfumato.tasks.score_progress import ScoreProgress
from sfumato.tasks.works import Denoise, Draw, Encode, Prompt, Score, Task, Work


def alone(
    network: Network,
    task: Task,
    cancelled: Callable[[], bool] = lambda: False,
    adapter: int = NONE,
) -> Generator[Any, None, Any]:
    """Yields the events of a task; returns its outcome.

    adapter: the number of the one that serves it; cancelled: called before every step, every score
    and every chunk of an encode; where it returns True, the outcome is that of `Task.stopped`.
    Raises what a work raises, ValueError at the call where the device has no memory for the
    slot."""
    return _Alone(network, task, cancelled, adapter).run()


def finish(run: Generator[Any, None, Any]) -> Any:
    """The outcome of a task, whose events are left aside."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value


class _Cancelled(Exception):
    """The caller has ended the task."""


class _Alone:
    def __init__(
        self, network: Network, task: Task, cancelled: Callable[[], bool], adapter: int
    ) -> None:
        self._network, self._task, self._cancelled = network, task, cancelled
        self._slot = network.new_slot(max(1, task.claim.positions))
        self._slot.offset, self._slot.adapter = task.claim.blocks.offset, adapter
        self._prefix: list[int] = []
        self._denoiser: Denoiser | None = None  # made when it is needed
        self._times = task.stats or Times()

    def run(self) -> Generator[Any, None, Any]:
        start = time.perf_counter()
        run, result = self._task.run(), None
        while True:
            try:
                yielded = run.send(result)
                if not isinstance(yielded, Work):
                    if isinstance(yielded, Draft) and self._times.first_draft_s is None:
                        self._times.first_draft_s = time.perf_counter() - start
                    yield yielded
                    result = None
                    continue
                result = self._answer(yielded)
            except StopIteration as end:
                outcome = end.value
                break
            except _Cancelled:
                outcome = self._task.stopped()
                break
        self._times.total_s = time.perf_counter() - start
        return outcome

    def _answer(self, work: Work) -> Any:
        began, times = time.perf_counter(), self._times
        if isinstance(work, Encode):
            is_prompt = not self._prefix
            try:
                result = self._encode(work)
                self._network.synchronize()
                return result
            finally:  # a part of it was done where it was cancelled
                seconds = time.perf_counter() - began
                if is_prompt:
                    times.prefill_s += seconds
                else:
                    times.commit_s += seconds
        self._check()
        result = self._steps(work)
        times.denoise_s += time.perf_counter() - began
        return result

    def _steps(self, work: Draw | Denoise | Score) -> Any:
        if isinstance(work, Score):
            return self._score(work)
        if isinstance(work, Draw):
            (draft,) = draw_next(self._network, [work.canvas], work.state)
            if isinstance(draft, Exception):
                raise draft
            return draft
        if self._denoiser is None:
            self._denoiser = Denoiser(self._network, len(work.canvases))
        return self._denoiser.step(work.canvases, [self._slot] * len(work.canvases))

    def _encode(self, work: Encode) -> Any:
        ids, want = torch.tensor(work.ids, dtype=torch.int64), work.want
        self._prefix += work.ids
        network, slot, pictures = self._network, self._slot, self._soft_tokens(work)
        unseen = len(ids)
        if want is not None:
            known = max(0, slot.length + len(ids) - want.least)
            unseen = max(0, self._task.claim.blocks.border(known) - slot.length)
        # What is wanted may begin within a picture, which no cut divides.
        cut = (each.start for each in pictures if each.start < unseen < each.end)
        unseen = min(cut, default=unseen)
        before = [each for each in pictures if each.start < unseen]
        if not network.encode([ids[:unseen]], [slot], cancelled=self._cancelled, pictures=[before]):
            raise _Cancelled
        if want is None:
            return None
        want.begin(len(self._prefix))
        start = unseen
        while start < len(ids):
            end = start + slot.whole_blocks(prefill_chunk(network.device), len(ids) - start)
            end = ahead_of_pictures(end, start, pictures)
            own = [each.moved(-start) for each in pictures if start <= each.start < end]
            first = slot.length
            (hidden,) = network.encode_hidden([ids[start:end]], [slot], [own])
            want.add(network.head, first, hidden, network.config.canvas_length)
            start = end
        return want.result()

    def _soft_tokens(self, work: Encode) -> list[SoftTokens]:
        placed = []
        for picture in work.pictures:
            self._check()
            pixels = torch.from_numpy(picture.patches.values())
            soft = self._network.soft_tokens(pixels, picture.patches.columns)
            placed.append(SoftTokens(picture.start, soft))
        return placed

    def _score(self, work: Score) -> Any:
        progress = ScoreProgress(work)
        while not progress.done:
            run_chunks(self._network, progress.chunks(self._slot, PREFILL_CHUNK))
            progress.score_lines(self._network, self._slot, self._prefix)
            progress.collect()
            if not progress.done:
                self._check()
        return progress.results

    def _check(self) -> None:
        if self._cancelled():
            raise _Cancelled


def generate(
    network: Network,
    prompt: Tensor,
    config: SamplerConfig,
    limits: Limits,
    seed: int,
    policies: Policies = Policies(),  # noqa: B008  (frozen)
    opening: list[int] | None = None,
) -> Generator[Draft | SettledCanvas, None, Outcome]:
    """A reply as ids: yields every draft and every settled canvas; returns the outcome.

    prompt int64 [n]; config complete (see `SamplerConfig.over`); seed 0..2⁶⁴-1; policies and
    opening as in `ReplyTask`.  Raises ValueError, at the call and not at the first draft, for what
    this network cannot do.
    """
    plan = plan_reply(network, len(prompt), config, limits, seed)
    make = partial(Canvas.of, network=network)
    task = ReplyTask(plan, Prompt(prompt.tolist(), ()), make, policies, opening or ())
    return alone(network, task, limits.cancelled)
