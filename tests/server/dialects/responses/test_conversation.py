"""Items of a response's input as messages."""

from __future__ import annotations

from typing import Any

import pytest

from sfumato.server.dialects.responses.body import conversation

SAID = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "wait"}]}
CALLS: list[dict[str, Any]] = [
    {"type": "function_call", "call_id": name, "name": "weather", "arguments": "{}"}
    for name in "ab"
]
OUTPUTS = [{"type": "function_call_output", "call_id": name, "output": name * 3} for name in "ba"]


@pytest.mark.parametrize(
    "items", [[*CALLS, SAID, *OUTPUTS], [*CALLS, OUTPUTS[0], SAID, OUTPUTS[1]]]
)
def test_a_user_may_write_before_an_output(items: list[dict[str, Any]]) -> None:
    """The prompt has outputs behind their calls, and what the user has written after them."""
    turns = conversation(None, [(f"input[{i}]", item) for i, item in enumerate(items)])
    assert [turn.message["role"] for turn in turns] == ["assistant", "tool", "tool", "user"]
    assert [turn.message["content"] for turn in turns] == [None, "bbb", "aaa", "wait"]
    for turn in turns[1:]:
        assert items[int(turn.place[6:-1])].get("call_id") == turn.message.get("tool_call_id")
