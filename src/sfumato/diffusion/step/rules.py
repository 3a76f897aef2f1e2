"""Samplers and stopping rules of one row, applied to all rows of a batch.

Rows with equal rules are a group, and so are rows with built-in rules of one kind whose settings
differ: these become one rule whose settings are tensors, one for each row.  `torch.vmap` lifts the
rules over the rows of a group.  A rule is tried once, on two rows without content on the host,
before it meets a step: what happens in a step then says nothing of the rule.  A rule that cannot be
lifted, because it reads a tensor's value, is called row by row.  What a rule raises is the fault of
its row alone; where memory runs out, the step as a whole has failed and may be tried again with
fewer rows.

In a captured step the kinds of rules are fixed, and their settings stand in tensors.  A kind is a
built-in sampler with a built-in stopping rule, whatever their settings; the two built-in stopping
rules are one.  A third party's rule belongs to the kind as it is, and with it the number of steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.checks import check_returned
from sfumato.diffusion.sampler import (
    EntropyBound,
    FixedCount,
    LowConfidence,
    Never,
    Sampler,
    Sequential,
    StableAndConfident,
    StepView,
    Stopping,
    Threshold,
)
from sfumato.diffusion.step.batch import StepBatch
from sfumato.model.devices import is_out_of_memory, to_device
from sfumato.model.head import HeadStats
from sfumato.ops.online_softmax import TOP

log = logging.getLogger(__name__)

Rule = TypeVar("Rule")

SETTINGS: dict[type, tuple[str, ...]] = {
    EntropyBound: ("bound",),
    FixedCount: ("count",),
    Threshold: ("top", "margin"),
    LowConfidence: ("threshold",),
    Sequential: (),
    StableAndConfident: ("stability", "confidence"),
    Never: (),
}
"""The settings of rules that take each of them as a tensor [] too, and do not read `max_steps`."""

WHOLE = {"count", "stability"}
"""Settings that are whole numbers; the others are float32, as torch takes a number beside float32
statistics."""


def same(one: object, other: object) -> bool:
    """Whether two rules are one: rules of equal settings are, and a rule without an equality of its
    own equals itself alone."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # the equality of a third party's rule
        return False


def takes_tensors(rule: object) -> bool:
    return type(rule) in SETTINGS


def alike(one: object, other: object) -> bool:
    """Whether one call serves both rules, `max_steps` aside."""
    return same(one, other) or (type(one) is type(other) and takes_tensors(one))


def stacked(rules: Sequence[object], device: torch.device) -> list[Tensor]:
    """Each setting of rules that are alike, [rows]; none where the rules are one and the same."""
    first = rules[0]
    if all(same(first, rule) for rule in rules):
        return []
    columns = {name: [getattr(rule, name) for rule in rules] for name in SETTINGS[type(first)]}
    dtypes = {name: torch.int64 if name in WHOLE else torch.float32 for name in columns}
    return [torch.tensor(column, dtype=dtypes[name]).to(device) for name, column in columns.items()]


def with_settings(rule: Rule, values: Sequence[Tensor]) -> Rule:
    """The rule with these settings, unchecked; the rule itself where there are none."""
    if not values:
        return rule
    changed = object.__new__(type(rule))
    for name, value in zip(SETTINGS[type(rule)], values, strict=True):
        object.__setattr__(changed, name, value)
    return changed


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
        torch.zeros(2, canvas.length),
    )
    pinned = rows.pinned < 0
    view = StepView(
        rows.step + 1, 0, rows.tokens, stats, rows.history, pinned, rows.unchanged, rows.step
    )
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
        stats.drawn_probs,
        view.pinned,
    )
    cut = by_position if view.pinned.shape[1] == length else [t[:, :length] for t in by_position]
    return [view.step, view.unchanged, view.least, view.history[..., :length], *cut]


def view_of(values: Sequence[Tensor], max_steps: int) -> StepView:
    """The view whose tensors these are."""
    step, unchanged, least, history, tokens, *of_head, pinned = values
    stats = HeadStats(*of_head)
    return StepView(step, max_steps, tokens, stats, history, pinned, unchanged, least)


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


Decision = tuple[Tensor, Tensor, dict[int, Exception]]
"""What the rules decided of R rows of width W: bool [R, W], the positions that keep the drawn
token; bool [R], whether the stopping rule ends the canvas; and by row what its rules raised."""


@dataclass(frozen=True)
class GroupedRules:
    """Rules of rows whatever they are; those of rows with statistics of their own are called row by
    row."""

    groups: tuple[RuleGroup, ...]

    def decide(self, view: StepView, extra: Mapping[int, HeadStats]) -> Decision:
        """Applies the rules. Raises where memory runs out.

        view: of all rows, each tensor with a leading axis [R]; its max_steps does not count.
        extra: of rows whose statistics hold more than the batch's (scores, more than TOP tokens),
        their own."""
        rows, width = view.pinned.shape
        if len(self.groups) == 1 and rows > 1 and not extra and self.groups[0].length == width:
            results = _lifted(self.groups[0], view)
            if results is not None:
                return *results, {}
        accepted = torch.zeros_like(view.pinned)
        stop = torch.zeros_like(view.pinned[:, 0])
        errors: dict[int, Exception] = {}
        for group in self.groups:
            single: Sequence[int] = [row for row in group.rows if row in extra]
            # All rows of the group are lifted: the shapes do not depend on which are single.
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
        return accepted, stop, errors


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
    merged = replace(stats, **{name: getattr(one.stats, name) for name in _OWN})
    return replace(one, stats=merged)


