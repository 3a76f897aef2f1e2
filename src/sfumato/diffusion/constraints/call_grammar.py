"""The grammar of a reply that calls tools, in the model's own syntax for calls, and JSON schemas as
rules of it.

`call:NAME{key:<quote>text<quote>,n:3}` is no JSON: texts stand between special tokens and have no
escapes, and names are bare.  Arguments match the schemas that are given, with the names of
properties in the schema's order, as in llguidance's grammars of JSON; any keyword that is not read
is an error that names it.  Arguments of tools without a schema are free.  A reply without calls is
free too, or matches a schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sfumato.diffusion.constraints.grammar import (
    LONGEST_SOURCE,
    Grammar,
    GrammarSource,
    GrammarTokens,
    check_alphabet,
    compiled_grammar,
    llguidance,
)
from sfumato.diffusion.constraints.held_schema import kinds_of
from sfumato.diffusion.constraints.schema_limits import check_numbers, check_schema, check_sum
from sfumato.refused import Refused

_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs"}
_NOTES |= {"definitions", "deprecated", "readOnly", "writeOnly"}
_OF_MAPS = {"patternProperties", "minProperties", "maxProperties"}
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties", *_OF_MAPS},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "boolean": set(),
    "null": set(),
}
_OF_TYPE["integer"] = _OF_TYPE["number"]
_MOST_RULES = 20_000


class CallRules:
    """Collects the rules of some schemas. Each method returns what refers to a rule or a text."""

    def __init__(self, quote: int) -> None:
        """quote: the token around texts."""
        self._quote = f"<[{quote}]>"
        self._rules: dict[str, str] = {}
        self._known: dict[tuple[int, str], str] = {}  # by root schema and reference
        self._roots: list[Any] = []  # kept, so that their ids stay their own

    def lines(self) -> Iterator[str]:
        """All rules."""
        return (f"{name}: {body}" for name, body in self._rules.items())

    def arguments(self, schema: Any, field: str) -> str:
        """The arguments of a call, an object. Raises ValueError, naming the field."""
        if not isinstance(schema, dict):
            raise Refused(field, "must be a JSON schema, an object")
        self._roots.append(schema)
        root = {"type": "object", **schema}
        check_numbers(schema, field)
        try:
            return _Schema(self, schema, field).rule(root, field)
        except RecursionError:
            raise Refused(field, "its schemas stand too deeply in one another") from None

    def add(self, body: str, kind: str = "r") -> str:
        """A rule of that body. kind: R for a regular expression that is put together."""
        if len(self._rules) >= _MOST_RULES:
            raise Refused("tools", "the schemas are too large", "make them smaller")
        name = f"{kind}{len(self._rules)}"
        self._rules[name] = body
        return name

    def reserve(self, root: Any, reference: str) -> tuple[str, bool]:
        """The rule of a reference, and whether it is new: then `fill` gives it its body."""
        key = id(root), reference
        is_new = key not in self._known
        if is_new:
            self._known[key] = self.add("")
        return self._known[key], is_new

    def fill(self, name: str, body: str) -> None:
        self._rules[name] = body

    def text(self, inner: str) -> str:
        """A text whose inside matches `inner`."""
        return f"{self._quote} {inner} {self._quote}" if inner else f"{self._quote} {self._quote}"

    def literal(self, value: Any) -> str:
        """A JSON value as calls write it."""
        if isinstance(value, str):
            return self.text(_quoted(value) if value else "")
        if isinstance(value, list):
            return _listed("[", [self.literal(each) for each in value], "]")
        if isinstance(value, dict):
            members = (f'{self.key(key)} ":" {self.literal(each)}' for key, each in value.items())
            return _listed("{", members, "}")
        return _quoted(json.dumps(value))

    def key(self, name: str) -> str:
        return _quoted(name) if _BARE.fullmatch(name) else self.text(_quoted(name))


class _Schema:
    """The rules of one schema with its references."""

    def __init__(self, rules: CallRules, root: Any, field: str) -> None:
        self._rules, self._root, self._field = rules, root, field

    def rule(self, schema: Any, where: str) -> str:
        """A rule for the values of a schema."""
        if schema is True or schema == {}:
            return self._any()
        if not isinstance(schema, dict):
            raise Refused(where, f"{json.dumps(schema)[:80]} is no schema that has values")
        if "$ref" in schema:
            self._check(schema, {"$ref"}, where)
            return self._reference(schema["$ref"], where)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                self._check(schema, {name}, where)
                return self._alternatives(schema[name], f"{where}.{name}")
        if "const" in schema or "enum" in schema:
            self._check(schema, {"const", "enum", "type"}, where)
            values = _listed_values(schema, where)
            return self._rules.add(" | ".join(map(self._rules.literal, values)))
        if "allOf" in schema and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
            self._check(schema, {"allOf"}, where)
            return self.rule(schema["allOf"][0], f"{where}.allOf[0]")
        kinds = schema.get("type", [kind for kind in _OF_TYPE if _OF_TYPE[kind] & schema.keys()])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not kinds:
            self._check(schema, set(), where)
            return self._any()
        if not isinstance(kinds, list) or not all(kind in _OF_TYPE for kind in map(str, kinds)):
            raise Refused(f"{where}.type", f"{json.dumps(kinds)[:80]} is no type")
        self._check(schema, {"type"}.union(*(_OF_TYPE[kind] for kind in kinds)), where)
        return self._rules.add(" | ".join(self._typed(kind, schema, where) for kind in kinds))

    def _check(self, schema: Mapping[str, Any], known: set[str], where: str) -> None:
        unknown = schema.keys() - known - _NOTES
        if unknown:
            raise Refused(
                where,
                f"{', '.join(sorted(unknown))} is not supported in the parameters of tools",
                "leave it out, or set strict to false",
            )

    def _alternatives(self, schemas: Any, where: str) -> str:
        if not isinstance(schemas, list) or not schemas:
            raise Refused(where, "must be a list of schemas")
        rules = [self.rule(schema, f"{where}[{i}]") for i, schema in enumerate(schemas)]
        return self._rules.add(" | ".join(rules))

    def _reference(self, reference: Any, where: str) -> str:
        parts = reference.split("/") if isinstance(reference, str) else [""]
        target = self._root
        try:
            if parts[0] != "#":
                raise KeyError(reference)
            for part in parts[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                target = target[int(part)] if isinstance(target, list) else target[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise Refused(
                where, f"$ref {json.dumps(reference)[:80]} is not in the schema"
            ) from None
        name, is_new = self._rules.reserve(self._root, reference)
        if is_new:
            self._rules.fill(name, self.rule(target, where))
        return name

    def _typed(self, kind: str, schema: Mapping[str, Any], where: str) -> str:
        if kind == "object":
            return self._object(schema, where)
        if kind == "array":
            return self._array(schema, where)
        if kind == "string":
            return self._string(schema, where)
        own = {key: schema[key] for key in _OF_TYPE[kind] if key in schema}
        return self._json({"type": kind, **own})

    def _json(self, schema: Mapping[str, Any]) -> str:
        """A value that calls write as JSON does."""
        return self._rules.add(f"%json {json.dumps(schema)}")

    def _string(self, schema: Mapping[str, Any], where: str) -> str:
        low, high = _bounds(schema, "minLength", "maxLength", where)
        if "format" in schema:  # as a JSON text, which calls may have too
            known = {
                key: schema[key]
                for key in ("format", "minLength", "maxLength", "pattern")
                if key in schema
            }
            return self._json({"type": "string", **known})
        if "pattern" in schema:
            pattern = _whole_pattern(schema["pattern"], f"{where}.pattern")
            if low or high is not None:
                lengths = _regex(f"(?s:.{{{low},{'' if high is None else high}}})")
                pattern = self._rules.add(f"{pattern} & {lengths}", "R")
            return self._rules.text(pattern)
        if high == 0:
            return self._rules.text("")
        some = self._rules.text(_regex(f"(?s:.{{{max(1, low)},{'' if high is None else high}}})"))
        return some if low else f"{some} | {self._rules.text('')}"

    def _array(self, schema: Mapping[str, Any], where: str) -> str:
        low, high = _bounds(schema, "minItems", "maxItems", where)
        if high == 0:
            return '"[" "]"'
        if "prefixItems" in schema:
            return self._tuple(schema, low, high, where)
        item = self.rule(schema.get("items", True), f"{where}.items")
        more = "*" if high is None and low <= 1 else f"{{{max(0, low - 1)},{_last(high)}}}"
        some = f'"[" {item} ("," {item}){more} "]"'
        return some if low else f'"[" "]" | {some}'

    def _tuple(self, schema: Mapping[str, Any], low: int, high: int | None, where: str) -> str:
        """A list whose first items have schemas of their own."""
        first, others = schema["prefixItems"], schema.get("items", True)
        if not isinstance(first, list) or not first:
            raise Refused(f"{where}.prefixItems", "must be a list of schemas")
        count = len(first) if high is None else min(high, len(first))
        rest = '""'
        if others is not False and count != high:
            item = self.rule(others, f"{where}.items")
            most = "" if high is None else high - count
            rest = self._rules.add(f'("," {item}){{{max(0, low - count)},{most}}}')
        for at in reversed(range(count)):
            item = self.rule(first[at], f"{where}.prefixItems[{at}]")
            body = f"{item} {rest}" if at == 0 else f'"," {item} {rest}'
            rest = self._rules.add(body if at < low else f'{body} | ""')
        return f'"[" {rest} "]"'

    def _map(self, schema: Mapping[str, Any], where: str) -> str:
        """An object whose names are free, or match patterns."""
        patterns = schema.get("patternProperties", {})
        others = schema.get("additionalProperties", False)
        if not isinstance(patterns, dict) or (patterns and others is not False):
            raise Refused(
                where,
                "patternProperties must be an object, and goes with no other properties",
                "set additionalProperties to false",
            )
        low, high = _bounds(schema, "minProperties", "maxProperties", where)
        if high == 0:
            return '"{" "}"'
        bare, members = f"/{_BARE.pattern}/", []
        if others is not False:
            value = self.rule(others, f"{where}.additionalProperties")
            members.append(f'{bare} ":" {value}')
        for pattern, each in patterns.items():
            text = _whole_pattern(pattern, f"{where}.patternProperties")
            names = self._rules.add(f"{text} & {bare}", "R")
            quoted = self._rules.text(self._rules.add(f"{text} & ~{bare}", "R"))
            value = self.rule(each, f"{where}.patternProperties")
            members.append(f'({names} | {quoted}) ":" {value}')
        member = self._rules.add(" | ".join(members))
        more = f'("," {member}){{{max(0, low - 1)},{_last(high)}}}'
        return f'"{{" {member} {more} "}}"' if low else f'"{{" ({member} {more})? "}}"'

    def _object(self, schema: Mapping[str, Any], where: str) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise Refused(where, "properties must be an object, and required a list")
        if not all(isinstance(name, str) for name in required):
            raise Refused(f"{where}.required", "must be a list of names")
        if missing := [name for name in required if name not in properties]:
            raise Refused(f"{where}.required", f"{missing[0]!r} is not among the properties")
        others, patterns = (
            schema.get("additionalProperties", False),
            schema.get("patternProperties"),
        )
        if not properties and (others is not False or patterns):
            return self._map(schema, where)
        if patterns:
            raise Refused(where, "patternProperties is not supported beside properties")
        least, most = _bounds(schema, "minProperties", "maxProperties", where)
        if least > len({*required}) or (most is not None and most < len(properties)):
            raise Refused(
                where,
                "minProperties and maxProperties are supported where no properties are named",
                "leave them out",
            )
        members = [
            (
                f'{self._rules.key(name)} ":" {self.rule(each, f"{where}.{name}")}',
                name in required,
            )
            for name, each in properties.items()
        ]
        return f'"{{" {self._members(members)} "}}"'

    def _members(self, members: Sequence[tuple[str, bool]]) -> str:
        """Members in order, those that are not required at will."""
        first = later = '""'  # what may follow where no member, or some, came before
        for member, required in reversed(members):
            first_body, later_body = f"{member} {later}", f'"," {member} {later}'
            if not required:
                first_body, later_body = f"{first_body} | {first}", f"{later_body} | {later}"
            first, later = self._rules.add(first_body), self._rules.add(later_body)
        return first

    def _any(self) -> str:
        name, is_new = self._rules.reserve(None, "any")
        if is_new:
            some = self._rules.text("TEXT?")
            plain = self._json({"type": ["number", "boolean", "null"]})
            member = f'/{_BARE.pattern}/ ":" {name}'
            items = f'"[" ({name} ("," {name})*)? "]"'
            members = f'"{{" ({member} ("," {member})*)? "}}"'
            self._rules.fill(name, f"{some} | {plain} | {items} | {members}")
        return name


def _listed_values(schema: Mapping[str, Any], where: str) -> list[Any]:
    """The values that `const` and `enum` name, and that are of the type."""
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list) or not values:
        raise Refused(f"{where}.enum", "must be a list of values")
    if "const" in schema:
        values = [value for value in values if _same(value, schema["const"])]
    kinds = schema.get("type", list(_OF_TYPE))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(kind in _OF_TYPE for kind in map(str, kinds)):
        raise Refused(f"{where}.type", f"{json.dumps(kinds)[:80]} is no type")
    fitting = [value for value in values if kinds_of(value) & {*kinds}]
    if not fitting:
        raise Refused(where, "nothing matches const, enum and type together")
    return fitting


def _same(value: Any, other: Any) -> bool:
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)


def _bounds(schema: Mapping[str, Any], low: str, high: str, where: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for name, value in ((low, least), (high, 0 if most is None else most)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 10**6:
            raise Refused(f"{where}.{name}", "must be a whole number from 0 to 1,000,000")
    if most is not None and least > most:
        raise Refused(where, f"{low} is larger than {high}, so that nothing matches")
    return least, most


def _last(high: int | None) -> str:
    return "" if high is None else str(high - 1)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    """A regular expression as Lark has it, with JSON schema's classes."""
    return f"/{llguidance().regex_to_lark(pattern, 'dw')}/"


