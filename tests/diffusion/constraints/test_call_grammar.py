"""Calls in the model's own syntax under the schemas of strict tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.diffusion.constraints.test_depth import LINKS, chain
from tests.diffusion.constraints.test_grammar import TOKENS, ids
from tests.support.scripted_model import END, MARKERS, VOCABULARY, tokenizer

from sfumato.diffusion.constraints.call_grammar import CallSource, CallTool
from sfumato.diffusion.constraints.constrained_reply import (
    Constraint,
    ShortCompletion,
)
from sfumato.diffusion.constraints.grammar import GrammarSource, GrammarState
from sfumato.text.reply import parse_reply

QUOTE = VOCABULARY[MARKERS.quote]
CALL = VOCABULARY[MARKERS.call_open], VOCABULARY[MARKERS.call_close], QUOTE
Q = MARKERS.quote
NODE = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["n", "next"],
}


def source(*schemas: dict[str, Any] | None, strict: bool = True, **how: Any) -> CallSource:
    tools = (
        CallTool(f"f{i}", None if schema is None else json.dumps(schema), f"tools[{i}]", strict)
        for i, schema in enumerate(schemas)
    )
    return CallSource(tuple(tools), *CALL, **how, style=MARKERS.calls)


def reply(made: CallSource) -> GrammarState:
    return Constraint(made.compile(TOKENS), None, QUOTE).begin()


def call(arguments: str, name: str = "f0") -> str:
    return f"<|tool_call>call:{name}{arguments}<tool_call|>"


def ends(made: CallSource, text: str) -> bool:
    return reply(made).read([*ids(text), END]).ended


def properties(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, (f"{Q}a, }}: \"b\"{Q}", f"{Q}{Q}"), ("a", '"a"')),
        ({"type": "string", "maxLength": 2, "minLength": 1}, (f"{Q}ab{Q}",), (f"{Q}abc{Q}", Q + Q)),
        ({"type": "string", "pattern": "^a+$"}, (f"{Q}aa{Q}",), (f"{Q}ab{Q}",)),
        ({"type": "string", "pattern": "b"}, (f"{Q}abc{Q}",), (f"{Q}ac{Q}",)),
        ({"type": "string", "pattern": "^a+$", "minLength": 2, "maxLength": 3},
         (f"{Q}aa{Q}", f"{Q}aaa{Q}"), (f"{Q}a{Q}", f"{Q}aaaa{Q}", f"{Q}ab{Q}")),
        ({"type": "string", "pattern": "b", "maxLength": 3}, (f"{Q}abc{Q}",), (f"{Q}abcd{Q}",)),
        ({"type": "string", "format": "date"}, ('"2026-11-22"',), ('"22.11.2026"',)),
        ({"type": "integer", "minimum": 3, "maximum": 12}, ("3", "12"), ("2", "13", "3.0")),
        ({"type": ["number", "null"]}, ("-2.5e3", "null"), ("true",)),
        ({"enum": ["a", 5, None, [1, "b"], {"k": True}]},
         (f"{Q}a{Q}", "5", "null", f"[1,{Q}b{Q}]", "{k:true}"), (f"{Q}b{Q}", "6", "[1]")),
        ({"type": ["integer", "null"], "enum": ["a", 5, 2.5, None]}, ("5", "null"), ("2.5",)),
        ({"const": "only"}, (f"{Q}only{Q}",), (f"{Q}on{Q}",)),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
         ("[true]", "[true,false]"), ("[]", "[true,true,true]")),
        ({"type": "array", "items": {"const": 1}}, ("[]", "[1,1,1]"), ("[2]",)),
        ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]},
         ("[]", "[1]", "[1,2]", f"[1,2,{Q}x{Q},3]"), ("[2]", "[1,1]", "[,2]")),
        ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "minItems": 2,
          "maxItems": 2}, ("[1,2]",), ("[]", "[1]", "[1,2,3]")),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 2,
          "maxItems": 3}, ("[1,2]", "[1,2,2]"), ("[1]", "[1,3]", "[1,2,2,2]")),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": False},
         ("[]", "[1]"), ("[1,2]",)),
        ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "maxItems": 1},
         ("[]", "[1]"), ("[1,2]",)),
        ({"type": "object", "patternProperties": {"^[a-c ]{1,2}$": {"const": 1}, "^[0-9]$": {}}},
         ("{}", "{ab:1}", f"{{{Q}a b{Q}:1,c:1}}".replace("a b", "a "), f"{{{Q}7{Q}:null}}"),
         ("{d:1}", "{a:2}", "{7:1}", f"{{{Q}a{Q}:1}}")),
        ({"type": "object", "additionalProperties": {"const": 1}, "minProperties": 1,
          "maxProperties": 2}, ("{a:1}", "{a:1,b:1}"), ("{}", "{a:1,b:1,c:1}")),
        ({"type": "object", "additionalProperties": {"const": 1}, "maxProperties": 0},
         ("{}",), ("{a:1}",)),
        ({"type": "object", "additionalProperties": {"type": "integer"}},
         ("{}", "{a:1,b:2}"), ("{a:x}",)),
        ({}, ("1", f"[{Q}x{Q},{{a:null}}]"), ("x",)),
        ({"anyOf": [{"type": "null"}, {"allOf": [{"const": 7}]}]}, ("null", "7"), ("8",)),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_values(schema: Any, good: tuple[str, ...], bad: tuple[str, ...]) -> None:
    made = source(properties(schema))
    for value in good:
        assert ends(made, call(f"{{x:{value}}}")), value
        parsed = parse_reply(tokenizer().pieces(ids(call(f"{{x:{value}}}"))), MARKERS)
        assert len(parsed.tool_calls) == 1, "what is allowed can be read"
    for value in bad:
        assert not ends(made, call(f"{{x:{value}}}")), value


def test_members_come_in_order_and_some_may_be_missing() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}, "c d": {"const": 3}},
        "required": ["b"],
    }
    made = source(schema)
    for good in ("{b:2}", "{a:1,b:2}", f"{{b:2,{Q}c d{Q}:3}}", f"{{a:1,b:2,{Q}c d{Q}:3}}"):
        assert ends(made, call(good)), good
    for bad in ("{}", "{a:1}", "{b:2,a:1}", "{a:1,b:2,}", "{b:2,z:1}", "{,b:2}"):
        assert not ends(made, call(bad)), bad


def test_a_schema_that_is_too_deep_is_refused() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(450):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ValueError, match=r"tools\[0\]: is nested [0-9]+ levels deep"):
        source(properties(deep)).compile(TOKENS)


def test_a_chain_of_references_is_refused_and_leaves_the_arguments_free_without_strict() -> None:
    schema = properties({"$ref": "#/$defs/d0"}) | {"$defs": chain(1500, LINKS["items"])["$defs"]}
    with pytest.raises(ValueError, match=r"tools\[0\]: has a chain of"):
        source(schema).compile(TOKENS)
    made = source(schema, strict=False)
    (note,) = made.compile(TOKENS).notes
    assert note.startswith("tools[0]: has a chain of") and ends(made, call("{y}"))


def test_references_may_go_round() -> None:
    made = source(NODE)
    assert ends(made, call("{n:1,next:{n:2,next:null}}"))
    assert not ends(made, call("{n:1,next:{n:2}}"))
    state = reply(made)
    state.take(ids("<|tool_call>call:f0{n:4"))
    completion = ShortCompletion(Constraint(made.compile(TOKENS), None, QUOTE)).find(state, 20)
    assert completion is not None and state.read([*completion, END]).ended


def test_text_and_several_calls() -> None:
    made = source({}, None)
    assert ends(made, "No call.") and ends(made, f"Well.{call('{}')}{call('{a:(7', 'f1')}")
    assert not ends(made, call("{}", "f2")) and not ends(made, call("{a:1}"))
    assert not ends(source({}, required=True), "No call.")
    assert ends(source({}, required=True), call("{}") * 2)
    assert not ends(source({}, required=True, single=True), call("{}") * 2)
    answer = GrammarSource("schema", '{"type": "array", "contains": {}}', "schema")
    answered = source({}, answer=GrammarSource("schema", '{"enum": ["a"]}', "schema"))
    assert ends(answered, '"a"') and ends(answered, call("{}")) and not ends(answered, "a")
    with pytest.raises(ValueError, match=r"^schema: "):
        source({}, answer=answer).compile(TOKENS)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            properties({"not": {}}),
            r"tools\[0\]\.x: not is not supported in the param",
        ),
        (properties({"type": "strin"}), r"tools\[0\]\.x\.type: .*strin.* is no type"),
        (properties({"type": "string", "minLength": 3, "maxLength": 2}), r".*minLength is larger"),
        (properties({"type": "array", "minItems": -1}), r".*minItems: must be a whole number"),
        (properties({"$ref": "#/$defs/no"}), r".*\$ref .*no.* is not in the schema"),
        (properties({"enum": []}), r".*enum: must be a list"),
        (properties(False), r".*false is no schema that has values"),
        ({"type": "object", "required": ["y"]}, r".*required: 'y' is not among the properties"),
        (
            {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
            r".*patternProperties is not supported beside",
        ),
        ({"patternProperties": {"^x": {}}, "additionalProperties": {}}, r".*goes with no other"),
        ({"patternProperties": {"^x": {}}, "minProperties": -1}, r".*must be a whole number"),
        ({"properties": {"a": {}}, "minProperties": 1}, r".*minProperties and maxProperties are"),
        ({"type": "object", "minProperties": 1}, r".*minProperties and maxProperties are"),
        (properties({"type": "array", "prefixItems": {}}), r".*prefixItems: must be a list"),
        (properties({"type": "string", "pattern": 3}), r".*pattern: must be a text"),
        ({"type": "object", "required": [["x"]]}, r".*required: must be a list of names"),
        (properties({"$ref": "#/properties/x", "maxLength": 3}), r".*maxLength is not supported"),
        (properties({"type": "string", "enum": [3, 4]}), r".*nothing matches const, enum"),
        (properties({"const": 1, "enum": [2, True]}), r".*nothing matches const, enum"),
        (properties({"const": 1, "type": "whole"}), r".*type: .*whole.* is no type"),
        (properties({"minimum": 2**53 + 1}), r".*minimum: 9007199254740993 is beyond 2\^53"),
    ],
)
def test_what_is_refused_names_the_place(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        source(schema).compile(TOKENS)


def test_parameters_that_cannot_be_held_are_free_where_the_tool_is_not_strict() -> None:
    good, other = properties({"type": "integer"}), {"enum": ["x" * 2**18]}
    broken = properties({"type": "string", "pattern": "(a)\\1"})
    for schemas, held in (
        ((good, properties(other)), "f0"),
        ((properties({"not": {}}), good), "f1"),
    ):
        made = source(*schemas, strict=False)
        (note,) = made.compile(TOKENS).notes
        assert note.startswith("tools[") and held not in note
        for name in ("f0", "f1"):
            assert ends(made, call("{x:1}", name)) and ends(made, call("{y}", name)) == (
                name != held
            )
    made = source(broken, strict=False)
    assert "backreferences" in made.compile(TOKENS).notes[0] and ends(made, call("{y}"))
