"""Samplers and stopping rules of one row, applied to all rows of a batch.

Rows with equal rules are a group, and `torch.vmap` lifts the rules over its rows.  A rule that
cannot be lifted, because it reads a tensor's value, is called row by row.  What a rule raises is
the fault of its row alone; where memory runs out, the step as a whole has failed and may be tried
again with fewer rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.checks import check_returned
from sfumato.diffusion.sampler import Sampler, StepView
from sfumato.diffusion.step.batch import StepBatch
from sfumato.diffusion.step.lifting import LiftProbe, same, tensors_of, view_of
from sfumato.diffusion.stopping import Stopping
from sfumato.model.head import HeadStats
from sfumato.model.out_of_memory import is_out_of_memory


@dataclass(frozen=True)
class RuleGroup:
    """Rows of one batch that one call of the rules serves, if the rules can be lifted."""

    rows: tuple[int, ...]
    index: Tensor | None  # int64: the rows, on the device; None: all rows of the batch
    sampler: Sampler
    stopping: Stopping
    max_steps: int
    length: int
    lifted: bool  # whether `torch.vmap` lifts both rules

    @classmethod
    def of(
        cls, canvases: Sequence[Canvas], batch: StepBatch, probe: LiftProbe
    ) -> tuple[RuleGroup, ...]:
        """The groups of the canvases, which stand in the first rows of the batch in this order."""
        groups: list[tuple[Canvas, list[int]]] = []
        for row, canvas in enumerate(canvases):
            rows = next((rows for one, rows in groups if _alike(one, canvas)), None)
            if rows is None:
                groups.append((canvas, [row]))
            else:
                rows.append(row)
        return tuple(
            cls._of(
                canvas,
                rows,
                None if len(rows) == len(canvases) else torch.tensor(rows).to(batch.tokens.device),
                probe.lifts(canvas, batch),
            )
            for canvas, rows in groups
        )

    @classmethod
    def alone(cls, canvas: Canvas) -> RuleGroup:
        """The group of a canvas that has a batch for itself, and nothing to be lifted over."""
        return cls._of(canvas, [0], None, lifted=False)

    @classmethod
    def _of(cls, canvas: Canvas, rows: list[int], index: Tensor | None, lifted: bool) -> RuleGroup:
        config = canvas.config
        assert config.sampler and config.stopping and config.max_steps
        rules = config.sampler, config.stopping
        return cls(tuple(rows), index, *rules, config.max_steps, canvas.length, lifted)


def _alike(one: Canvas, other: Canvas) -> bool:
    """Whether one call of the rules serves both."""
    a, b = one.config, other.config
    return (one.length, a.max_steps) == (other.length, b.max_steps) and (
        same(a.sampler, b.sampler) and same(a.stopping, b.stopping)
    )


@dataclass(frozen=True)
class Decision:
    """What the rules decided, R rows of width W."""

    accepted: Tensor  # bool [R, W]: positions that keep the drawn token
    stop: Tensor  # bool [R]: the stopping rule ends the canvas
    errors: dict[int, Exception]  # by row: what its rules raised


def decide(groups: Sequence[RuleGroup], view: StepView, extra: Mapping[int, HeadStats]) -> Decision:
    """Applies the rules. Raises where memory runs out.

    view: of all rows, each tensor with a leading axis [R]; its max_steps does not count. extra: of
    rows whose statistics hold more than the batch's (scores, more than TOP tokens), their own; the
    rules of these rows are called row by row.
    """
    rows, width = view.pinned.shape
    if len(groups) == 1 and rows > 1 and not extra and groups[0].length == width:
        results = _lifted(groups[0], view)
        if results is not None:
            return Decision(*results, {})
    accepted = torch.zeros_like(view.pinned)
    stop = torch.zeros_like(view.pinned[:, 0])
    errors: dict[int, Exception] = {}
    for group in groups:
        single: Sequence[int] = [row for row in group.rows if row in extra]
        # All rows of the group are lifted, so that the shapes do not depend on which are single.
        results = _lifted(group, view) if len(group.rows) - len(single) > 1 else None
        if results is None:
            single = group.rows
        elif group.index is None:
            accepted[:, : group.length], stop[:] = results
        else:
            accepted[:, : group.length].index_copy_(0, group.index, results[0])
            stop.index_copy_(0, group.index, results[1])
        for row in single:
            try:
                one = _row(view, row, group, extra.get(row))
                accepted[row, : group.length], stop[row] = _apply(group, one)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
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
    values = [tensor[row] for tensor in tensors_of(view, group.length)]
    one = view_of(values, group.max_steps)
    if stats is None:
        return one
    merged = replace(
        stats, argmax=one.stats.argmax, drawn=one.stats.drawn, entropy=one.stats.entropy
    )
    return replace(one, stats=merged)


def _lifted(group: RuleGroup, view: StepView) -> tuple[Tensor, Tensor] | None:
    """accepted bool [rows, length] and stop bool [rows] of a group by one call; None where the
    rules cannot be lifted, or raise: then each row is to show whether it is at fault."""
    if not group.lifted:
        return None
    tensors = tensors_of(view, group.length)
    if group.index is not None:
        tensors = [tensor.index_select(0, group.index) for tensor in tensors]

    def rules(*values: Tensor) -> tuple[Tensor, Tensor]:
        return _apply(group, view_of(values, group.max_steps))

    try:
        accepted, stop = torch.vmap(rules)(*tensors)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None
    return accepted, stop