def _whole_pattern(pattern: Any, where: str) -> str:
    """The regular expression of the texts in which a pattern is found. Raises ValueError."""
    if not isinstance(pattern, str):
        raise Refused(where, "must be a text")
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    inner = pattern.removeprefix("^")
    inner = inner.removesuffix("$") if not end else inner
    return _regex(f"{begin}(?:{inner}){end}")


def _listed(begin: str, parts: Any, end: str) -> str:
    inside = ' "," '.join(parts)
    return f'"{begin}" {inside} "{end}"' if inside else f'"{begin}" "{end}"'


@dataclass(frozen=True)
class CallTool:
    """A tool that may be called."""

    name: str
    schema: str | None  # its parameters as a JSON schema, in JSON; None: they are free
    field: str  # what messages call the schema
    is_strict: bool = True  # False: the parameters are free where their schema is not supported


@dataclass(frozen=True)
class CallSource:
    """Which calls a reply may have."""

    tools: tuple[CallTool, ...]
    opens: int  # the special tokens around a call, and around each text in it
    closes: int
    quote: int
    required: bool = False  # the reply is calls and nothing else
    single: bool = False  # one call at most
    answer: GrammarSource | None = None  # a JSON schema of replies without calls; None: any text

    def __post_init__(self) -> None:
        strict = (tool for tool in self.tools if tool.is_strict)
        if sum(len(tool.schema or "") for tool in strict) > LONGEST_SOURCE:
            raise Refused(
                "tools",
                f"the schemas of strict tools have more than {LONGEST_SOURCE:,} characters",
                "make them smaller",
            )

    def compile(self, tokens: GrammarTokens) -> Grammar:
        """Where the schema of a tool that is not strict cannot be held, a note of the grammar says
        so. Raises ValueError, naming the field of a tool's schema where it is at fault."""
        source, notes = self, list[str]()
        if self.answer is not None:  # first, so that an error of it names its field
            notes += self.answer.compile(tokens).notes
            source = replace(self, answer=self.answer.held()[0])
        source, more = _held(source)
        notes += more
        lenient = [t for t in source.tools if t.schema is not None and not t.is_strict]
        try:
            return replace(_compiled(source, tokens), notes=tuple(notes))
        except Refused as error:
            if not lenient:
                raise
            # Which of them is at fault only one compilation for each would say.
            notes += [_note(tool, str(error.about(tool.field))) for tool in lenient]
            tools = tuple(replace(t, schema=None) if t in lenient else t for t in source.tools)
            return replace(_compiled(replace(source, tools=tools), tokens), notes=tuple(notes))

    def lark(self) -> str:
        """The grammar. Raises ValueError, naming the field, for a schema that is not supported."""
        rules = CallRules(self.quote)
        calls = [self._call(tool, rules) for tool in self.tools]
        check_sum([json.loads(tool.schema) for tool in self.tools if tool.schema], "tools")
        many = "call" if self.single else "call+"
        if self.answer is not None:
            start = f"start: {many} | %json {self.answer.inline()}"
        else:
            start = f"start: {many}" if self.required else f"start: TEXT? ({many})?"
        lines = [
            start,
            f"call: <[{self.opens}]> ({' | '.join(calls)}) <[{self.closes}]>",
            f"loose: (TEXT | <[{self.quote}]>)*",
            "TEXT: /(?s:.+)/",
            *rules.lines(),
        ]
        return "\n".join(lines)

    def _call(self, tool: CallTool, rules: CallRules) -> str:
        begin = json.dumps(f"call:{tool.name}")
        if tool.schema is None:
            return f'{begin} "{{" loose'
        check_schema(json.loads(tool.schema), tool.field)
        return f"{begin} {rules.arguments(json.loads(tool.schema), tool.field)}"


