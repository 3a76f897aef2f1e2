"""Schemas in words that grammars hold: the same values match, or a note says what is left out."""

from __future__ import annotations

import json
import re
import time
from copy import deepcopy
from itertools import product
from typing import Any

import jsonschema_rs
import pytest
from tests.diffusion.constraints.test_call_grammar import Q, call, ends, properties, source
from tests.diffusion.constraints.test_grammar import TOKENS, grammar, ids, reply
from tests.support.scripted_model import END

from sfumato.diffusion.constraints.grammar import GrammarSource, schema_source
from sfumato.diffusion.constraints.held_schema import MOST_NOTES, held_schema

Schema = dict[str, Any]
CAT: Schema = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "n": {"type": "integer"}},
    "required": ["kind"],
}
DOG: Schema = {
    "type": "object",
    "properties": {"kind": {"enum": ["dog", "puppy"]}, "n": {"type": "integer"}},
    "required": ["kind"],
}
DEFS: Schema = {"cat": CAT, "dog": DOG, "pet": {"oneOf": [{"$ref": "#/$defs/cat"}, DOG]}}
PETS = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]


def held(schema: Schema) -> tuple[Any, tuple[str, ...]]:
    return held_schema(deepcopy(schema), "s")


def accepts(schema: Schema, *texts: str) -> list[bool]:
    state = reply(schema)
    return [state.read([*ids(text), END]).ended for text in texts]


@pytest.mark.parametrize(
    ("one_of", "good", "bad"),
    [
        (PETS, '{"kind": "dog"}', '{"kind": "cow"}'),
        ([{"$ref": "#/$defs/pet"}, {"type": "null"}], '{"kind": "cat", "n": 2}', "3"),
        ([{"enum": ["a", "b"]}, {"const": "c"}, {"type": "integer"}], '"c"', '"d"'),
        ([{"allOf": [CAT, {"required": ["n"]}]}, DOG], '{"kind": "cat", "n": 1}', '{"kind": "d"}'),
        (
            [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
             {"type": "object", "properties": {"b": {}}, "additionalProperties": False}],
            '{"a": 1}', '{"a": "x"}',
        ),
        ([{"anyOf": [{"type": "integer"}, {"type": "string"}]}, {"type": "boolean"}], "1", "null"),
    ],
)  # fmt: skip
def test_one_of_disjoint_branches_is_held_as_it_is(one_of: Any, good: str, bad: str) -> None:
    for wrapped, around in (
        ({"oneOf": one_of}, "%s"),
        ({"type": "array", "items": {"oneOf": one_of}, "minItems": 1}, "[%s]"),
        (properties({"anyOf": [{"oneOf": one_of}]}) | {"additionalProperties": False}, '{"x": %s}'),
    ):
        schema = wrapped | {"$defs": DEFS}
        assert grammar(schema).notes == ()
        assert accepts(schema, around % good, around % bad) == [True, False]


@pytest.mark.parametrize(
    "one_of",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"const": 1.0}],
        [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 2}],
        [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/cat"}],
        [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}],
        [True, {"type": "null"}],
        [{"type": "null"}] * 2,
        [{"type": "boolean"}] * 100,
    ],
)
def test_one_of_that_may_overlap_is_held_as_any_of(one_of: Any) -> None:
    schema = {"type": "array", "items": {"oneOf": one_of}, "$defs": DEFS}
    (note,) = grammar(schema).notes
    assert note == "schema: oneOf is held as anyOf: a value may match several of its branches"
    assert accepts(schema, "[]") == [True]


