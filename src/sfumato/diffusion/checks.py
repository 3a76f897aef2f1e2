"""What the settings of samplers, schedules and stopping rules are checked with."""

from __future__ import annotations


def is_number(value: object) -> bool:
    """Whether `value` is an int or a float; a bool or NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def is_whole(value: object) -> bool:
    """Whether `value` is an int; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)
