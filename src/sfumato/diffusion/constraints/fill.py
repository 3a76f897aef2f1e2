"""The plain fill: one at a time, short enough to read at once.

It is the library's path, and the specification that the engine's fills are tested against.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import replace

import torch

from sfumato.diffusion.canvas import Draft
from sfumato.diffusion.constraints.fill_plan import FillPlan
from sfumato.diffusion.constraints.fill_progress import FillOutcome, FillProgress
from sfumato.diffusion.constraints.fill_score import likelihoods
from sfumato.diffusion.step import Denoiser
from sfumato.model.network import Network


class Cancelled(Exception):
    """The caller has ended a fill, which has no result."""


def fill(
    network: Network, plan: FillPlan, cancelled: Callable[[], bool] = lambda: False
) -> Generator[Draft, None, FillOutcome]:
    """Yields the drafts of one canvas of each round; returns the outcome. cancelled: called before
    every step, every score and every chunk of the prefix. Raises Cancelled where it says so, and
    FloatingPointError where the model's scores are no numbers."""
    start = time.perf_counter()
    prefix = plan.template.prefix
    slot = network.new_slot(len(prefix))
    progress = FillProgress(plan, network)
    stats = progress.stats
    if not network.encode([torch.tensor(prefix)], [slot], cancelled=cancelled):
        raise Cancelled
    network.synchronize()
    stats.prefill_s = time.perf_counter() - start
    denoiser = Denoiser(network, rows=max(1, len(progress.open)))
    while not progress.done:
        if cancelled():
            raise Cancelled
        if not progress.open:
            progress.scored(likelihoods(network, slot, progress.tasks()))
            continue
        began = time.perf_counter()
        canvases, shown = progress.open, progress.shown
        drafts = denoiser.step(canvases, [slot] * len(canvases))
        stats.denoise_s += time.perf_counter() - began
        stats.first_draft_s = stats.first_draft_s or time.perf_counter() - start
        number = progress.round  # before a settled canvas begins the next one
        for canvas, draft in zip(canvases, drafts, strict=True):
            progress.took(canvas, draft)
            if canvas is shown:
                yield replace(draft, canvas=number, pinned=canvas.pinned >= 0)
    return progress.outcome(time.perf_counter() - start)
