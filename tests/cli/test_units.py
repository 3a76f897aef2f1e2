from __future__ import annotations

import io

import pytest
from tests.cli.conftest import Terminal

from sfumato.cli.terminal import print_lines, size, table


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_999, "1 MB"), (16.8e9, "16.8 GB")],
)
def test_size(count: float, text: str) -> None:
    assert size(count) == text


def test_table() -> None:
    assert table([("a", "bb"), ("ccc", "d")]) == ["  a    bb", "  ccc  d"]
    assert table([]) == []


def test_long_lines_of_a_report_are_broken_between_words_at_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    lines = ["short", "  weights   6 MB\n  one of /a/path/that/is/long and more"]
    terminal, file = Terminal(), io.StringIO()
    print_lines(lines, terminal)
    print_lines(lines, file)
    wanted = "short\n  weights   6 MB\n  one of\n      /a/path/that/is/long\n      and more\n"
    assert terminal.getvalue() == wanted
    assert file.getvalue() == "\n".join([*lines, ""])
