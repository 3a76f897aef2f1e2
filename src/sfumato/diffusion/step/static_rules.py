"""Samplers and stopping rules of the rows of a captured step: kinds fixed, settings in tensors.

A kind is a built-in sampler with a built-in stopping rule, whatever their settings; the two
built-in stopping rules are one.  A third party's rule belongs to the kind as it is, and with it the
number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sfumato.diffusion.sampler import EntropyBound, StepView
from sfumato.diffusion.step.batched_settings import SETTINGS
from sfumato.diffusion.step.lifting import tensors_of
from sfumato.diffusion.step.rules import Decision, RowRules, lift
from sfumato.diffusion.stopping import Never, StableAndConfident
from sfumato.model.to_device import to_device
from sfumato.ops.rows import Settings

WHOLE = {"count", "stability"}
"""Settings that are whole numbers; the others are float32."""

NEVER = {"stability": 0, "confidence": float("-inf")}
"""The settings with which `StableAndConfident` is `Never`: no mean entropy is less."""

KERNEL_KIND = EntropyBound, StableAndConfident
"""The one kind of which `settings` tells."""


class StaticRules:
    """The rules of R rows of width W, at fixed addresses."""

    def __init__(self, kinds: Sequence[RowRules], rows: int, device: torch.device) -> None:
        """kinds: rules of which no two are alike."""
        self.kinds = tuple(kinds)
        self._columns = [_columns(kind) for kind in self.kinds]
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
    def settings(self) -> Settings | None:
        """Those of all rows where `EntropyBound` decides in each with a built-in stopping rule."""
        if [(type(kind.sampler), type(kind.stopping)) for kind in self.kinds] != [KERNEL_KIND]:
            return None
        return Settings(self._floats[0], self._integers[1], self._floats[1])

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

    def decide(self, view: StepView) -> Decision:
        """What the rules say. Every kind is applied to all rows, and each row has its own's."""
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
        return Decision(accepted, stop, {})


def _general(rules: RowRules) -> RowRules:
    """The rules with a stopping rule of which `Never` is a case, in place of `Never`."""
    if type(rules.stopping) is not Never:
        return rules
    return replace(rules, stopping=StableAndConfident())


def _setting(rule: object, name: str) -> Any:
    return NEVER[name] if type(rule) is Never else getattr(rule, name)


def _columns(kind: RowRules) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the settings that are tensors, of sampler and stopping rule; a third party's
    rule has none."""
    return SETTINGS.get(type(kind.sampler), ()), SETTINGS.get(type(kind.stopping), ())