def _compiled(source: CallSource, tokens: GrammarTokens) -> Grammar:
    """Raises ValueError."""
    for tool in source.tools:
        if tool.schema is not None:
            check_alphabet(GrammarSource("schema", tool.schema, tool.field), tokens)
    compiled = llguidance().LLMatcher.grammar_from_lark(source.lark())
    return compiled_grammar(compiled, "tools", tokens)


def _held(source: CallSource) -> tuple[CallSource, list[str]]:
    """The source with its tools' schemas as grammars can hold them, and notes about what is left
    out: all of the schema where the tool is not strict and there are no rules for it. Raises
    ValueError."""
    tools, notes, left = [], list[str](), LONGEST_SOURCE
    for tool in source.tools:
        try:
            left -= 0 if tool.is_strict else len(tool.schema or "")
            if left < 0:
                raise Refused(tool.field, "is too large")
            tool, more = _held_tool(tool, source.quote)
            notes += more
        except Refused as error:
            if tool.is_strict:
                raise
            notes.append(_note(tool, str(error.advising(""))))
            tool = replace(tool, schema=None)
        tools.append(tool)
    return replace(source, tools=tuple(tools)), notes


def _held_tool(tool: CallTool, quote: int) -> tuple[CallTool, tuple[str, ...]]:
    """Of one tool. Raises ValueError."""
    if tool.schema is None:
        return tool, ()
    held, notes = GrammarSource("schema", tool.schema, tool.field).held()
    if not tool.is_strict:  # those of strict tools are checked where their rules are made
        schema = json.loads(held.text)
        check_schema(schema, tool.field)
        CallRules(quote).arguments(schema, tool.field)
    return replace(tool, schema=held.text), notes


def _note(tool: CallTool, why: str) -> str:
    return f"{why}; the arguments of {tool.name!r} are not held to the schema"


Source = GrammarSource | CallSource
