"""Text in small pieces."""

from __future__ import annotations

import pytest

from sfumato.server.chat.deltas import pieces


@pytest.mark.parametrize(
    "text", ["", "a", " a  b\n\nc ", "x" * 100, "Grüße, 世界! " * 9, "\n" * 60, "a\tb"]
)
def test_pieces_are_the_text(text: str) -> None:
    assert "".join(pieces(text)) == text
    assert all(0 < len(piece) <= 25 for piece in pieces(text))
