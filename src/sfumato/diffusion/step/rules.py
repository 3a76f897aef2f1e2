"""Samplers and stopping rules of one row, applied to all rows of a batch.

Rows with equal rules are a group, and so are rows with built-in rules of one kind whose settings
differ; `torch.vmap` lifts the rules over the rows of a group.  A rule that cannot be lifted,
because it reads a tensor's value, is called row by row.  What a rule raises is the fault of its row
alone; where memory runs out, the step as a whole has failed and may be tried again with fewer rows.
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
from sfumato.diffusion.step.batched_settings import alike, stacked, takes_tensors, with_settings
from sfumato.diffusion.step.lifting import LiftProbe, tensors_of, view_of
from sfumato.diffusion.stopping import Stopping
from sfumato.model.head import HeadStats
from sfumato.model.out_of_memory import is_out_of_memory


@dataclass(frozen=True)
class RowRules:
    """What decides in one row."""

    sampler: Sampler
    stopping: Stopping
    max_steps: int

    @classmethod
    def of(cls, canvas: Canvas) -> RowRules:
        config = canvas.config
        assert config.sampler and config.stopping and config.max_steps
        return cls(config.sampler, config.stopping, config.max_steps)

    def alike(self, other: RowRules) -> bool:
        """Whether one call of the rules serves both."""
        same_steps = self.max_steps == other.max_steps or (
            takes_tensors(self.sampler) and takes_tensors(self.stopping)
        )
        return (
            same_steps
            and alike(self.sampler, other.sampler)
            and alike(self.stopping, other.stopping)
        )


@dataclass(frozen=True)
class RuleGroup:
    """Rows of one batch that one call of the rules serves, if the rules can be lifted."""

    rows: tuple[int, ...]
    index: Tensor | None  # int64: the rows, on the device; None: all rows of the batch
    rules: tuple[RowRules, ...]  # of each row
    settings: tuple[list[Tensor], list[Tensor]]  # of samplers and stopping rules: see `stacked`
    length: int
    lifted: bool  # whether `torch.vmap` lifts both rules

    @classmethod
    def of(
        cls, canvases: Sequence[Canvas], batch: StepBatch, probe: LiftProbe
    ) -> tuple[RuleGroup, ...]:
        """The groups of the canvases, which stand in the first rows of the batch in this order."""
        rules = [RowRules.of(canvas) for canvas in canvases]
        groups: list[list[int]] = []
        for row, canvas in enumerate(canvases):
            for rows in groups:
                first = rows[0]
                if canvases[first].length == canvas.length and rules[first].alike(rules[row]):
                    rows.append(row)
                    break
            else:
                groups.append([row])
        device = batch.tokens.device
        return tuple(
            cls(
                tuple(rows),
                None if len(rows) == len(canvases) else torch.tensor(rows).to(device),
                tuple(rules[row] for row in rows),
                (
                    stacked([rules[row].sampler for row in rows], device),
                    stacked([rules[row].stopping for row in rows], device),
                ),
                canvases[rows[0]].length,
                probe.lifts(canvases[rows[0]], batch),
            )
            for rows in groups
        )


@dataclass(frozen=True)
class Decision:
    """What the rules decided, R rows of width W."""

    accepted: Tensor  # bool [R, W]: positions that keep the drawn token
    stop: Tensor  # bool [R]: the stopping rule ends the canvas
    errors: dict[int, Exception]  # by row: what its rules raised


def apply_rules(
    groups: Sequence[RuleGroup], view: StepView, extra: Mapping[int, HeadStats]
) -> Decision:
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
            rules = group.rules[group.rows.index(row)]
            try:
                one = _row(view, row, group.length, rules.max_steps, extra.get(row))
                accepted[row, : group.length], stop[row] = _apply(rules, one)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                errors[row] = error
    return Decision(accepted, stop, errors)


def _apply(rules: RowRules, view: StepView) -> tuple[Tensor, Tensor]:
    """What the rules say of one row, checked."""
    sampler, stopping = rules.sampler, rules.stopping
    accepted = sampler.accept(view)
    check_returned(accepted, "sampler", sampler, "accept", torch.bool, view.pinned.shape)
    done = stopping.done(view)
    check_returned(done, "stopping rule", stopping, "done", torch.bool, ())
    return accepted, done


def _row(
    view: StepView, row: int, length: int, max_steps: int, stats: HeadStats | None
) -> StepView:
    """The view of one row; stats: its own, where they hold more than the batch's."""
    values = [tensor[row] for tensor in tensors_of(view, length)]
    one = view_of(values, max_steps)
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
    try:
        return lift(group.rules[0], group.settings, tensors)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None


def lift(
    rules: RowRules, settings: tuple[list[Tensor], list[Tensor]], tensors: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """accepted bool [rows, length] and stop bool [rows] by one call: of rules with these settings,
    each [rows], in the order of `stacked`; tensors: see `tensors_of`."""

    def of_one(
        values: list[Tensor], own: tuple[list[Tensor], list[Tensor]]
    ) -> tuple[Tensor, Tensor]:
        one = RowRules(
            with_settings(rules.sampler, own[0]),
            with_settings(rules.stopping, own[1]),
            rules.max_steps,
        )
        return _apply(one, view_of(values, rules.max_steps))

    accepted, stop = torch.vmap(of_one)(tensors, settings)
    return accepted, stop
