"""The messages of a conversation: how they change, and the file that they are kept in.

Knows no model and no terminal.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

from sfumato.cli import output
from sfumato.values import quoted

Message = dict[str, Any]

MOST_BYTES = 16 << 20  # of a file: far more than any context holds
MOST_MESSAGES = 10_000  # of a file
MOST_UNDONE = 100  # changes that can be taken back


class Conversation:
    """The messages so far, without thoughts. Every change can be taken back."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self.unanswered: str | None = None  # the last question, where it has no answer
        self._before: deque[list[Message]] = deque(maxlen=MOST_UNDONE)

    def change(self, messages: list[Message]) -> None:
        """Puts other messages in place of those that there are."""
        self._before.append(self.messages)
        self.messages, self.unanswered = messages, None

    def undo(self) -> None:
        """Takes back the last change, or the question that has no answer. Raises ValueError where
        there is none."""
        if self.unanswered is None:
            if not self._before:
                raise ValueError("there is nothing to take back")
            self.messages = self._before.pop()
        self.unanswered = None

    def last_question(self) -> tuple[list[Message], str]:
        """The messages before the last question, and the question. Raises ValueError where there
        is none."""
        if self.unanswered is not None:
            return self.messages, self.unanswered
        if len(self.messages) < 2:  # a system message alone, or none
            raise ValueError("there is no question yet")
        return self.messages[:-2], self.messages[-2]["content"]


def save(path: Path, messages: list[Message], force: bool) -> None:
    """Writes the messages as JSON. Raises ValueError for a file that exists, unless force; and
    OSError."""
    text = json.dumps(messages, ensure_ascii=False, indent=2) + "\n"
    output.write(str(path), text, force)


def load(path: Path) -> list[Message]:
    """What `save` has written. Raises ValueError for anything else, and OSError."""
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file")
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path}: has more than {MOST_BYTES:,} bytes")
    try:
        messages = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({str(error)[:100]})") from None
    if not isinstance(messages, list):
        raise ValueError(f"{path}: has no list of messages, as /save writes")
    if len(messages) > MOST_MESSAGES:
        raise ValueError(f"{path}: has more than {MOST_MESSAGES:,} messages")
    _check(path, messages)
    return messages


def _check(path: Path, messages: list[Any]) -> None:
    """Raises ValueError where the messages are no conversation: a system message or none, then
    questions with their answers."""
    first = messages[0] if messages else None
    has_system = isinstance(first, dict) and first.get("role") == "system"
    for number, message in enumerate(messages):
        role = "user" if (number - has_system) % 2 == 0 else "assistant"
        role = "system" if has_system and number == 0 else role
        where = f"{path}: message {number + 1}"
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise ValueError(f"{where}: must have a role and a content and nothing else")
        if message["role"] != role:
            raise ValueError(f"{where}: must have the role {role}, not {quoted(message['role'])}")
        if not isinstance(message["content"], str):
            raise ValueError(f"{where}: its content must be text")
    if (len(messages) - has_system) % 2:
        raise ValueError(f"{path}: message {len(messages)}: is a question without an answer")
