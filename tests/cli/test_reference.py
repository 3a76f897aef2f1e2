from __future__ import annotations

from pathlib import Path

from sfumato.cli import reference
from sfumato.options import OPTIONS

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference.page(), "make options writes it"


def test_every_option_is_on_the_page() -> None:
    rows = [line for line in reference.page().splitlines() if line.startswith("| `-")]
    assert len(rows) == len(OPTIONS)
    assert all(line.replace("\\|", "").count("|") == 6 for line in rows)
