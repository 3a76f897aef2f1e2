"""What a caller asks a reply to match, and the grammar that llguidance makes of it.

A source is checked here as far as that needs no vocabulary: its size, and what would reach behind
the text (terminals that name tokens).  Raises ValueError whose message begins with the field's
name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sfumato.diffusion.constraints.depth import check_groups, check_rules
from sfumato.diffusion.constraints.grammar_tokens import llguidance
from sfumato.diffusion.constraints.held_schema import MOST_NOTES, held_schema
from sfumato.diffusion.constraints.schema_limits import check_schema
from sfumato.refused import Refused
from sfumato.weights.errors import quoted

Kind = Literal["schema", "regex", "choice", "grammar"]

LONGEST_SOURCE = 2**18
"""Characters of a source: a schema of that length that `schema_limits` lets pass compiles in about
half a second of CPU."""
MOST_CHOICES = 4096
MOST_INDENT = 20
"""Characters of white space before a line of a JSON text; within a line there are at most two."""

_SPACE = rf"[\x20\x09]{{1,2}}|\r?\n[\x20\x09]{{0,{MOST_INDENT}}}"
_ONE_OF = {"coerce_one_of": True}
_JSON_OPTIONS = {"whitespace_pattern": _SPACE} | _ONE_OF
# Texts and regular expressions of Lark and GBNF, in which a < has no meaning.
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*|\#[^\n]*')
# Of GBNF texts, classes, in which a quote has no meaning, and comments.
_OF_GBNF = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|\#[^\n]*')
_TOKEN = re.compile(r"<[^\s<>]{0,80}>?")
_INLINE = re.compile(r"%json\s*")
_INLINE_OR_QUOTED = re.compile(rf"{_QUOTED.pattern}|({_INLINE.pattern})")
_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|start\s*:(?!:=))")


@dataclass(frozen=True)
class GrammarSource:
    """What a reply has to match."""

    kind: Kind
    text: str  # a JSON schema, a regular expression, a JSON list of texts, or GBNF or Lark
    field: str = "schema"  # what messages call it

    def __post_init__(self) -> None:
        if len(self.text) > LONGEST_SOURCE:
            raise Refused(
                self.field,
                f"has {len(self.text):,} characters, and at most {LONGEST_SOURCE:,} are read",
                "make it smaller",
            )

    def held(self) -> tuple[GrammarSource, tuple[str, ...]]:
        """The source with its JSON schemas as grammars can hold them, and notes about what of the
        schemas is not held. Raises ValueError."""
        room = LONGEST_SOURCE - len(self.text)
        if self.kind == "schema":
            text, notes = _held_text(json.loads(self.text), self.field, room)
            return replace(self, text=text), notes
        if self.kind != "grammar" or not self._is_lark():
            return self, ()
        parts, all_notes, at = list[str](), dict[str, None](), 0
        for start, end, schema in _inline_spans(self.text):
            options = _ONE_OF if '"oneOf"' in self.text[start:end] else {}
            text, notes = _held_text(schema, self.field, room, options)
            room -= max(0, len(text) - (end - start))
            parts += [self.text[at:start], text]
            all_notes |= dict.fromkeys(notes)
            at = end
        held = replace(self, text="".join([*parts, self.text[at:]]))
        return held, tuple(all_notes)[: MOST_NOTES + 1]

    def compiled(self) -> str:
        """The grammar as llguidance takes it, unchecked. Raises ValueError."""
        matcher = llguidance().LLMatcher
        if self.kind == "schema":
            check_schema(json.loads(self.text), self.field)
            grammar: str = matcher.grammar_from_json_schema(self.text, overrides=_JSON_OPTIONS)
        elif self.kind == "regex":
            check_groups(self.text, self.field)
            grammar = matcher.grammar_from_regex(_without_anchors(self.text))
        elif self.kind == "choice":
            choices = (json.dumps(text, ensure_ascii=False) for text in json.loads(self.text))
            grammar = matcher.grammar_from_lark("start: " + " | ".join(choices))
        else:
            grammar = matcher.grammar_from_lark(self._lark())
        return grammar

    def inline(self) -> str:
        """A schema with its options, to stand in a Lark grammar."""
        schema = json.loads(self.text)
        return json.dumps(schema | {"x-guidance": _JSON_OPTIONS}, ensure_ascii=False)

    def literals(self) -> Iterator[str]:
        """Texts that a reply has to hold as they are, or one of which it has to be."""
        if self.kind == "schema":
            yield from _schema_literals(json.loads(self.text))
        elif self.kind == "choice":
            yield from json.loads(self.text)
        elif self.kind == "grammar":
            for match in self._marked().finditer(self.text):
                if match[0][0] == '"':
                    yield match[0][1:-1]

    def _is_lark(self) -> bool:
        return _LARK.search(self.text) is not None

    def _marked(self) -> re.Pattern[str]:
        """What has a meaning of its own in a grammar, and is looked at no further."""
        return _QUOTED if self._is_lark() else _OF_GBNF

    def _lark(self) -> str:
        plain = self._marked().sub(" ", self.text)
        named = _TOKEN.search(plain)
        if named is not None:
            raise Refused(
                self.field,
                f"{quoted(named[0])} stands for a token, and a grammar is of text alone",
                "write the text in quotes",
            )
        check_rules(plain, self._is_lark(), self.field)
        if self._is_lark():
            for match in _QUOTED.finditer(self.text):
                if match[0][0] == "/":
                    check_groups(match[0], self.field)
            for schema in _inline_schemas(self.text):
                check_schema(schema, self.field)
            return self.text
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            lark: str = gbnf_to_lark(self.text)
        except Exception as error:  # bare Exceptions, and IndexErrors at the end of a text
            why = str(error) or "it ends too early"
            raise Refused(self.field, f"is neither GBNF nor Lark: {why}") from None
        return lark


def _inline_schemas(lark: str) -> Iterator[Any]:
    """All that may be a JSON schema in a Lark grammar; what is no JSON llguidance refuses."""
    for match in _INLINE.finditer(lark):
        try:
            yield json.JSONDecoder().raw_decode(lark, match.end())[0]
        except (ValueError, RecursionError):
            continue


def _inline_spans(lark: str) -> Iterator[tuple[int, int, Any]]:
    """Where the JSON schemas of a Lark grammar begin and end, and each of them; none within a text
    or a regular expression of the grammar."""
    at = 0
    while match := _INLINE_OR_QUOTED.search(lark, at):
        at = match.end()
        if match[1] is None:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, at)
        except (ValueError, RecursionError):
            continue
        yield at, end, schema
        at = end


def _held_text(
    schema: Any, field: str, room: int, options: Mapping[str, Any] = {}
) -> tuple[str, tuple[str, ...]]:
    """A schema as grammars can hold it, in JSON, and notes about the rest. options: of llguidance,
    which the schema gets too. Raises ValueError."""
    schema, notes = held_schema(schema, field, room)
    if options and isinstance(schema, dict):
        given = schema.get("x-guidance", {})
        schema["x-guidance"] = {**given, **options} if isinstance(given, dict) else given
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":")), notes
    except RecursionError:
        raise Refused(field, "its schemas stand too deeply in one another") from None


def schema_source(schema: Mapping[str, Any] | bool, field: str = "schema") -> GrammarSource:
    """Of a JSON schema as plain data. Raises ValueError."""
    if not isinstance(schema, Mapping | bool):
        raise Refused(field, f"must be a JSON schema, an object, got {quoted(schema)}")
    if schema is False:
        raise Refused(field, "false matches nothing")
    try:
        text = json.dumps({} if schema is True else schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(field, f"is no JSON ({error})") from None
    return GrammarSource("schema", text, field)


def schema_of_type(schema: Any) -> Any:
    """The JSON schema of a pydantic model; anything else as it is."""
    make = getattr(schema, "model_json_schema", None)
    return make() if isinstance(schema, type) and callable(make) else schema


def choice_source(choices: Sequence[str], field: str = "choice") -> GrammarSource:
    """Of texts of which the reply is to be one. Raises ValueError."""
    if not 0 < len(choices) <= MOST_CHOICES or not all(
        isinstance(text, str) and text for text in choices
    ):
        raise Refused(field, f"must be 1 to {MOST_CHOICES} texts that are not empty")
    return GrammarSource("choice", json.dumps(list(choices), ensure_ascii=False), field)


def _without_anchors(pattern: str) -> str:
    """The pattern without ^ at its beginning and $ at its end: it is matched as a whole anyway."""
    if any(char in pattern for char in "|") and pattern[:1] == "^":
        return pattern  # ^a|b$ anchors one side of each alternative
    pattern = pattern.removeprefix("^")
    escapes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and escapes % 2 == 0 else pattern


def _schema_literals(schema: Any) -> Iterator[str]:
    """Names of properties, and texts of `enum` and `const`, in a JSON schema."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            for key, value in part.items():
                if key == "properties" and isinstance(value, dict):
                    yield from value
                    pending += value.values()
                elif key in ("enum", "const"):
                    yield from _texts(value)
                elif isinstance(value, dict | list):
                    pending.append(value)


def _texts(value: Any) -> Iterator[str]:
    """Every text in plain data, the keys of objects too."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            yield from part
            pending += part.values()
        elif isinstance(part, list):
            pending += part
