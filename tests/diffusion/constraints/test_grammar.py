"""Grammars over a vocabulary: what may follow, what is forced, and what is refused in words."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tests.support.scripted_model import END, END_IDS, VOCABULARY, tokenizer

from sfumato.diffusion.constraints.constrained_reply import (
    Constraint,
    ShortCompletion,
)
from sfumato.diffusion.constraints.grammar import (
    LONGEST_SOURCE,
    Grammar,
    GrammarSource,
    GrammarState,
    GrammarTokens,
    _Wrapper,
    choice_source,
    schema_source,
)

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def tokens() -> GrammarTokens:
    text = tokenizer()

    def pieces() -> list[bytes]:
        ids = range(text.vocab_size)
        return [text.bytes_of(i) or text.token_text(i).encode() for i in ids]

    return GrammarTokens(
        pieces, text.special_ids, END_IDS, lambda plain: text.encode(plain, special=False)
    )


TOKENS = tokens()


def grammar(source: GrammarSource | dict[str, Any]) -> Grammar:
    made = source if isinstance(source, GrammarSource) else schema_source(source)
    return made.compile(TOKENS)


def reply(source: GrammarSource | dict[str, Any], **how: Any) -> GrammarState:
    return Constraint(grammar(source), **how).begin()


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


def shown(mask: Any) -> set[str]:
    return {tokenizer().token_text(i) for i in mask.nonzero()[:, 0].tolist()}


def test_a_reply_is_read_up_to_the_first_break() -> None:
    state = reply(PERSON)
    reading = state.read(ids('{"name": "Ann", "age": 7}<turn|><pad><pad>'))
    assert (reading.valid, reading.ended) == (25, True)
    reading = state.read(ids('{"name": "Ann", "age": seven}<turn|>'))
    assert (reading.valid, reading.ended) == (len('{"name": "Ann", "age": '), False)
    assert state.read(ids('{"name": "A<turn|>')).ended is False, "an end token that may not come"
    assert state.read(ids('{"name": "A')).valid == 11
    assert state.read([VOCABULARY["{"], 10**6]).valid == 1, "an id that no token has"


def test_what_is_forced_comes_as_the_tokenizer_writes_it() -> None:
    state = reply(PERSON)
    following = state.following()
    assert following.forced == ids("{") and not state.is_complete
    assert shown(following.mask) == {
        " ",
        "\n",
        '"',
        "<0x20>",
        "<0x0A>",
        "<0x0D>",
        "<0x09>",
        "<0x22>",
    }
    state.take(ids('{"name":"x","age":1'))
    assert "}" in shown(state.following().mask)
    state.take(ids("}"))
    following = state.following()
    assert state.is_complete and shown(following.mask) == {"<eos>", "<turn|>"}
    assert state.is_complete


def test_white_space_is_bounded() -> None:
    state = reply(PERSON)
    assert state.read(ids('{\n                    "name"')).valid == 1 + 1 + 20 + 6
    assert state.read(ids('{\n                     "name"')).valid == 1 + 1 + 20
    assert state.read(ids('{   "name"')).valid == 3
    assert state.read(ids(' {"name"')).valid == 0


def test_a_thought_is_free_and_comes_first() -> None:
    thought = (VOCABULARY["<|channel>"], VOCABULARY["<channel|>"])
    state = reply(PERSON, thought=thought)
    text = "<|channel>thought\nHm, what? }{<channel|>"
    assert state.read(ids(text)).valid == len(ids(text))
    reading = state.read(ids(text + '{"name": 3'))
    assert reading.valid == len(ids(text)) + len('{"name": ')
    assert state.read(ids('{"na')).valid == 4, "it need not think"
    mask = shown(state.following().mask)
    assert "<|channel>" in mask and "{" in mask and "a" not in mask
    state.take(ids("<|channel>tho"))
    assert state.thinks and "<turn|>" not in shown(state.following().mask)
    assert state.read(ids("ught<turn|>")).valid == 4, "no reply ends in its thought"
    state.take(ids("ught<channel|>{"))
    assert state.thinks is False and state.read(ids('"name"')).valid == 6


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (GrammarSource("regex", r"^\d{3}-[a-z]+$", "regex"), "123-abc", "12"),
        (choice_source(["yes", "no", 'a "b"']), 'a "b"', "maybe"),
        (GrammarSource("grammar", 'root ::= "x" [0-9]+ ("," [a-c])*', "grammar"), "x12,a", "x,"),
        (GrammarSource("grammar", 'start: "a" B+\nB: /[bc]/', "grammar"), "abcb", "b"),
        (schema_source(True), '{"a": [1, null]}', "x"),
    ],
)
def test_kinds_of_sources(source: GrammarSource, good: str, bad: str) -> None:
    state = reply(source)
    assert state.read([*ids(good), END]).ended
    assert state.read([*ids(bad), END]).ended is False


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"type": "object", "dependentSchemas": {}}, 'schema: "dependentSchemas" is not supported'),
        ({"type": "strin"}, "schema: invalid type: strin"),
        ({"type": "integer", "multipleOf": 10_007}, "schema: multipleOf: 10007 is too large"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "schema: unsatisfiable"),
        ({"$ref": "#"}, "schema: no text of .* can begin to match it; .* leads back to itself"),
        (GrammarSource("grammar", 'root ::= root "a"', "grammar"), "grammar: no text of .* rule"),
        ({"$ref": "http://x.example/y"}, "schema: .*http://x.example/y"),
        (GrammarSource("regex", "(a", "guided_regex"), "guided_regex: .*unclosed group"),
        (GrammarSource("regex", "(?=a)b", "regex"), "regex: .*look-around"),
        (GrammarSource("grammar", 'root = "a"', "grammar"), "grammar: is neither GBNF nor Lark"),
        (GrammarSource("grammar", 'root ::= "x"\nstart ::= "y"', "grammar"), "grammar: is neither"),
        (GrammarSource("grammar", 'root ::= [^"] <b>', "grammar"), "grammar: '<b>' stands for"),
        ({"minimum": 2**53 + 1}, "schema: minimum: 9007199254740993 is beyond 2.53"),
        ({"enum": [1, {"a": [10**30]}]}, "schema: enum: 1000000000000000000000000000000 is bey"),
        (GrammarSource("grammar", 'root ::= "a" b', "grammar"), "grammar: .*'b' not found"),
        (GrammarSource("grammar", 'start: "a" <[7]>', "grammar"), r"grammar: '<\[7\]>' stands for"),
        (GrammarSource("grammar", 'start: <|turn> "<b>"', "grammar"), "grammar: .*<|turn>"),
    ],
)  # fmt: skip
def test_what_is_refused_says_why(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        grammar(source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_large_sources_are_refused_at_once() -> None:
    began = time.perf_counter()
    with pytest.raises(ValueError, match=r"schema: has .* characters, and at most 262,144"):
        schema_source({"enum": ["x" * 1000] * 1000})
    with pytest.raises(ValueError, match="schema: is no JSON"):
        schema_source({"default": float("nan")})
    with pytest.raises(ValueError, match="schema: must be a JSON schema"):
        schema_source("object")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="choice: must be 1 to"):
        choice_source([])
    assert time.perf_counter() - began < 1


SHORT = {"type": "string", "maxLength": 50}


@pytest.mark.parametrize(
    "source",
    [
        GrammarSource("regex", "(a{1,1000}){1,1000}", "regex"),
        GrammarSource("regex", "(?:(?:(?:x{0,50}){0,50}){0,50}){0,50}", "regex"),
        GrammarSource("regex", "(.*a.*){30}", "regex"),
        schema_source({"type": "array", "minItems": 10**6}),
        schema_source({"enum": [f"value {i}" for i in range(12_000)]}),
        schema_source({"type": "integer", "multipleOf": 999_983}),
        schema_source({"type": "number", "multipleOf": 0.999983}),
        GrammarSource(
            "grammar", 'start: %json {"type": "integer", "multipleOf": 999983}', "grammar"
        ),
        schema_source(
            {
                "$ref": "#/$defs/d0",
                "type": "integer",
                "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2_000)},
            }
        ),
        schema_source(
            {
                "type": "array",
                "items": False,
                "prefixItems": [{"type": "integer", "multipleOf": 9_900 + i} for i in range(20)],
            }
        ),
        schema_source({"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}),
        schema_source({"type": "object", "properties": {f"p{i}": SHORT for i in range(4_000)}}),
        schema_source({"type": "object", "patternProperties": {f"^p{i}x": {} for i in range(300)}}),
        schema_source({"allOf": [{"type": "string", "pattern": f".*a{i}"} for i in range(20)]}),
        schema_source(
            {
                "allOf": [
                    {
                        "anyOf": [
                            {"type": "object", "properties": {f"p{i}{j}": SHORT}} for j in range(4)
                        ]
                    }
                    for i in range(6)
                ]
            }
        ),
    ],
)
def test_bombs_are_bounded(source: GrammarSource) -> None:
    """They compile or are refused within a second, and so is each of the first masks."""
    assert len(source.text) <= LONGEST_SOURCE
    began = time.perf_counter()
    try:
        state = reply(source)
        for _ in range(20):
            following = state.following()
            state.take(following.forced or following.mask.nonzero()[0].tolist())
    except ValueError as error:
        assert str(error).startswith(source.field)
    assert time.perf_counter() - began < 3  # a second on a machine that does nothing else


def test_forced_bytes_that_end_within_a_character() -> None:
    """Are tokens of single bytes, where the vocabulary has them."""
    made = _Wrapper(TOKENS.tokens, END_IDS[0], sorted(TOKENS.special_ids), TOKENS.encode)
    price = "ab€c".encode()
    assert made(price) == ids("ab€c") == made("ab€c") and made(b"") == []
    for cut in (3, 4):
        written = made(price[:cut])
        assert b"".join(TOKENS.tokens[i] for i in written) == price[:cut]
        assert written[:2] == ids("ab")
    assert made(b"\xac" + b"c")[1:] == ids("c"), "nor one that begins within a character"
    poor = _Wrapper([b"a", b"b"], 1, (), lambda plain: [0] * len(plain))
    assert poor(price[:3]) == [0, 0]


def test_a_literal_that_no_token_writes_is_named() -> None:
    text = tokenizer()
    ids_of_all = range(text.vocab_size)
    plain = GrammarTokens(
        lambda: [b"" if text.bytes_of(i) else text.token_text(i).encode() for i in ids_of_all],
        text.special_ids,
        END_IDS,
        lambda plain: text.encode(plain, special=False),
    )  # fmt: skip
    assert plain.alphabet and "é" not in plain.alphabet and TOKENS.alphabet is None
    for schema in ({"enum": ["tea", "café"]}, {"properties": {"café": {"type": "string"}}}):
        with pytest.raises(ValueError, match=r"schema: 'café' cannot be written .* lacks 'é'"):
            schema_source(schema).compile(plain)
    schema_source({"description": "é", "enum": ["tea"]}).compile(plain)


@pytest.mark.parametrize(
    ("source", "begun"),
    [
        (PERSON, ""),
        (PERSON, '{"name": "Anna-Lena of '),
        (PERSON, '{"name": "A\\'),
        ({"type": "array", "items": PERSON, "minItems": 2}, '[{"name": "x", "age": 12'),
        ({"type": "string", "minLength": 10}, '"abc'),
        ({"type": "object"}, '{"a": {"b": [1, {"c": tr'),
        (GrammarSource("regex", "[a-z]+[0-9]{3}", "regex"), "a"),
        ({"type": "string", "format": "email"}, '"a.b'),
        ({"type": "object", "properties": {"e": {"type": "string", "format": "email"}}}, '{"e": "'),
        ({"type": "string", "pattern": "^#.+#$"}, ""),
        ({"type": "string", "pattern": "^[a-z}]+x$"}, '"q'),
    ],
)
def test_a_short_completion_closes_what_is_open(source: Any, begun: str) -> None:
    state = reply(source)
    state.take(ids(begun))
    completion = ShortCompletion(Constraint(grammar(source))).find(state, 60)
    assert completion is not None and len(completion) <= 60
    assert state.read([*completion, END]).ended
    if not isinstance(source, GrammarSource):
        json.loads(tokenizer().decode([*ids(begun), *completion]))
    least = len(completion)
    assert ShortCompletion(Constraint(grammar(source))).find(state, least - 1) is None


def test_quotes_in_a_class_open_no_text() -> None:
    source = GrammarSource("grammar", 'root ::= [^"]+ "<b>"', "grammar")
    state = reply(source)
    assert state.read([*ids("x<b>"), END]).ended
