from __future__ import annotations

import pytest

from sfumato.bench.report import Summary, summarize


def test_summaries() -> None:
    assert summarize([]) is None
    assert summarize([4.0]) == Summary(1, 4.0, 4.0, 4.0, 4.0)
    assert summarize([0.0, 10.0]) == Summary(2, 0.0, 5.0, pytest.approx(9.5), 10.0)
    assert summarize([4.0, 1.0, 2.0, 3.0, 5.0]) == Summary(5, 1.0, 3.0, pytest.approx(4.8), 5.0)
