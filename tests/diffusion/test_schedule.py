"""What changes from step to step: temperatures, and how many tokens count."""

from __future__ import annotations

from typing import Any

import pytest

from sfumato.diffusion.sampler import LinearTemperature, SoftTopK
from sfumato.options.limits import MOST_COUNTED


def test_the_temperature_falls_in_a_line() -> None:
    heats = [LinearTemperature(0.4, 0.8).temperature(step, 4) for step in (1, 2, 3, 4)]
    assert heats == pytest.approx([0.8, 0.7, 0.6, 0.5])


def test_a_fixed_count() -> None:
    assert [SoftTopK(64).k(step, 3) for step in (1, 2, 3)] == [64] * 3


def test_an_annealed_count_changes_by_a_factor() -> None:
    assert [SoftTopK(256, 16).k(step, 5) for step in range(1, 6)] == [256, 128, 64, 32, 16]
    assert [SoftTopK(1, 8).k(step, 4) for step in range(1, 5)] == [1, 2, 4, 8]
    assert SoftTopK(256, 32).k(1, 1) == 256


@pytest.mark.parametrize(
    ("first", "last"), [(256, 32), (1, MOST_COUNTED), (MOST_COUNTED, 1), (7, 7), (3, 2)]
)
@pytest.mark.parametrize("steps", [1, 2, 48, 1000])
def test_counts_stay_between_their_ends(first: int, last: int, steps: int) -> None:
    counts = [SoftTopK(first, last).k(step, steps) for step in range(1, steps + 1)]
    assert counts == sorted(counts, reverse=last < first)
    assert counts[0] == first and (steps == 1 or counts[-1] == last)
    assert all(type(count) is int for count in counts)


@pytest.mark.parametrize("wrong", [0, -1, MOST_COUNTED + 1, 2.0, "8", True, float("nan")])
def test_counts_must_be_counts(wrong: Any) -> None:
    for values in ((wrong,), (wrong, 8), (8, wrong)):
        with pytest.raises(ValueError, match=r"soft_top_k: must be whole numbers from 1 to 2048"):
            SoftTopK(*values)
    with pytest.raises(ValueError, match=r"soft_top_k: must be whole numbers .*, got None"):
        SoftTopK(None)  # type: ignore[arg-type]
