"""What is said of texts that UTF-8 cannot write."""

from __future__ import annotations

import pytest

from sfumato.text.jsonscan import unicode_fault


@pytest.mark.parametrize("text", ["", "plain", "é 🦙 \x00 \U0010ffff", "\ufffd"])
def test_valid_text_has_no_fault(text: str) -> None:
    assert unicode_fault(text) is None


@pytest.mark.parametrize(
    ("text", "where"),
    [("\ud800", "U+D800 at position 0"), ("🦙a\udcff\ud800", "U+DCFF at position 2")],
)
def test_the_first_lone_surrogate_is_named(text: str, where: str) -> None:
    fault = unicode_fault(text)
    assert fault is not None and f"(lone surrogate {where}); remove it" in fault
    fault.encode()  # can itself be shown