_OWN = "argmax", "drawn", "entropy", "drawn_probs"
"""Statistics that pins and a temperature of 0 change."""


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


NEVER = {"stability": 0, "confidence": float("-inf")}
"""The settings with which `StableAndConfident` is `Never`: no mean entropy is less."""

KERNEL_KIND = EntropyBound, StableAndConfident
"""The one kind of which `settings` tells."""


class StaticRules:
    """The rules of R rows of width W, at fixed addresses."""

    def __init__(self, kinds: Sequence[RowRules], rows: int, device: torch.device) -> None:
        """kinds: rules of which no two are alike."""
        self.kinds = tuple(kinds)
        # The names of the settings that are tensors, of sampler and stopping rule; a third party's
        # rule has none.
        of_rules = ((type(kind.sampler), type(kind.stopping)) for kind in self.kinds)
        self._columns = [(SETTINGS.get(a, ()), SETTINGS.get(b, ())) for a, b in of_rules]
        names = [name for columns in self._columns for names in columns for name in names]
        # The row's kind comes first.
        self._integers = torch.zeros(
            1 + sum(name in WHOLE for name in names), rows, dtype=torch.int64, device=device
        )
        self._floats = torch.zeros(sum(name not in WHOLE for name in names), rows, device=device)

    @classmethod
    def kinds_of(cls, rules: Sequence[RowRules]) -> list[RowRules]:
        """The first rules of each kind."""
        kinds: list[RowRules] = []
        for each in map(_general, rules):
            if not any(each.alike(kind) for kind in kinds):
                kinds.append(each)
        return kinds

    @property
    def settings(self) -> dict[str, Tensor] | None:
        """The settings of all rows, by name, where `EntropyBound` decides in each with a built-in
        stopping rule: bound float32 [R], stability int64 [R] and confidence float32 [R], -inf where
        no canvas ends before its last step."""
        if [(type(kind.sampler), type(kind.stopping)) for kind in self.kinds] != [KERNEL_KIND]:
            return None
        stability, floats = self._integers[1], self._floats
        return {"bound": floats[0], "stability": stability, "confidence": floats[1]}

    def serves(self, kinds: Sequence[RowRules]) -> bool:
        """Whether these are its kinds, in any order."""
        return len(kinds) == len(self.kinds) and all(
            any(kind.alike(own) for own in self.kinds) for kind in kinds
        )

    def write(self, rules: Sequence[RowRules | None]) -> None:
        """Takes over the rules of the rows; None for a row whose rules do not count."""
        numbers = [self._kind(each) for each in rules]
        integers, floats = [numbers], []  # type: tuple[list[list[int]], list[list[float]]]
        for index, (kind, columns) in enumerate(zip(self.kinds, self._columns, strict=True)):
            # Rows of other kinds take this kind's own settings: results of theirs do not count.
            own = [
                each if each is not None and number == index else kind
                for each, number in zip(rules, numbers, strict=True)
            ]
            for part, names in zip(("sampler", "stopping"), columns, strict=True):
                for name in names:
                    values = [_setting(getattr(each, part), name) for each in own]
                    (integers if name in WHOLE else floats).append(values)
        device = self._integers.device
        self._integers.copy_(to_device(torch.tensor(integers, dtype=torch.int64), device))
        if floats:
            self._floats.copy_(to_device(torch.tensor(floats, dtype=torch.float32), device))

    def _kind(self, rules: RowRules | None) -> int:
        if rules is None:
            return 0
        general = _general(rules)
        return next(index for index, kind in enumerate(self.kinds) if general.alike(kind))

    def decide(
        self, view: StepView, extra: Mapping[int, HeadStats] = MappingProxyType({})
    ) -> Decision:
        """What the rules say. Every kind is applied to all rows, and each row has its own's.
        extra: nothing, as no row of a captured step has statistics of its own."""
        assert not extra
        tensors = tensors_of(view, view.pinned.shape[1])
        (row_kind, *integers), floats = self._integers.unbind(), list(self._floats.unbind())
        accepted = torch.zeros_like(view.pinned)
        stop = torch.zeros_like(view.pinned[:, 0])
        for index, (kind, columns) in enumerate(zip(self.kinds, self._columns, strict=True)):
            settings: list[list[Tensor]] = [
                [(integers if name in WHOLE else floats).pop(0) for name in names]
                for names in columns
            ]
            own_accepted, own_stop = lift(kind, (settings[0], settings[1]), tensors)
            mine = row_kind == index
            accepted = torch.where(mine[:, None], own_accepted, accepted)
            stop = torch.where(mine, own_stop, stop)
        return accepted, stop, {}


def _general(rules: RowRules) -> RowRules:
    """The rules with a stopping rule of which `Never` is a case, in place of `Never`."""
    if type(rules.stopping) is not Never:
        return rules
    return replace(rules, stopping=StableAndConfident())


def _setting(rule: object, name: str) -> Any:
    return NEVER[name] if type(rule) is Never else getattr(rule, name)
