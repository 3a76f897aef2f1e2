from __future__ import annotations

from typing import Any

import pytest
from tests.support.pieces import MARKERS

from sfumato.refused import Refused
from sfumato.text.messages import (
    MOST_VALUES,
    check_messages,
    check_tools,
    without_thoughts,
)

USER = {"role": "user", "content": "hi"}


def _call(name: str = "f", arguments: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def _calling(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def test_messages_come_back_clean() -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": parts},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "extra": object()},
        {"role": "assistant", "content": "<|channel>thought\nHm<channel|>yes", "reasoning": "Hm"},
    ]
    before = repr(messages)
    assert check_messages(messages, markers=MARKERS) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "yes"},
    ]
    assert repr(messages) == before


def test_tool_messages_find_their_calls() -> None:
    messages = [
        USER,
        _calling(_call("f", '{"a": [1]}', id="x"), _call("g", {"b": None}, id="y")),
        {"role": "tool", "tool_call_id": "y", "content": "1"},
        {"role": "tool", "name": "f", "content": "2"},
    ]
    calling, by_id, by_name = check_messages(messages)[1:]
    assert [call["function"] for call in calling["tool_calls"]] == [
        {"name": "f", "arguments": {"a": [1]}},
        {"name": "g", "arguments": {"b": None}},
    ]
    assert by_id == {"role": "tool", "content": "1", "name": "g", "tool_call_id": "y"}
    assert by_name == {"role": "tool", "content": "2", "name": "f"}


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


TOOL = {"role": "tool", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", r"messages: must be a list, not str"),
        (USER, r"messages: must be a list, not dict"),
        (None, r"messages: must be a list, not NoneType"),
        ([], r"messages: is empty"),
        ([USER, "hi"], r"messages\[1\]: must be an object"),
        ([{"content": "hi"}], r"messages\[0\]\.role: must be one of system, .*, not None"),
        ([{"role": ["user"], "content": "hi"}], r"messages\[0\]\.role: must be one of"),
        ([USER, {"role": "user"}], r"messages\[1\]\.content: must be text .* not null"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content: must be text .* not int"),
        ([{"role": "user", "content": {}}], r"messages\[0\]\.content: must be text .* not dict"),
        ([{"role": "user", "content": b"x"}], r"messages\[0\]\.content\[0\]: must be an object"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\]: must be an object"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"messages\[0\]\.content\[0\]\.type: only 'text' is supported, not 'image_url'",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            r"messages\[0\]\.content\[0\]\.text: must be text",
        ),
        (
            [USER, {"role": "user", "content": "abc\ud800"}],
            r"messages\[1\]\.content: holds .* \(lone surrogate U\+D800 at position 3\)",
        ),
        ([USER | {"tool_calls": []}], r"messages\[0\]\.tool_calls: only an assistant's"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], r"messages\[0\]\.tool_calls: must be"),
        ([_calling("f")], r"messages\[0\]\.tool_calls\[0\]\.function: must be an object"),
        ([_calling(_call(""))], r"tool_calls\[0\]\.function\.name: must be a text"),
        (
            [_calling(_call("f"), _call("f}<tool_call|>"))],
            r"calls\[1\]\.function\.name: .*'f}<to",
        ),
        ([_calling(_call("f\n"))], r"tool_calls\[0\]\.function\.name: must be a text"),
        ([_calling(_call("f", "{"))], r"tool_calls\[0\]\.function\.arguments: must be JSON \("),
        ([_calling(_call("f", "[" * 100_000))], r"function\.arguments: is nested too deeply"),
        ([_calling(_call("f", "[1]"))], r"function\.arguments: must be a JSON object"),
        ([_calling(_call("f", {"a": {1}}))], r"arguments\.a: must be JSON data, not set"),
        ([_calling(_call("f", {1: 2}))], r"arguments: has the key 1, which is no text"),
        ([_calling(_call("f", {"a": _deep(100)}))], r"nested deeper than 64"),
        ([USER, TOOL], r"messages\[1\]\.role: a tool's message must follow"),
        ([_calling(_call("f"), _call("g")), TOOL], r"messages\[1\]\.name: must say .*'f, g'"),
        ([_calling(_call("f")), TOOL | {"name": "g"}], r"messages\[1\]\.name: must say"),
        ([_calling(_call("f")), TOOL | {"tool_call_id": "z"}], r"tool_call_id: 'z' is no call's"),
        ([_calling(_call("f")), TOOL | {"tool_call_id": []}], r"tool_call_id: \[\] is no call's"),
    ],
)
def test_bad_messages(messages: Any, message: str) -> None:
    with pytest.raises(Refused, match=message):
        check_messages(messages)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"type": "function"}, r"tools: must be a list"),
        (["f"], r"tools\[0\]: must be an object of \"type\": \"function\""),
        ([{"type": "function"}], r"tools\[0\]\.function: must be an object"),
        ([{"type": "function", "function": {}}], r"tools\[0\]\.function\.name: must be a text"),
        (
            [{"type": "function", "function": {"name": "f", "description": 3}}],
            r"tools\[0\]\.function\.description: must be a text",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": [1]}}],
            r"tools\[0\]\.function\.parameters: must be a JSON schema",
        ),
        ([{"type": "function", "function": {"name": object()}}], r"tools\[0\]\.function\.name"),
        *[
            ([{"type": "function", "function": {"name": name}}], r"tools\[0\]\.function\.name: mu")
            for name in ("a b", "a/b", "é", "f{", "f\n", "x" * 129, "<eos>")
        ],
    ],
)
def test_bad_tools(tools: Any, message: str) -> None:
    with pytest.raises(Refused, match=message):
        check_tools(tools)


@pytest.mark.parametrize("name", ["f", "a.b-c_1", "x" * 128])
def test_names_of_tools(name: str) -> None:
    tools: Any = [{"type": "function", "function": {"name": name}}]
    assert (check_tools(tools) or [])[0]["function"]["name"] == name
    calling = check_messages([_calling(_call(name))])[0]
    assert calling["tool_calls"][0]["function"]["name"] == name


def test_no_tools_is_none() -> None:
    assert check_tools(None) is None
    assert check_tools([]) is None


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("plain", "plain"),
        ("<|channel>thought\na<channel|>b", "b"),
        ("a<|channel>b<channel|>c<|channel>d<channel|>e", "ace"),
        ("a<|channel>never closed", "a"),
        ("a<channel|>b", "ab"),
    ],
)
def test_thoughts_are_cut_out(text: str, left: str) -> None:
    assert without_thoughts(text, MARKERS) == left


def test_json_within_json_is_bounded_too() -> None:
    """Arguments of past calls are a text of JSON: counted, all together, before it is decoded."""
    lists = ",".join(["[]"] * (MOST_VALUES // 6))  # each counts as two, and has a comma
    call = {"type": "function", "function": {"name": "f", "arguments": f'{{"a":[{lists}]}}'}}
    for count in (1, 3):
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
        messages[1]["tool_calls"] *= count  # type: ignore[operator]
        if count == 1:
            assert len(check_messages(messages)[1]["tool_calls"]) == 1
            continue
        with pytest.raises(
            Refused, match=r"tool_calls\[2\].*: all arguments .* more than 131,072 values"
        ):
            check_messages(messages)
    call["function"] = {"name": "f", "arguments": '{"a":' * 100 + "1"}
    with pytest.raises(Refused, match="nested too deeply"):
        check_messages(messages)
