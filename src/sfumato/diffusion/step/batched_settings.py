"""Rules of one kind with different settings: one rule whose settings are tensors, one for each row.

Only for rules that are known to take them so.  Any other rule may branch on a setting, or read
`max_steps`, so that it shares a call only with its equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from sfumato.diffusion.sampler import EntropyBound, FixedCount, Threshold
from sfumato.diffusion.stopping import Never, StableAndConfident

Rule = TypeVar("Rule")

SETTINGS: dict[type, tuple[str, ...]] = {
    EntropyBound: ("bound",),
    FixedCount: ("count",),
    Threshold: ("top", "margin"),
    StableAndConfident: ("stability", "confidence"),
    Never: (),
}
"""The settings of rules that take each of them as a tensor [] too, and do not read `max_steps`."""


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
    columns = ([getattr(rule, name) for rule in rules] for name in SETTINGS[type(first)])
    return [_tensor(values).to(device) for values in columns]


def with_settings(rule: Rule, values: Sequence[Tensor]) -> Rule:
    """The rule with these settings, unchecked; the rule itself where there are none."""
    if not values:
        return rule
    changed = object.__new__(type(rule))
    for name, value in zip(SETTINGS[type(rule)], values, strict=True):
        object.__setattr__(changed, name, value)
    return changed


def _tensor(values: Sequence[float]) -> Tensor:
    """Floats as float32, as torch takes a number beside float32 statistics."""
    integral = all(isinstance(value, int) for value in values)
    return torch.tensor(values, dtype=torch.int64 if integral else torch.float32)
