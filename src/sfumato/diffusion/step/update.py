"""What a step makes of the rows of a batch, and its writing in place.

Pure tensor functions of the batch's state and of the statistics of a forward: nothing here reads a
value on the host, copies to the device, or has a shape that depends on data.  Rules that cannot be
lifted are an exception (see `rules.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sfumato.diffusion.sampler import StepView
from sfumato.diffusion.step.batch import StepBatch
from sfumato.diffusion.step.layout import Part
from sfumato.diffusion.step.rules import Decision, apply_rules
from sfumato.model.head import HeadStats
from sfumato.model.head_stats import PLAIN


@dataclass(frozen=True)
class Update:
    """What a step makes of a batch, before anything is written."""

    tokens: Tensor  # int64 [R, W]
    soft: Tensor  # [R, W, hidden]
    history: Tensor  # int64 [R, H, W]
    unchanged: Tensor  # int64 [R]
    frozen: Tensor  # bool [R]: rows that were done before the step, and stay as they are
    keeps_soft: Tensor  # bool [R, W, 1]: positions whose soft embedding stays as it is
    expected: Tensor  # int32 [R, W]: as in the batch
    step: Tensor  # int64 [R]: after the step, as the next two
    converged: Tensor  # bool [R]
    done: Tensor  # bool [R]
    entropy: Tensor  # float32 [R, W], pinned positions without
    accepted: Tensor  # bool [R, W]
    top_ids: Tensor  # int64 [R, W, top]
    top_probs: Tensor  # float32 [R, W, top]
    errors: dict[int, Exception]  # by row: what its rules raised


def compute_update(
    part: Part, stats: HeadStats, fresh: Tensor, extra: Mapping[int, HeadStats]
) -> Update:
    """What the rules make of a part's packed statistics; extra: see `apply_rules`."""
    return decided_update(part, stats, fresh, lambda view: apply_rules(part.groups, view, extra))


def decided_update(
    part: Part, stats: HeadStats, fresh: Tensor, decide: Callable[[StepView], Decision]
) -> Update:
    """What `decide` makes of a part's packed statistics. The view that `decide` gets is of all
    rows, each tensor with a leading axis [R]; its max_steps does not count."""
    batch, suffices = part.batch, stats.top_suffices
    stats = HeadStats(*(part.unpack(getattr(stats, name)) for name in PLAIN))
    pinned = batch.pinned >= 0
    drawn = torch.where(batch.cold[:, None], stats.argmax, stats.drawn)
    stats = replace(
        stats,
        argmax=torch.where(pinned, batch.pinned, stats.argmax),
        drawn=torch.where(pinned, batch.pinned, drawn),
        entropy=stats.entropy.masked_fill(pinned, 0.0),
    )
    # Of -1 before the first step, which equals no token.
    same = (stats.argmax == batch.history[:, -1]).all(dim=1)
    # Copies of what is about to be overwritten: a rule may keep its view.
    view = StepView(
        batch.step + 1,
        0,
        batch.tokens.clone(),
        stats,
        batch.history.clone(),
        pinned,
        torch.where(same, batch.unchanged + 1, 0),
    )
    decision = decide(view)
    accepted = decision.accepted | pinned
    frozen = batch.done.clone()
    step = batch.step + ~frozen
    converged = batch.converged | (decision.stop & ~frozen)
    bare = pinned & (batch.bare_pins > 0)[:, None]
    keeps_soft = (frozen | ~batch.self_conditioning)[:, None] | bare
    return Update(
        tokens=torch.where(accepted, stats.drawn, fresh),
        soft=stats.soft,
        history=torch.cat((view.history[:, 1:], stats.argmax[:, None]), dim=1),
        unchanged=view.unchanged,
        frozen=frozen,
        keeps_soft=keeps_soft[:, :, None],
        expected=batch.expected if suffices is None else part.unpack(suffices.int()),
        step=step,
        converged=converged,
        done=frozen | converged | (step >= batch.max_steps),
        entropy=stats.entropy,
        accepted=accepted,
        top_ids=stats.top_ids,
        top_probs=stats.top_probs,
        errors=decision.errors,
    )


def apply_update(batch: StepBatch, new: Update) -> None:
    """Takes a step's change into the rows that are not done. Allocates nothing: once it has begun,
    want of memory cannot end it halfway."""
    frozen = new.frozen[:, None]
    torch.where(frozen, batch.tokens, new.tokens, out=batch.tokens)
    torch.where(new.keeps_soft, batch.soft, new.soft, out=batch.soft)
    torch.where(frozen[:, None], batch.history, new.history, out=batch.history)
    torch.where(new.frozen, batch.unchanged, new.unchanged, out=batch.unchanged)
    if new.expected is not batch.expected:
        torch.where(frozen, batch.expected, new.expected, out=batch.expected)
    batch.step.copy_(new.step)
    batch.converged.copy_(new.converged)
    batch.done.copy_(new.done)
