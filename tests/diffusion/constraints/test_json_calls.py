"""Calls as JSON, of formats whose `CallStyle` says so, under the schemas of tools."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import tokenizers
from tests.support import qwen_text

from sfumato.diffusion.constraints.call_grammar import CallSource, CallTool
from sfumato.diffusion.constraints.constrained_reply import Constraint, ShortCompletion
from sfumato.diffusion.constraints.grammar import GrammarSource, GrammarState, GrammarTokens
from sfumato.model.families.qwen3_blocks.text import MARKERS
from sfumato.text.reply import parse_reply
from sfumato.text.tokenizer import Tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[A-Z]"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


@cache
def tokenizer() -> Tokenizer:
    inner = tokenizers.Tokenizer.from_str(qwen_text.state())
    return Tokenizer(inner, markers=MARKERS.tokens)


def token(text: str) -> int:
    known = tokenizer().token_id(text)
    assert known is not None
    return known


@cache
def vocabulary() -> GrammarTokens:
    text = tokenizer()
    return GrammarTokens(
        lambda: [text.bytes_of(i) or text.token_text(i).encode() for i in range(text.vocab_size)],
        text.special_ids,
        (token("<|im_end|>"), token("<|endoftext|>")),
        lambda plain: text.encode(plain, special=False),
    )


def source(*schemas: dict[str, Any] | None, **how: Any) -> CallSource:
    tools = (
        CallTool(f"f{i}", None if schema is None else json.dumps(schema), f"tools[{i}]")
        for i, schema in enumerate(schemas)
    )
    ids = token(MARKERS.call_open), token(MARKERS.call_close), None
    return CallSource(tuple(tools), *ids, **how, style=MARKERS.calls)


def reply(made: CallSource, thought: tuple[int, int] | None = None, **how: Any) -> GrammarState:
    return Constraint(made.compile(vocabulary()), thought, **how).begin()


def ends(state: GrammarState, text: str) -> bool:
    return state.read(tokenizer().encode(text + "<|im_end|>")).ended


def call(arguments: str, name: str = "f0") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_arguments_match_the_schema() -> None:
    state = reply(source(CITY, None, required=True))
    for good in ('{"city": "Paris"}', '{"city":"Ö\\"", "days": 3}', '{\n  "city": "A"\n}'):
        if "Ö" in good:
            good = good.replace("Ö", "O")
        assert ends(state, call(good)), good
        parsed = parse_reply(tokenizer().pieces(tokenizer().encode(call(good))), MARKERS)
        assert [made.arguments for made in parsed.tool_calls] == [json.loads(good)]
    for bad in ("{}", '{"city": "paris"}', '{"city": "P", "days": "x"}', '{"city": "P", "z": 1}'):
        assert not ends(state, call(bad)), bad
    assert ends(state, call('{"x": [1, {"y": null}]}', "f1"))
    for bad in (call("[]", "f1"), call("{}", "f2"), call('{"city": "P"}').replace("\n", ""), "no"):
        assert not ends(state, bad), bad


def test_how_many_calls_and_what_else() -> None:
    one, two = call("{}"), f"{call('{}')}\n{call('{}')}"
    free = reply(source(None))
    assert all(ends(free, text) for text in ("Hello.", one, two, f"Hello.\n{one}"))
    assert not ends(free, one + call("{}")) and not ends(free, f"{one}\nHello.")
    single = reply(source(None, required=True, single=True))
    assert ends(single, one)
    assert not ends(single, two) and not ends(single, "Hello.")
    answer = GrammarSource("schema", '{"type": "boolean"}')
    either = reply(source(None, answer=answer))
    assert ends(either, "true") and ends(either, one) and not ends(either, "Hello.")


def test_what_must_follow_is_forced() -> None:
    state = reply(source(CITY, required=True))
    forced = tokenizer().decode(state.forced(), skip_special=False)
    assert forced.startswith('<tool_call>\n{"name": "f0", "arguments":')
    opening = MARKERS.call_open + MARKERS.calls.opening("f0")
    ids = tokenizer().encode(opening)
    assert state.valid(ids) == len(ids), "a forced opening is a beginning that the grammar takes"
    assert ids == tokenizer().encode(call('{"city": "P"}'))[: len(ids)], (
        "and the model's own tokens"
    )
    assert opening.startswith(MARKERS.call_open + MARKERS.calls.opening(None))


def test_a_call_can_be_closed_in_time() -> None:
    made = source(CITY, required=True)
    constraint = Constraint(made.compile(vocabulary()))
    state = constraint.begin()
    state.take(tokenizer().encode('<tool_call>\n{"name": "f0", "arguments": {"city": "Pa'))
    completion = ShortCompletion(constraint).find(state, 24)
    assert completion is not None
    text = tokenizer().decode(completion, skip_special=False)
    assert text.endswith("}\n</tool_call>") and len(completion) < 12


def test_a_reply_that_begins_in_a_thought() -> None:
    thought = token("<think>"), token("</think>")
    state = reply(source(None, required=True), thought, in_thought=True)
    assert state.thinks
    assert ends(state, f"\nhm, call?\n</think>{call('{}')}")
    assert not ends(state, call("{}")) and not ends(state, "hm</think>Hello.")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], r"tools\[0\]: must be a JSON schema, an object"),
        (
            {"properties": {"a": {"type": "integer", "multipleOf": 0}}},
            "tools: .*invalid multiple of",
        ),
        ({"properties": {"a": {"$ref": "#/none"}}}, r"tools"),
    ],
)
def test_schemas_that_cannot_be_held(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        source(schema, required=True).compile(vocabulary())
