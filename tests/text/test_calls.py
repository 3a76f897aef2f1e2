from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.pieces import MARKERS

from sfumato.text.calls import MAX_DEPTH, QUOTE, CallSyntaxError, ToolCall
from sfumato.text.calls import parse_call as parse_tokens


def parse_call(text: str) -> ToolCall:
    """A call whose quotes are special tokens."""
    return parse_tokens(text.replace(MARKERS.quote, QUOTE), MARKERS.quote)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("call:f{}", {}),
        ("call:f{ }", {}),
        ('call:f{a:<|"|>x, {y}: "z"<|"|>}', {"a": 'x, {y}: "z"'}),
        ('call:f{a:<|"|><|"|>}', {"a": ""}),
        ("call:f{n:3,m:-2,x:1.5,y:-1e3}", {"n": 3, "m": -2, "x": 1.5, "y": -1000.0}),
        ("call:f{a:true,b:false,c:null}", {"a": True, "b": False, "c": None}),
        ("call:f{a:True,b:False,c:None}", {"a": True, "b": False, "c": None}),
        ('call:f{l:[1,<|"|>a<|"|>,[],{}]}', {"l": [1, "a", [], {}]}),
        ('call:f{o:{p:{q:1}},<|"|>k<|"|>:2}', {"o": {"p": {"q": 1}}, "k": 2}),
        ("call:f{a : 1 ,\n b : [ 1 , 2 ] , }", {"a": 1, "b": [1, 2]}),
        ('call:f{"a": "x\\n\\"", "b": {"c": []}}', {"a": 'x\n"', "b": {"c": []}}),
        ("call:f{city:New York, n:3 apples}", {"city": "New York", "n": "3 apples"}),
        ('call:f(a="x", b=\'it\\\'s "y"\', c=[1])', {"a": "x", "b": 'it\'s "y"', "c": [1]}),
        ("call:f(a:1)", {"a": 1}),
        ("f{a:1}", {"a": 1}),
        (" call: f {a:1}\n", {"a": 1}),
        ("call:f{a:1,a:2}", {"a": 2}),
        ("call:f{x:1e999}", {"x": "1e999"}),
    ],
)
def test_calls_that_are_understood(text: str, arguments: dict[str, Any]) -> None:
    assert parse_call(text) == ToolCall("f", arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected call:NAME"),
        ("{a:1}", "expected call:NAME"),
        ("call:f", "expected '{' at character 6"),
        ("call:f{", "expected a key at character 7"),
        ("call:f{a", "expected ':' at character 8"),
        ("call:f{a:", "expected a value at character 9"),
        ("call:f{a:1", "expected ',' or '}' at character 10"),
        ("call:f{a:[1}", "expected ',' or ']' at character 11"),
        ("call:f{a:1)", "expected ',' or '}'"),
        ("call:f{a:1}}", "expected the end of the call at character 11"),
        ('call:f{a:<|"|>x}', "expected a text that ends with"),
        ('call:f{a:"x}', "expected a text with its closing quote"),
        ('call:f{a:"\\ud800"}', "expected a text with JSON escapes"),
        ('call:f{a:"x<|"|>y"}', "expected a text with JSON escapes"),
        ('call:f{a<|"|>b:1}', "expected ':' at character 8"),
        ('call:f{a:1<|"|>}', "expected ',' or '}' at character 10"),
        ("call:f/g{}", "expected '{' at character 6"),
        ("call:é{}", "expected '{' at character 4"),
        (f"call:{'n' * 129}{{}}", "expected '{' at character 133"),
        ("call:f{,}", "expected a key"),
        ("call:f{a:,}", "expected a value"),
        ("call:f(__import__('os'))", "expected ':'"),
    ],
)
def test_calls_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(CallSyntaxError) as caught:
        parse_call(text)
    assert message in str(caught.value)


def test_nesting_is_bounded() -> None:
    fits = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    parse_call("call:f{a:" + fits + "}")
    with pytest.raises(CallSyntaxError, match="nested deeper than 32"):
        parse_call("call:f{a:[" + fits + "]}")
    with pytest.raises(CallSyntaxError, match="nested deeper than 32"):
        parse_call("call:f" + "{a:" * 300_000)


@pytest.mark.parametrize(
    "unit",
    [" ", "a", "9", ",", ":", '"', "'", "\\", "{", "[", "(", "a:", "a:1,", QUOTE, "\n", "<|", "1.",
     "call:", '"\\', "é", "f{", "[],"],
)  # fmt: skip
def test_a_quarter_of_a_megabyte_of_junk_is_quick(unit: str) -> None:
    junk = unit * (250_000 // len(unit))
    start = time.perf_counter()
    for text in (junk, "call:f{" + junk, "call:f{a:" + junk, "call:f{a:[" + junk + "x]}"):
        try:
            parse_call(text)
        except CallSyntaxError as error:
            assert len(str(error)) < 200
    assert time.perf_counter() - start < 30  # linear: a quarter of a second each; squared: minutes


def _written(value: Any) -> str:
    """`value` as the chat template writes arguments."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return str(value)


_text = st.text()  # of valid characters: what tokens are decoded to
_key = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | _text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_key, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(_key, _value, max_size=4))
def test_what_the_template_writes_is_read_back(arguments: dict[str, Any]) -> None:
    assert (
        parse_tokens("call:tool.name-1" + _written(arguments), MARKERS.quote).arguments == arguments
    )


_marks = st.sampled_from([*"call:f{}[](),=\"'\\<|> 1a", QUOTE])


@given(st.lists(_marks).map("".join))
def test_no_text_crashes_the_reader(text: str) -> None:
    for candidate in (text, "call:f{" + text, "call:f{a:" + text):
        with contextlib.suppress(CallSyntaxError):
            assert isinstance(parse_tokens(candidate, MARKERS.quote), ToolCall)
