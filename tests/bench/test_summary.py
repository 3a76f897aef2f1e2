from __future__ import annotations

import pytest

from sfumato.bench.report import summarize


@pytest.mark.parametrize(
    ("values", "summary"),
    [
        ([4.0], (1, 4.0, 4.0, 4.0, 4.0)),
        ([0.0, 10.0], (2, 0.0, 5.0, 9.5, 10.0)),
        ([4.0, 1.0, 2.0, 3.0, 5.0], (5, 1.0, 3.0, 4.8, 5.0)),
    ],
)
def test_summaries(values: list[float], summary: tuple[float, ...]) -> None:
    names = ("count", "min", "p50", "p95", "max")
    assert summarize(values) == pytest.approx(dict(zip(names, summary, strict=True)))


def test_nothing_has_no_summary() -> None:
    assert summarize([]) is None