def test_one_of_in_every_place_that_takes_a_schema() -> None:
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 9}], "$defs": {}}
    lark = f'start: "<" %json {json.dumps(overlapping)} ">" | "%json {{}}"'
    inline = GrammarSource("grammar", lark, "grammar")
    assert grammar(inline).notes[0].startswith("grammar: oneOf is held as anyOf")
    state = reply(inline)
    for text, fits in (("<3>", True), ("<true>", False), ("%json {}", True)):
        assert state.read([*ids(text), END]).ended == fits
    refs = properties({"oneOf": PETS, "discriminator": {"propertyName": "kind"}}) | {"$defs": DEFS}
    for strict in (True, False):
        made = source(refs, strict=strict, required=True)
        assert ends(made, call(f"{{x:{{kind:{Q}puppy{Q}}}}}"))
        assert not ends(made, call(f"{{x:{{kind:{Q}cow{Q}}}}}"))
        assert made.compile(TOKENS).notes == ()
    answer = schema_source(overlapping, "format")
    beside = source(refs, answer=answer)
    assert ends(beside, "3") and not ends(beside, '"3"')
    assert beside.compile(TOKENS).notes[0].startswith("format: oneOf is held as anyOf")


def test_the_tag_of_a_union_is_written_even_where_it_has_a_default() -> None:
    tagged = {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {
            name: {
                "type": "object",
                "properties": {"kind": {"const": name, "default": name}, "n": {"type": "integer"}},
                "additionalProperties": False,
            }
            for name in "ab"
        },
    }
    assert grammar(tagged).notes == ()
    assert accepts(tagged, '{"kind": "b"}', "{}", '{"n": 1}') == [True, False, False]


SAME: list[tuple[Schema, list[Any]]] = [
    ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}, []),
    ({"type": "array", "items": {"$ref": "#/$defs/e"}, "uniqueItems": True, "minItems": 2}, []),
    ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 1}, []),
    ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, []),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, []),
    ({"type": "array", "uniqueItems": False, "items": {"const": "a"}}, []),
    ({"type": "array", "items": {"enum": [1, 1.0, "a"]}, "uniqueItems": True}, []),
    ({"type": "string", "uniqueItems": True}, []),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, []),
    ({"type": "object", "propertyNames": {"const": "a"}, "additionalProperties": {"const": 1}}, []),
    ({"type": "object", "propertyNames": {"$ref": "#/$defs/e"},
      "additionalProperties": {"type": "array", "items": {"const": "a"}}}, []),
    ({"propertyNames": {"enum": ["a", "b"]}, "properties": {"a": {"const": 1}, "c": {}},
      "additionalProperties": {"const": True}}, []),
    ({"propertyNames": {"enum": ["a", "b"]}, "properties": {"a": {"const": 1}},
      "additionalProperties": False, "required": ["a"]}, []),
    ({"type": "object", "propertyNames": False}, []),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "minProperties": 1}, []),
    ({"type": "object", "propertyNames": {"pattern": "^[ab]$"}}, []),
    ({"type": "object", "propertyNames": {"type": "string", "maxLength": 1}}, []),
    ({"type": "object", "propertyNames": {"type": "string"}}, []),
    ({"type": "object", "propertyNames": {"maxLength": 0}, "additionalProperties": False}, []),
    ({"type": ["object", "null"], "propertyNames": {"enum": ["c"]}}, []),
    ({"type": "string", "format": "password"}, []),
    ({"type": "integer", "format": "int32"}, []),
]  # fmt: skip


