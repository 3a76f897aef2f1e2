"""Which samplers and stopping rules `torch.vmap` applies to several rows by one call.

A rule is tried once, on two rows without content on the host, before it meets a step: what happens
in a step then says nothing of the rule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.sampler import Sampler, StepView
from sfumato.diffusion.step.batch import StepBatch
from sfumato.diffusion.step.batched_settings import alike
from sfumato.diffusion.stopping import Stopping
from sfumato.model.head import HeadStats
from sfumato.model.out_of_memory import is_out_of_memory
from sfumato.ops.online_softmax import TOP

log = logging.getLogger(__name__)

KEPT = 64
"""Results of a `LiftProbe`: requests may bring rules without end."""


class LiftProbe:
    """Tries rules, and keeps the results of the last KEPT ones; one result serves rules that are
    `alike`."""

    def __init__(self) -> None:
        self._results: list[tuple[object, bool]] = []

    def lifts(self, canvas: Canvas, batch: StepBatch) -> bool:
        """Whether both rules of a canvas can be lifted. Logs each that cannot, once."""
        sampler, stopping, max_steps = (
            canvas.config.sampler,
            canvas.config.stopping,
            canvas.config.max_steps,
        )
        assert sampler and stopping and max_steps

        def of(rule: Sampler | Stopping, call: Callable[[StepView], Tensor]) -> bool:
            # What needs logits is given its rows one by one in any case.
            if getattr(rule, "needs_logits", False):
                return False
            for known, result in self._results:
                if alike(known, rule):
                    return result
            result = _lifts(rule, lambda *values: call(view_of(values, max_steps)), canvas, batch)
            self._results = [*self._results[1 - KEPT :], (rule, result)]
            return result

        # A list: both are tried, so that both are logged.
        return all([of(sampler, sampler.accept), of(stopping, stopping.done)])


def _lifts(rule: object, call: Callable[..., Tensor], canvas: Canvas, batch: StepBatch) -> bool:
    try:
        with torch.device("cpu"), torch.no_grad():
            torch.vmap(call)(*_empty_rows(canvas, batch))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        log.warning(
            "%s cannot run on several rows at once and runs row by row: %s",
            type(rule).__name__,
            str(error).splitlines()[0] if str(error) else type(error).__name__,
        )
        return False
    return True


def _empty_rows(canvas: Canvas, batch: StepBatch) -> list[Tensor]:
    """Two rows on the host, in the shapes and dtypes of a step."""
    rows = StepBatch.allocate(
        2,
        canvas.length,
        batch.history.shape[1],
        batch.soft.shape[2],
        batch.soft.dtype,
        torch.device("cpu"),
    )
    top_ids = rows.tokens.new_zeros(2, canvas.length, min(TOP, canvas.vocab_size))
    stats = HeadStats(
        rows.tokens,
        rows.tokens,
        torch.zeros(2, canvas.length),
        top_ids,
        torch.zeros(top_ids.shape),
        rows.soft,
    )
    pinned = rows.pinned < 0
    view = StepView(rows.step + 1, 0, rows.tokens, stats, rows.history, pinned, rows.unchanged)
    return tensors_of(view, canvas.length)


def tensors_of(view: StepView, length: int) -> list[Tensor]:
    """The tensors of a view of rows, cut to the canvas's length, in the order of `view_of`."""
    stats = view.stats
    by_position = (
        view.tokens,
        stats.argmax,
        stats.drawn,
        stats.entropy,
        stats.top_ids,
        stats.top_probs,
        stats.soft,
        view.pinned,
    )
    cut = by_position if view.pinned.shape[1] == length else [t[:, :length] for t in by_position]
    return [view.step, view.unchanged, view.history[..., :length], *cut]


def view_of(values: Sequence[Tensor], max_steps: int) -> StepView:
    """The view whose tensors these are."""
    step, unchanged, history, tokens, argmax, drawn, entropy, top_ids, top_probs, soft, pinned = (
        values
    )
    stats = HeadStats(argmax, drawn, entropy, top_ids, top_probs, soft)
    return StepView(step, max_steps, tokens, stats, history, pinned, unchanged)
