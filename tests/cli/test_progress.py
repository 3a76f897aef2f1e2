from __future__ import annotations

import io
import sys

import pytest
from tests.cli.conftest import Terminal

from sfumato.cli.terminal import progress, rows_progress


def test_a_line_a_minute_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())
    now = [0.0]
    with rows_progress(1000, 100, lambda: now[0]) as show:
        for now[0], done in ((30.0, 10), (60.0, 60), (90.0, 90), (120.0, 120)):
            show(done)
    assert err.getvalue().splitlines() == [
        "deciding rows: 160 of 1,000, 1 rows/s, 14 min left",
        "deciding rows: 220 of 1,000, 1 rows/s, 13 min left",
    ]


def test_lines_of_bytes_and_of_what_is_too_small_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    for total, lines in ((2_000_000, ["loading: 1.5 MB of 2 MB"]), (1_000, [])):
        monkeypatch.setattr(sys, "stderr", err := io.StringIO())
        now = [0.0]
        with progress(
            "loading", in_bytes=True, least=1e6, every_s=10.0, clock=lambda now=now: now[0]
        ) as show:
            for now[0], share in ((9.0, 0.5), (10.0, 0.75), (11.0, 0.8)):
                show(int(share * total), total)
        assert err.getvalue().splitlines() == lines


def test_a_bar_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", err := Terminal())
    with rows_progress(3, 1) as show:
        show(2)
    assert "deciding" in err.getvalue() and "3/3" in err.getvalue()
    assert "rows/s" in err.getvalue()