def test_keywords_that_grammars_lack_are_held_in_other_words() -> None:
    scalars: list[Any] = ["a", "b", "c", "", 1, True, None, ["a"]]
    lists = [list(each) for size in range(4) for each in product(["a", "b", True, 1], repeat=size)]
    objects = [
        dict(zip(names, values, strict=True))
        for names in ([], ["a"], ["b"], ["c"], ["a", "b"], ["a", "c"], ["cc"])
        for values in product([1, True, ["a"]], repeat=len(names))
    ]
    for plain, _ in SAME:
        schema = plain | {"$defs": {"e": {"enum": ["a", "b"], "title": "E"}}}
        made, notes = held(schema)
        assert notes == (), schema
        grammar(schema)
        one, other = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(made)
        for value in [*scalars, *lists, *objects]:
            assert one.is_valid(value) == other.is_valid(value), (schema, made, value)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (SAME[0][0], ("[]", '["b", "a"]', '["c", "b", "a"]'), ('["a", "a"]', '["a", "d"]')),
        (SAME[9][0], ("{}", '{"a": 1}'), ('{"a": 2}', '{"b": 1}')),
        (SAME[14][0], ('{"a": 1}', '{"b": 1, "a": null}'), ("{}", '{"c": 1}')),
        (SAME[15][0], ("{}", '{"b": [1]}'), ('{"c": 1}', '{"ab": 1}')),
        (SAME[16][0], ('{"": 1}', '{"é": 1}'), ('{"ab": 1}',)),
    ],
)
def test_a_grammar_holds_these_words(
    schema: Schema, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    assert all(accepts(schema, *good)) and not any(accepts(schema, *bad))


def test_names_with_signs_are_held_as_they_are() -> None:
    names = ["a b", "a-b", "x.y", "(", 'q"t', "n\nl", "é"]
    schema = {"type": "object", "propertyNames": {"enum": names}, "minProperties": 1}
    assert all(accepts(schema, *(json.dumps({name: 1}, ensure_ascii=False) for name in names)))
    assert accepts(schema, '{"xzy": 1}', '{"a": 1}') == [False, False]


@pytest.mark.parametrize(
    ("schema", "note"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"enum": [*"abcdef"]}, "uniqueItems": True}, "uniqueItems"),
        ({"type": ["array", "null"], "uniqueItems": True}, "uniqueItems"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"enum": [[1]]}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"format": "uuid"}}, "propertyNames"),
        ({"type": "object", "propertyNames": {"not": {}}}, "propertyNames"),
        ({"type": "object", "propertyNames": {"pattern": "^a", "maxLength": 2}}, "propertyNames"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}}, "propertyNames"),
        ({"propertyNames": {"enum": ["a"]}, "patternProperties": {"^a": {}}}, "propertyNames"),
        ({"propertyNames": {"enum": [f"n{i}" for i in range(401)]}}, "propertyNames"),
        ({"type": "string", "format": "ipv4network"}, "format 'ipv4network'"),
        ({"format": "x" * 1000}, "format 'xxx"),
        ({"type": "string", "contentSchema": {"type": "array"}}, "contentSchema"),
        ({"type": "string", "pattern": "^(?!x)a+$"}, "pattern: what looks ahead"),
    ],
)
def test_what_cannot_be_held_is_left_out_with_a_note(schema: Schema, note: str) -> None:
    made = grammar(schema)
    assert len(made.notes) == 1 and made.notes[0].startswith(f"schema: {note}")
    assert len(made.notes[0]) < 200
    in_calls = source(properties(schema)).compile(TOKENS).notes
    if "type" in schema and isinstance(schema["type"], str) and "patternProperties" not in schema:
        assert in_calls and in_calls[0].startswith(f"tools[0]: {note}")


def test_notes_are_few() -> None:
    many = {"anyOf": [{"type": "string", "format": f"f{i}"} for i in range(50)]}
    notes = grammar(many).notes
    assert (
        len(notes) == MOST_NOTES + 1
        and notes[-1] == "schema: 42 more parts of the schema are not held"
    )
    lark = "\n".join(
        ["start: " + " | ".join(f"r{i}" for i in range(50))]
        + [f'r{i}: %json {{"type": "string", "format": "f{i}"}}' for i in range(50)]
    )
    assert len(grammar(GrammarSource("grammar", lark, "grammar")).notes) == MOST_NOTES + 1


