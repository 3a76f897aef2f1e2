from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfumato.bench.summary import Summary, percentile, summarize

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    expected = np.quantile(np.array(values), share)
    assert percentile(values, share) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([7.0], 0.95, 7.0), ([1.0, 2.0], 0.5, 1.5), ([3.0, 1.0, 2.0], 0.5, 2.0), ([0, 10], 0.95, 9.5)],
)
def test_percentiles_by_hand(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.1), ([1.0], -0.1)])
def test_what_has_no_percentile(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match=r"values|share"):
        percentile(values, share)


def test_summaries() -> None:
    assert summarize([]) is None
    assert summarize([4.0]) == Summary(1, 4.0, 4.0, 4.0, 4.0)
    assert summarize([4.0, 1.0, 2.0, 3.0, 5.0]) == Summary(5, 1.0, 3.0, pytest.approx(4.8), 5.0)
