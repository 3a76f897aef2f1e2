from __future__ import annotations

import io
import sys

import pytest
from tests.cli.conftest import Terminal

from sfumato.cli.terminal import rows_progress


def test_a_line_a_minute_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())
    times = iter([0.0, 30.0, 60.0, 90.0, 120.0])
    with rows_progress(1000, 100, lambda: next(times)) as show:
        for done in (10, 60, 90, 120):
            show(done)
    assert err.getvalue().splitlines() == [
        "160 of 1,000 rows, 1 rows/s, 14 min left",
        "220 of 1,000 rows, 1 rows/s, 13 min left",
    ]


def test_a_bar_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", err := Terminal())
    with rows_progress(3, 1) as show:
        show(2)
    assert "deciding" in err.getvalue() and "3/3" in err.getvalue()
    assert "rows/s" in err.getvalue()