def test_data_and_names_are_not_read_as_keywords() -> None:
    schema: Schema = {
        "type": "object",
        "properties": {
            "format": {"const": {"format": "x", "uniqueItems": True}},
            "uniqueItems": {"type": "boolean"},
            "oneOf": {"enum": [{"oneOf": 1}]},
            "x-a": {"default": {"propertyNames": 3}},
            "discriminator": {"type": "null"},
        },
    }
    assert held(schema) == (schema, ())
    unread = {"type": "integer", "$defs": {"a": {"uniqueItems": True}}, "format": 5}
    assert held(unread) == (unread, ()), "nothing refers to it"


@pytest.mark.parametrize(
    ("pattern", "text", "bad"),
    [
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ("-0.5", "12", ".5", "7."), ("", "-", ".", "1.2.3")),
        (r"^(?!a)(?=.*(b|\)))[ab)]{2}$", ("ab", "b)"), ("abb",)),
        (r"^x(?<!y)*y[(?=]$", ("xy(", "xy=", "xy?"), ("x(",)),
        (r"^\(\?=a$", ("(?=a",), ("a",)),
    ],
)
def test_patterns_without_what_looks_ahead(
    pattern: str, text: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert all(accepts(schema, *map(json.dumps, text)))
    assert not any(accepts(schema, *map(json.dumps, bad)))
    assert not any(re.search(pattern, each) for each in bad)


def test_uuids_of_a_version() -> None:
    four, five = "0b2e7c1a-1111-4222-8333-0123456789ab", "0b2e7c1a-1111-5222-8333-0123456789ab"
    schema = {"type": "string", "format": "uuid4"}
    assert accepts(schema, f'"{four}"', f'"{five}"', '"x"') == [True, False, False]
    assert grammar(schema).notes == ()


NAMES = {"enum": [f"name-{i}" for i in range(400)]}


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"propertyNames": {"$ref": "#/$defs/n"}}] * 5000, "$defs": {"n": NAMES}},
        {"oneOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"anyOf": [{"oneOf": [{"$ref": "#"}] * 40}] * 400},
        {"oneOf": [{"$ref": "#/oneOf/0"}]},
        {"$defs": {"e": {"enum": [*range(10_000)]}},
         "anyOf": [{"oneOf": [{"$ref": "#/$defs/e"}] * 60}] * 150},
        {"type": "string", "pattern": "(?=" + "[" * 200_000},
        {"type": "string", "pattern": "(?=" * 80_000},
        {"oneOf": [{"properties": {"t" * 50_000: {}}}] * 4,
         "discriminator": {"propertyName": "t" * 50_000}},
        {"type": "object", "propertyNames": {"$ref": "#/$defs/a"},
         "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": 5, "format": ["x"], "pattern": 3, "uniqueItems": 1, "propertyNames": 2,
         "oneOf": 7, "anyOf": {}, "properties": [], "required": 1, "items": [1, {"type": {}}],
         "discriminator": {"propertyName": []}, "$ref": [], "allOf": [None, []]},
        {"type": "array", "minItems": -1, "maxItems": 1e9, "uniqueItems": True, "items": NAMES},
        {"oneOf": [{"type": ["x", {}], "enum": {}, "required": [1, []], "properties": 4}] * 2},
    ],
    ids=range(12),
)  # fmt: skip
def test_hostile_schemas_take_little(schema: Any) -> None:
    began = time.perf_counter()
    text = json.dumps(schema)
    made, notes = held_schema(json.loads(text), "s")
    assert len(json.dumps(made)) <= len(text) + 2**16 and len(notes) <= MOST_NOTES + 1
    assert time.perf_counter() - began < 10  # a tenth of that on a machine that does nothing else


def test_deep_schemas_are_no_recursion() -> None:
    schema: Any = {"type": "array", "uniqueItems": True}
    for _ in range(50_000):
        schema = {"type": "array", "uniqueItems": True, "items": schema}
    _, notes = held_schema(schema, "s")
    assert notes == ("s: uniqueItems is not held: items may repeat",)
    while schema:  # else its destruction recurses
        schema = schema.pop("items", None)
