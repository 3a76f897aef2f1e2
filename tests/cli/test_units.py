from __future__ import annotations

import pytest

from sfumato.cli.terminal import size, table


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_999, "1 MB"), (16.8e9, "16.8 GB")],
)
def test_size(count: float, text: str) -> None:
    assert size(count) == text


def test_table() -> None:
    assert table([("a", "bb"), ("ccc", "d")]) == ["  a    bb", "  ccc  d"]
    assert table([]) == []
