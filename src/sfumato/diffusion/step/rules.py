"""Samplers and stopping rules of one row, applied to all rows of a batch.

Rows with equal rules are a group, and `torch.vmap` lifts the rules over its rows.  A rule that
cannot be lifted, because it reads a tensor's value, is called row by row.  What a rule raises is
the fault of its row alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.checks import check_returned
from sfumato.diffusion.sampler import Sampler, StepView
from sfumato.diffusion.stopping import Stopping
from sfumato.model.head import HeadStats

log = logging.getLogger(__name__)

_not_lifted: set[type] = set()
"""Types of rules that `torch.vmap` does not lift; each has been logged once."""


@dataclass(frozen=True)
class RuleGroup:
    """Rows of one batch that one call of the rules serves."""

    rows: tuple[int, ...]
    index: Tensor | None  # int64: the rows, on the device; None: all rows of the batch
    sampler: Sampler
    stopping: Stopping
    max_steps: int
    length: int

    @classmethod
    def of(cls, canvases: Sequence[Canvas], device: torch.device) -> tuple[RuleGroup, ...]:
        """The groups of the canvases, which stand in the first rows of a batch in this order."""
        groups: list[tuple[Canvas, list[int]]] = []
        for row, canvas in enumerate(canvases):
            rows = next((rows for one, rows in groups if _alike(one, canvas)), None)
            if rows is None:
                groups.append((canvas, [row]))
            else:
                rows.append(row)
        return tuple(cls._of(canvas, rows, len(canvases), device) for canvas, rows in groups)

    @classmethod
    def _of(cls, canvas: Canvas, rows: list[int], count: int, device: torch.device) -> RuleGroup:
        config = canvas.config
        assert config.sampler and config.stopping and config.max_steps
        index = None if len(rows) == count else torch.tensor(rows).to(device)
        rules = config.sampler, config.stopping
        return cls(tuple(rows), index, *rules, config.max_steps, canvas.length)


def _alike(one: Canvas, other: Canvas) -> bool:
    """Whether one call of the rules serves both. Rules of equal settings are one rule; a rule
    without an equality of its own equals itself alone."""
    a, b = one.config, other.config
    return (one.length, a.max_steps) == (other.length, b.max_steps) and (
        _same(a.sampler, b.sampler) and _same(a.stopping, b.stopping)
    )


def _same(one: object, other: object) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # the equality of a third party's rule
        return False


@dataclass(frozen=True)
class Decision:
    """What the rules decided, R rows of width W."""

    accepted: Tensor  # bool [R, W]: positions that keep the drawn token
    stop: Tensor  # bool [R]: the stopping rule ends the canvas
    errors: dict[int, Exception]  # by row: what its rules raised


def decide(groups: Sequence[RuleGroup], view: StepView, extra: Mapping[int, HeadStats]) -> Decision:
    """Applies the rules.

    view: of all rows, each tensor with a leading axis [R]; its max_steps does not count. extra: of
    rows whose statistics hold more than the batch's (scores, more than TOP tokens), their own.
    """
    rows, width = view.pinned.shape
    if len(groups) == 1 and rows > 1 and not extra and groups[0].length == width:
        lifted = _lifted(groups[0], view)
        if lifted is not None:
            return Decision(*lifted, {})
    accepted = torch.zeros_like(view.pinned)
    stop = torch.zeros_like(view.pinned[:, 0])
    errors: dict[int, Exception] = {}
    for group in groups:
        several = len(group.rows) > 1 and not any(row in extra for row in group.rows)
        lifted = _lifted(group, view) if several else None
        if lifted is not None:
            if group.index is None:
                accepted[:, : group.length], stop[:] = lifted
            else:
                accepted[:, : group.length].index_copy_(0, group.index, lifted[0])
                stop.index_copy_(0, group.index, lifted[1])
            continue
        for row in group.rows:
            try:
                one = _row(view, row, group, extra.get(row))
                accepted[row, : group.length], stop[row] = _apply(group, one)
            except Exception as error:
                errors[row] = error
    return Decision(accepted, stop, errors)


def _apply(group: RuleGroup, view: StepView) -> tuple[Tensor, Tensor]:
    """What the rules say of one row, checked."""
    accepted = group.sampler.accept(view)
    check_returned(accepted, "sampler", group.sampler, "accept", torch.bool, view.pinned.shape)
    done = group.stopping.done(view)
    check_returned(done, "stopping rule", group.stopping, "done", torch.bool, ())
    return accepted, done


def _row(view: StepView, row: int, group: RuleGroup, stats: HeadStats | None) -> StepView:
    """The view of one row; stats: its own, where they hold more than the batch's."""
    values = [tensor[row] for tensor in _tensors(view, group.length)]
    one = _view(values, group.max_steps)
    if stats is None:
        return one
    merged = replace(
        stats, argmax=one.stats.argmax, drawn=one.stats.drawn, entropy=one.stats.entropy
    )
    return replace(one, stats=merged)


def _lifted(group: RuleGroup, view: StepView) -> tuple[Tensor, Tensor] | None:
    """accepted bool [rows, length] and stop bool [rows] of a group by one call; None where the
    rules cannot be lifted, or raise."""
    if type(group.sampler) in _not_lifted or type(group.stopping) in _not_lifted:
        return None
    tensors = _tensors(view, group.length)
    if group.index is not None:
        tensors = [tensor.index_select(0, group.index) for tensor in tensors]

    def rules(*values: Tensor) -> tuple[Tensor, Tensor]:
        return _apply(group, _view(values, group.max_steps))

    try:
        accepted, stop = torch.vmap(rules)(*tensors)
    except Exception as error:
        _log_once(group, view, error)
        return None
    return accepted, stop


def _log_once(group: RuleGroup, view: StepView, error: Exception) -> None:
    """Logs which rule cannot be lifted; one that raises for a row alone as well is at fault, and
    is not remembered."""
    one = _row(view, group.rows[0], group, None)
    try:
        _apply(group, one)
    except Exception:
        return
    for rule, call in (
        (group.sampler, group.sampler.accept),
        (group.stopping, group.stopping.done),
    ):
        if not _lifts(call, view, group):
            _not_lifted.add(type(rule))
            log.warning(
                "%s cannot run on several rows at once and runs row by row: %s",
                type(rule).__name__,
                str(error).splitlines()[0] if str(error) else type(error).__name__,
            )


def _lifts(call: object, view: StepView, group: RuleGroup) -> bool:
    try:
        torch.vmap(lambda *values: call(_view(values, group.max_steps)))(  # type: ignore[operator]
            *(tensor[list(group.rows)] for tensor in _tensors(view, group.length))
        )
    except Exception:
        return False
    return True


def _tensors(view: StepView, length: int) -> list[Tensor]:
    """The tensors of a view of rows, cut to the canvas's length, in the order of `_view`."""
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


def _view(values: Sequence[Tensor], max_steps: int) -> StepView:
    step, unchanged, history, tokens, argmax, drawn, entropy, top_ids, top_probs, soft, pinned = (
        values
    )
    stats = HeadStats(argmax, drawn, entropy, top_ids, top_probs, soft)
    return StepView(step, max_steps, tokens, stats, history, pinned, unchanged)
