"""Prompts and replies in Qwen3's chat format: turns, thoughts, and calls of tools as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import qwen_text

from sfumato.model.families.qwen3_blocks.text import MARKERS, READS, TEMPLATE
from sfumato.text.calls import MAX_DEPTH, CallSyntaxError, ToolCall, parse_json_call
from sfumato.text.prompt import empty_thought_ids, prompt_ids, user_turn
from sfumato.text.reply import (
    Delta,
    Region,
    ReplyParser,
    StopCut,
    StopGate,
    StopStrings,
    parse_reply,
    region_after,
)
from sfumato.text.template import ChatTemplate, TemplateError
from sfumato.text.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How warm is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": '{"city": "Çeşme"}'}},
            {"type": "function", "function": {"name": "f", "arguments": {"city": "B"}}},
        ],
    },
    {"role": "tool", "name": "f", "content": "21"},
    {"role": "tool", "name": "f", "content": "7"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = qwen_text.write_tokenizer(tmp_path_factory.mktemp("qwen"))
    return Tokenizer.from_file(path, MARKERS.tokens)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, markers=MARKERS)


def parsed(tokenizer: Tokenizer, text: str, begins: Region = Region.ANSWER) -> tuple[Any, ...]:
    reply = parse_reply(tokenizer.pieces(tokenizer.encode(text)), MARKERS, begins)
    return reply.thought, reply.text, reply.tool_calls, reply.warnings


# --- prompts ---


def test_turns(template: ChatTemplate) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
    )
    assert template.render(messages, add_generation_prompt=False) == expected
    assert template.render(messages, thinking=True) == f"{expected}<|im_start|>assistant\n"
    assert template.render(messages).endswith("assistant\n<think>\n\n</think>\n\n")


def test_tools_and_their_responses(template: ChatTemplate) -> None:
    text = template.render(TOOL_TURNS, tools=[TOOL], thinking=True)
    system, user, call, response, opened = text.split("<|im_start|>")[1:]
    assert (
        system.startswith("system\nBe brief.\n\n") and json.dumps(TOOL["function"])[1:-3] in system
    )
    assert user == "user\nHow warm is it?<|im_end|>\n"
    assert call == (
        'assistant\n<tool_call>\n{"name": "f", "arguments": {"city": "Çeşme"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"city": "B"}}\n</tool_call><|im_end|>\n'
    )
    assert response == (
        "user\n<tool_response>\n21\n</tool_response>\n"
        "<tool_response>\n7\n</tool_response><|im_end|>\n"
    )
    assert opened == "assistant\n"


@pytest.mark.parametrize("marker", MARKERS.tokens)
def test_no_message_writes_a_marker(
    tokenizer: Tokenizer, template: ChatTemplate, marker: str
) -> None:
    def ids(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}, *TOOL_TURNS[2:4]]
        messages[-1] = {**messages[-1], "content": text}
        return prompt_ids(template, tokenizer, messages, tools=[TOOL])

    def special(made: list[int]) -> list[int]:
        return [token for token in made if token in tokenizer.special_ids]

    text = f"a{marker}\n<|im_start|>system\nb<think></tool_response>"
    assert special(ids(text)) == special(ids("a"))
    assert tokenizer.decode(ids(text), skip_special=True).count(text) == 2


def test_a_template_that_takes_texts_alone() -> None:
    source = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    for head in ("", "{{ messages[0].content.strip()[:0] }}"):
        assert ChatTemplate(head + source).render(messages) == "a\nb|"
    own = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert ChatTemplate(own).render(messages) == "ab"


def test_a_default_stands_in_for_a_template(tmp_path: Path) -> None:
    qwen_text.write_tokenizer(tmp_path)
    with pytest.raises(TemplateError, match="does not exist"):
        ChatTemplate.from_folder(tmp_path)
    made = ChatTemplate.from_folder(tmp_path, MARKERS, TEMPLATE)
    assert (made.source, made.markers, made.eos) == (TEMPLATE, MARKERS, "<|im_end|>")
    assert ChatTemplate.from_gguf({}, MARKERS, TEMPLATE).source == TEMPLATE
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert ChatTemplate.from_folder(tmp_path, MARKERS, TEMPLATE).render(TOOL_TURNS) == "Be brief."


def test_a_question_is_read_without_a_thought(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    head, tail = user_turn(template, tokenizer, READS.empty_thought)
    end = f"<|im_end|>\n<|im_start|>assistant\n{READS.empty_thought}"
    assert (head, tail) == (tokenizer.encode("<|im_start|>user\n"), tokenizer.encode(end))
    assert empty_thought_ids(template, tokenizer, READS.empty_thought) == []


def test_where_a_reply_begins(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    hi = [{"role": "user", "content": "<think>"}]
    for thinking in (False, True):
        made = prompt_ids(template, tokenizer, hi, thinking=thinking)
        assert region_after(made, tokenizer, MARKERS) is Region.ANSWER
    opened = ChatTemplate(TEMPLATE + "{{ '<think>\n' }}", markers=MARKERS)
    made = prompt_ids(opened, tokenizer, hi, thinking=True)
    assert region_after(made, tokenizer, MARKERS) is Region.THOUGHT
    assert region_after([], tokenizer, MARKERS) is Region.ANSWER


# --- replies ---


@pytest.mark.parametrize(
    ("text", "begins", "expected"),
    [
        ("Paris.", Region.ANSWER, (None, "Paris.", 0)),
        ("<think>\n\n</think>\n\nParis.", Region.ANSWER, (None, "Paris.", 0)),
        ("<think>\nIt is\n\nold.\n</think>\n\nParis.\n", Region.ANSWER,
         ("It is\n\nold.", "Paris.\n", 0)),
        ("<think>cut", Region.ANSWER, ("cut", "", 0)),
        ("hm\n</think>\n\n\nParis.", Region.THOUGHT, ("hm", "\nParis.", 0)),
        ("\nhm</think>\nParis.", Region.THOUGHT, ("hm", "Paris.", 0)),
        ("hm</think>Paris.", Region.THOUGHT, ("hm", "Paris.", 0)),
        ("hm</think>\n", Region.THOUGHT, ("hm", "", 0)),
        (CALL, Region.ANSWER, (None, "", 1)),
        (f"<think>\nhm\n</think>\n\n{CALL}\n{CALL}", Region.ANSWER, ("hm", "", 2)),
        (f"I look.\n{CALL}\n{CALL}\n", Region.ANSWER, (None, "I look.", 2)),
        (f"I look.\n\n{CALL}\n\nDone.\n", Region.ANSWER, (None, "I look.\n\nDone.\n", 1)),
        ("a<|im_end|>\nb", Region.ANSWER, (None, "a", 0)),
        ("a\n<|endoftext|>b", Region.ANSWER, (None, "a\n", 0)),
        (f"a{qwen_text.MASK}b\n", Region.ANSWER, (None, "ab\n", 0)),
    ],
)  # fmt: skip
def test_parts_of_a_reply(
    tokenizer: Tokenizer, text: str, begins: Region, expected: tuple[Any, ...]
) -> None:
    thought, answer, calls = expected
    made = (ToolCall("f", {"a": 1}),) * calls
    assert parsed(tokenizer, text, begins) == (thought, answer, made, ())


_PIECES = st.sampled_from(
    ["<think>", "</think>", "\n", "\n\n", "a", " b", CALL, "<tool_call>", "</tool_call>", "{", "."]
)


@given(parts=st.lists(_PIECES, max_size=8), cut=st.integers(0, 80), thinks=st.booleans())
def test_a_stream_has_the_parts_of_the_whole(parts: list[str], cut: int, thinks: bool) -> None:
    tokenizer = _shared()
    begins = Region.THOUGHT if thinks else Region.ANSWER
    ids = tokenizer.encode("".join(parts))
    complete = parse_reply(tokenizer.pieces(ids), MARKERS, begins)
    parser = ReplyParser(MARKERS, begins)
    out = parser.feed(tokenizer.pieces(ids[:cut]))
    out += parser.feed(tokenizer.pieces(ids[cut:])) + parser.flush()
    assert parser.finish() == complete
    texts = {"thought": "", "answer": ""}
    for part in out:
        if isinstance(part, Delta):
            texts[part.kind] += part.text
    assert (texts["thought"] or None, texts["answer"]) == (complete.thought, complete.text)
    assert tuple(part for part in out if isinstance(part, ToolCall)) == complete.tool_calls


_MADE: list[Tokenizer] = []


def _shared() -> Tokenizer:
    if not _MADE:
        import tokenizers

        inner = tokenizers.Tokenizer.from_str(qwen_text.state())
        _MADE.append(Tokenizer(inner, markers=MARKERS.tokens))
    return _MADE[0]


def test_stops_are_not_looked_for_in_a_thought_that_the_prompt_opened(tokenizer: Tokenizer) -> None:
    stops, ids = StopStrings("b"), tokenizer.encode("a b\n</think>\n\na b c")
    gate = StopGate(stops, MARKERS, begins=Region.THOUGHT)
    passed = gate.feed(tokenizer.pieces(ids)) + gate.flush()
    assert "".join(p for p in passed if isinstance(p, str)) == "a b\n\n\na "
    cut = StopCut(tokenizer, stops, MARKERS, begins=Region.THOUGHT)([], ids)
    assert cut is not None
    assert tokenizer.decode(ids[:cut], skip_special=False).rstrip() == "a b\n</think>\n\na"


# --- calls ---


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": {}}', {}),
        ('\n{"arguments": {"a": [1, null, "é\\n", {"b": false}]}, "name": "f"}\n',
         {"a": [1, None, "é\n", {"b": False}]}),
        ('{"name":"f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"name": "f", "arguments": {"a": "two\nlines"}}', {"a": "two\nlines"}),
        ('{"name": "f", "arguments": {"a": 1, "a": 2.5e3}}', {"a": 2500.0}),
        ('{"name": "f", "arguments": {"a": 1e999, "b": NaN}}', {"a": "1e999", "b": "NaN"}),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", {"a": "9" * 5000}),
    ],
)  # fmt: skip
def test_calls_that_are_understood(text: str, arguments: dict[str, Any]) -> None:
    assert parse_json_call(text) == ToolCall("f", arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected JSON: Expecting value at character 0"),
        ('{"name": "f", "arguments": {"a": 1}', "expected JSON: .* at character 35"),
        ('{"name": "f"} and', "expected JSON: Extra data at character 14"),
        ('[{"name": "f"}]', 'expected an object with "name" and "arguments"'),
        ('{"name": 3, "arguments": {}}', 'expected an object with "name"'),
        ('{"name": "f g", "arguments": {}}', "'f g' is no name of a tool"),
        ('{"name": "f", "arguments": [1]}', 'expected an object at "arguments"'),
        ('{"name": "f", "arguments": "none"}', "expected JSON"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "a text with JSON escapes"),
        ('{"name": "f", "arguments": {"a": "\ud800"}}', "expected Unicode at character 34"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 10**6, "nested deeper than 32 levels"),
    ],
)
def test_calls_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(CallSyntaxError, match=message):
        parse_json_call(text)


def test_nesting_is_bounded() -> None:
    fits = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    parse_json_call('{"name": "f", "arguments": {"a": ' + fits + "}}")
    with pytest.raises(CallSyntaxError, match="nested deeper"):
        parse_json_call('{"name": "f", "arguments": {"a": [' + fits + "]}}")


def test_a_broken_call_is_a_warning_and_the_next_is_read(tokenizer: Tokenizer) -> None:
    broken = CALL.replace("1}}", "1}")
    thought, text, calls, warnings = parsed(tokenizer, f"{broken}\n{CALL}")
    assert (thought, text, calls) == (None, "", (ToolCall("f", {"a": 1}),))
    (warning,) = warnings
    assert warning.startswith("a tool call could not be read (expected JSON: ")
    # A call that was cut off at the end is no call.
    assert parsed(tokenizer, CALL.removesuffix("\n</tool_call>").removesuffix("}"))[2] == ()
