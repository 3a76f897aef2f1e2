"""Requests with tools where a chat format writes calls as JSON, and the tokens of replies with
white space beside thoughts and calls."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tests.support import qwen_text

from sfumato.diffusion.constraints.call_grammar import CallSource
from sfumato.model.families.qwen3_blocks.text import MARKERS, TEMPLATE
from sfumato.server.chat.call import _call_grammar, tool_use
from sfumato.server.chat.deltas import TokenLog
from sfumato.text.reply import Region, parse_reply
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("warmth", "rain")
]


class _Model(SimpleNamespace):
    """A text side that can be a key."""

    __hash__ = object.__hash__


@cache
def model() -> Any:
    inner = tokenizers.Tokenizer.from_str(qwen_text.state())
    tokenizer = Tokenizer(inner, markers=MARKERS.tokens)
    return _Model(tokenizer=tokenizer, template=ChatTemplate(TEMPLATE, markers=MARKERS))


@pytest.mark.parametrize(
    ("choice", "opening", "names"),
    [
        ("required", '<tool_call>\n{"name": "', ["warmth", "rain"]),
        (
            {"type": "function", "function": {"name": "rain"}},
            '<tool_call>\n{"name": "rain", "arguments":',
            ["rain"],
        ),
    ],
)
def test_a_call_that_has_to_be(choice: Any, opening: str, names: list[str]) -> None:
    use = tool_use(TOOLS, choice, model())
    assert use.opening == opening
    made = _call_grammar(use, model(), True, None, True)
    assert isinstance(made, CallSource)
    assert [tool.name for tool in made.tools] == names
    assert (made.quote, made.style, made.required) == (None, MARKERS.calls, True)
    token = model().tokenizer.token_id
    assert (made.opens, made.closes) == (token("<tool_call>"), token("</tool_call>"))


def test_no_call() -> None:
    use = tool_use(TOOLS, "none", model())
    assert use.banned == (model().tokenizer.token_id("<tool_call>"),)
    assert _call_grammar(tool_use(TOOLS, "auto", model()), model(), False, None, True) is None


@pytest.mark.parametrize(
    ("prompt", "text", "answer"),
    [
        ("", "<think>\nhm\n</think>\n\nIt is warm.", "It is warm."),
        ("<think>", "\nhm\n</think>\n\nIt is warm.", "It is warm."),
        ("", "I look.\n<tool_call>\n{}\n</tool_call>\nDone.", "I look.Done."),
        ("", "It is 🙂 warm.\n", "It is 🙂 warm.\n"),
    ],
)
def test_the_tokens_of_an_answer(prompt: str, text: str, answer: str) -> None:
    tokenizer = model().tokenizer
    ids, begins = tokenizer.encode(text), Region.THOUGHT if prompt else Region.ANSWER
    assert parse_reply(tokenizer.pieces(ids), MARKERS, begins).text == answer
    log = TokenLog(SimpleNamespace(model=model()), 0, (), False)  # type: ignore[arg-type]
    log.follow(tokenizer.encode(f"<|im_start|>assistant\n{prompt}"))
    settled = SimpleNamespace(
        token_ids=ids, top_ids=None, top_probs=None, named=None, log_probs=None
    )
    log.add(settled)  # type: ignore[arg-type]
    parts = [part for at in range(len(answer)) for part in log.take(answer[at])] + log.end()
    assert "".join(shown for shown, _ in parts) == answer
    for shown, entries in parts:
        assert entries and "".join(entry["token"] for entry in entries).startswith(shown)
