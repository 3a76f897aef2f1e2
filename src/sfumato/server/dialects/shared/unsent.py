"""What a stream has not sent yet of one reply. Knows no dialect."""

from __future__ import annotations

from collections.abc import Sequence

from sfumato.api import Reply
from sfumato.engine import Settled
from sfumato.text.reply import ToolCall

Growth = tuple[str, str, Sequence[ToolCall]]
"""Of a reply: thought, answer and complete calls."""


class Unsent:
    """Counts what the canvases of a reply have brought, so that its end brings the rest."""

    def __init__(self) -> None:
        self._thought = self._text = self._calls = 0  # characters, and calls

    def of(self, settled: Settled) -> Growth:
        """What a canvas brings."""
        self._thought += len(settled.thought)
        self._text += len(settled.text)
        self._calls += len(settled.tool_calls)
        return settled.thought, settled.text, settled.tool_calls

    def rest(self, reply: Reply) -> Growth:
        """What no canvas has brought."""
        thought = (reply.thought or "")[self._thought :]
        return thought, reply.text[self._text :], reply.tool_calls[self._calls :]
