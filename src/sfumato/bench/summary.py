"""Order statistics of measured values. Knows nothing of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sfumato.refused import Refused


def percentile(values: Sequence[float], share: float) -> float:
    """The value under which `share` (0 to 1) of the values lie.

    Linear interpolation between the two closest ranks (Hyndman and Fan's type 7, NumPy's
    default): rank share · (n - 1) of the sorted values, counted from 0. One value is its own
    percentile. Raises ValueError for no values and for a share out of range.
    """
    if not values:
        raise Refused("values", "no percentile of nothing")
    if not 0 <= share <= 1:
        raise Refused("share", f"must be from 0 to 1, got {share}")
    ordered = sorted(values)
    below, part = divmod(share * (len(ordered) - 1), 1)
    low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
    return low + part * (high - low)


@dataclass(frozen=True)
class Summary:
    """What a reader needs of some values: how many, the extremes, the middle and the tail."""

    count: int
    min: float
    p50: float
    p95: float
    max: float


def summarize(values: Sequence[float]) -> Summary | None:
    """The summary of some values, or None where there are none."""
    if not values:
        return None
    return Summary(
        len(values), min(values), percentile(values, 0.5), percentile(values, 0.95), max(values)
    )
