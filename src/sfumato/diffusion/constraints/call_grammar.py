"""The grammar of a reply that calls tools, in the model's own syntax for calls, and JSON schemas as
rules of it.

A `CallWriting`, a value of the family, says what a call is written like.
`call:NAME{key:<quote>text<quote>,n:3}` is no JSON: texts stand between special tokens and have no
escapes, and names are bare; `CallRules` are of it, and llguidance's own of JSON.  Arguments match
the schemas that are given, with the names of properties in the schema's order, as in llguidance's
grammars of JSON; any keyword that is not read is an error that names it.  Arguments of tools
without a schema are free.  A reply without calls is free too, or matches a schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from sfumato.diffusion.constraints.grammar import (
    LONGEST_SOURCE,
    Grammar,
    GrammarSource,
    GrammarTokens,
    check_alphabet,
    compiled_grammar,
    llguidance,
    schema_source,
)
from sfumato.diffusion.constraints.held_schema import NOTES, kinds_of, value_key
from sfumato.diffusion.constraints.schema_limits import (
    References,
    check_multiples,
    check_numbers,
    check_schema,
)
from sfumato.refused import Refused

_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NOTES = NOTES | {"$schema", "$id", "$defs", "definitions"}
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

    free = '"{" loose'
    """Arguments without a schema."""

    def __init__(self, quote: int | None) -> None:
        """quote: the token around texts."""
        self._quote = f"<[{quote}]>"
        self._rules: dict[str, str] = {}
        self._known: dict[tuple[int, str], str] = {}  # by the number of a schema, and a reference
        self._schemas, self._referred = 0, References(None)

    def lines(self) -> Iterator[str]:
        """All rules."""
        yield f"loose: (TEXT | {self._quote})*"
        yield from (f"{name}: {body}" for name, body in self._rules.items())

    def arguments(self, schema: Any, field: str) -> str:
        """The arguments of a call, an object. Raises ValueError, naming the field."""
        if not isinstance(schema, dict):
            raise Refused(field, "must be a JSON schema, an object")
        check_numbers(schema, field)
        self._schemas, self._referred = self._schemas + 1, References(schema)
        try:
            return self._rule({"type": "object", **schema}, field)
        except RecursionError:
            raise Refused(field, "its schemas stand too deeply in one another") from None

    def _add(self, body: str, kind: str = "r") -> str:
        """A rule of that body. kind: R for a regular expression that is put together."""
        if len(self._rules) >= _MOST_RULES:
            raise Refused("tools", "the schemas are too large", "make them smaller")
        name = f"{kind}{len(self._rules)}"
        self._rules[name] = body
        return name

    def _once(self, key: tuple[int, str], body: Callable[[str], str]) -> str:
        """The rule of a key. body: called once, with the rule's name, which may be in it."""
        if key not in self._known:
            self._known[key] = name = self._add("")
            self._rules[name] = body(name)
        return self._known[key]

    def _text(self, inner: str) -> str:
        """A text whose inside matches `inner`."""
        return f"{self._quote} {inner} {self._quote}" if inner else f"{self._quote} {self._quote}"

    def _literal(self, value: Any) -> str:
        """A JSON value as calls write it."""
        if isinstance(value, str):
            return self._text(_quoted(value) if value else "")
        if isinstance(value, list):
            return _listed("[", map(self._literal, value), "]")
        if isinstance(value, dict):
            members = (f'{self._key(key)} ":" {self._literal(each)}' for key, each in value.items())
            return _listed("{", members, "}")
        return _quoted(json.dumps(value))

    def _key(self, name: str) -> str:
        return _quoted(name) if _BARE.fullmatch(name) else self._text(_quoted(name))

    def _rule(self, schema: Any, where: str) -> str:
        """A rule for the values of a schema."""
        if schema is True or schema == {}:
            return self._any()
        if not isinstance(schema, dict):
            raise Refused(where, f"{json.dumps(schema)[:80]} is no schema that has values")
        if "$ref" in schema:
            _check_keywords(schema, {"$ref"}, where)
            return self._reference(schema["$ref"], where)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                _check_keywords(schema, {name}, where)
                return self._alternatives(schema[name], f"{where}.{name}")
        if "const" in schema or "enum" in schema:
            _check_keywords(schema, {"const", "enum", "type"}, where)
            return self._add(" | ".join(map(self._literal, _listed_values(schema, where))))
        if "allOf" in schema and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
            _check_keywords(schema, {"allOf"}, where)
            return self._rule(schema["allOf"][0], f"{where}.allOf[0]")
        kinds = _kinds(schema, [kind for kind in _OF_TYPE if _OF_TYPE[kind] & schema.keys()], where)
        if not kinds:
            _check_keywords(schema, set(), where)
            return self._any()
        _check_keywords(schema, {"type"}.union(*(_OF_TYPE[kind] for kind in kinds)), where)
        return self._add(" | ".join(self._typed(kind, schema, where) for kind in kinds))

    def _alternatives(self, schemas: Any, where: str) -> str:
        if not isinstance(schemas, list) or not schemas:
            raise Refused(where, "must be a list of schemas")
        rules = [self._rule(schema, f"{where}[{i}]") for i, schema in enumerate(schemas)]
        return self._add(" | ".join(rules))

    def _reference(self, reference: Any, where: str) -> str:
        target = self._referred(reference)
        if target is None:
            raise Refused(where, f"$ref {json.dumps(reference)[:80]} is not in the schema")
        return self._once((self._schemas, reference), lambda name: self._rule(target, where))

    def _typed(self, kind: str, schema: Mapping[str, Any], where: str) -> str:
        made = {"object": self._object, "array": self._array, "string": self._string}
        return made[kind](schema, where) if kind in made else self._json(kind, schema)

    def _json(self, kind: str | list[str], schema: Mapping[str, Any]) -> str:
        """A value that calls write as JSON does."""
        known = _OF_TYPE[kind] if isinstance(kind, str) else set[str]()
        own = {key: each for key, each in schema.items() if key in known}
        return self._add(f"%json {json.dumps({'type': kind, **own})}")

    def _string(self, schema: Mapping[str, Any], where: str) -> str:
        low, high = _bounds(schema, "minLength", "maxLength", where)
        if "format" in schema:  # as a JSON text, which calls may have too
            return self._json("string", schema)
        if "pattern" in schema:
            pattern = _whole_pattern(schema["pattern"], f"{where}.pattern")
            if low or high is not None:
                lengths = _regex(f"(?s:.{{{low},{'' if high is None else high}}})")
                pattern = self._add(f"{pattern} & {lengths}", "R")
            return self._text(pattern)
        if high == 0:
            return self._text("")
        some = self._text(_regex(f"(?s:.{{{max(1, low)},{'' if high is None else high}}})"))
        return some if low else f"{some} | {self._text('')}"

    def _array(self, schema: Mapping[str, Any], where: str) -> str:
        low, high = _bounds(schema, "minItems", "maxItems", where)
        if high == 0:
            return '"[" "]"'
        if "prefixItems" in schema:
            return self._tuple(schema, low, high, where)
        item = self._rule(schema.get("items", True), f"{where}.items")
        return _repeated("[", item, "]", low, high)

    def _tuple(self, schema: Mapping[str, Any], low: int, high: int | None, where: str) -> str:
        """A list whose first items have schemas of their own."""
        first, others = schema["prefixItems"], schema.get("items", True)
        if not isinstance(first, list) or not first:
            raise Refused(f"{where}.prefixItems", "must be a list of schemas")
        count = len(first) if high is None else min(high, len(first))
        rest = '""'
        if others is not False and count != high:
            item = self._rule(others, f"{where}.items")
            most = "" if high is None else high - count
            rest = self._add(f'("," {item}){{{max(0, low - count)},{most}}}')
        for at in reversed(range(count)):
            item = self._rule(first[at], f"{where}.prefixItems[{at}]")
            body = f"{item} {rest}" if at == 0 else f'"," {item} {rest}'
            rest = self._add(body if at < low else f'{body} | ""')
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
            value = self._rule(others, f"{where}.additionalProperties")
            members.append(f'{bare} ":" {value}')
        for pattern, each in patterns.items():
            text = _whole_pattern(pattern, f"{where}.patternProperties")
            names = self._add(f"{text} & {bare}", "R")
            quoted = self._text(self._add(f"{text} & ~{bare}", "R"))
            value = self._rule(each, f"{where}.patternProperties")
            members.append(f'({names} | {quoted}) ":" {value}')
        member = self._add(" | ".join(members))
        return _repeated("{", member, "}", low, high)

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
                f'{self._key(name)} ":" {self._rule(each, f"{where}.{name}")}',
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
            first, later = self._add(first_body), self._add(later_body)
        return first

    def _any(self) -> str:
        def body(name: str) -> str:
            some = self._text("TEXT?")
            plain = self._json(["number", "boolean", "null"], {})
            member = f'/{_BARE.pattern}/ ":" {name}'
            items = f'"[" ({name} ("," {name})*)? "]"'
            members = f'"{{" ({member} ("," {member})*)? "}}"'
            return f"{some} | {plain} | {items} | {members}"

        return self._once((0, "any"), body)


class JsonRules:
    """Collects the rules of schemas whose values are JSON."""

    free = "free"

    def __init__(self, quote: int | None) -> None:
        self._rules = [f"{self.free}: {_json_rule({'type': 'object'}, '')}"]

    def lines(self) -> Iterator[str]:
        """All rules."""
        yield from self._rules

    def arguments(self, schema: Any, field: str) -> str:
        """The arguments of a call, an object. Raises ValueError, naming the field."""
        if not isinstance(schema, dict):
            raise Refused(field, "must be a JSON schema, an object")
        check_numbers(schema, field)
        self._rules.append(
            f"r{len(self._rules)}: {_json_rule({'type': 'object', **schema}, field)}"
        )
        return f"r{len(self._rules) - 1}"


def _json_rule(schema: Mapping[str, Any], field: str) -> str:
    return f"%json {schema_source(schema, field).inline()}"


RULES: Mapping[str, type[CallRules] | type[JsonRules]] = {"bare": CallRules, "json": JsonRules}
"""By `CallWriting.arguments`."""


def _check_keywords(schema: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = schema.keys() - known - _NOTES
    if unknown:
        raise Refused(
            where,
            f"{', '.join(sorted(unknown))} is not supported in the parameters of tools",
            "leave it out, or set strict to false",
        )


def _kinds(schema: Mapping[str, Any], default: list[str], where: str) -> list[str]:
    """The types that a schema names."""
    kinds = schema.get("type", default)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(kind in _OF_TYPE for kind in map(str, kinds)):
        raise Refused(f"{where}.type", f"{json.dumps(kinds)[:80]} is no type")
    return kinds


def _listed_values(schema: Mapping[str, Any], where: str) -> list[Any]:
    """The values that `const` and `enum` name, and that are of the type."""
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list) or not values:
        raise Refused(f"{where}.enum", "must be a list of values")
    if "const" in schema:
        values = [value for value in values if value_key(value) == value_key(schema["const"])]
    kinds = _kinds(schema, list(_OF_TYPE), where)
    fitting = [value for value in values if kinds_of(value) & {*kinds}]
    if not fitting:
        raise Refused(where, "nothing matches const, enum and type together")
    return fitting


def _bounds(schema: Mapping[str, Any], low: str, high: str, where: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for name, value in ((low, least), (high, 0 if most is None else most)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 10**6:
            raise Refused(f"{where}.{name}", "must be a whole number from 0 to 1,000,000")
    if most is not None and least > most:
        raise Refused(where, f"{low} is larger than {high}, so that nothing matches")
    return least, most


def _repeated(begin: str, part: str, end: str, low: int, high: int | None) -> str:
    """A list of low to high parts; high: 1 or more; None for any number."""
    most = "" if high is None else high - 1
    some = f'{part} ("," {part}){{{max(0, low - 1)},{most}}}'
    return f'"{begin}" {some} "{end}"' if low else f'"{begin}" ({some})? "{end}"'


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


class CallWriting(Protocol):
    """How a call is written between its markers: `begin`, the name, `middle`, the arguments, `end`;
    `beside` between two calls. arguments: a name in `RULES`."""

    @property
    def arguments(self) -> str: ...
    @property
    def begin(self) -> str: ...
    @property
    def middle(self) -> str: ...
    @property
    def end(self) -> str: ...
    @property
    def beside(self) -> str: ...


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
    opens: int  # the special tokens around a call, and around each text in it, if any
    closes: int
    quote: int | None
    required: bool = False  # the reply is calls and nothing else
    single: bool = False  # one call at most
    answer: GrammarSource | None = None  # a JSON schema of replies without calls; None: any text
    style: CallWriting = field(kw_only=True)

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
        rules = RULES[self.style.arguments](self.quote)
        calls = [self._call(tool, rules) for tool in self.tools]
        check_multiples([json.loads(tool.schema) for tool in self.tools if tool.schema], "tools")
        beside = f"{_quoted(self.style.beside)} " if self.style.beside else ""
        many = "call" if self.single else f"call ({beside}call)*" if beside else "call+"
        if self.answer is not None:
            start = f"start: {many} | %json {self.answer.inline()}"
        else:
            start = f"start: {many}" if self.required else f"start: TEXT? ({many})?"
        lines = [
            start,
            f"call: <[{self.opens}]> ({' | '.join(calls)}) <[{self.closes}]>",
            "TEXT: /(?s:.+)/",
            *rules.lines(),
        ]
        return "\n".join(lines)

    def _call(self, tool: CallTool, rules: CallRules | JsonRules) -> str:
        style, arguments = self.style, rules.free
        if tool.schema is not None:
            check_schema(json.loads(tool.schema), tool.field)
            arguments = rules.arguments(json.loads(tool.schema), tool.field)
        begin, end = _quoted(f"{style.begin}{tool.name}{style.middle}"), _quoted(style.end)
        return f"{begin} {arguments} {end}" if style.end else f"{begin} {arguments}"


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
            if tool.schema is not None:
                held, more = GrammarSource("schema", tool.schema, tool.field).held()
                tool = replace(tool, schema=held.text)
                if not tool.is_strict:  # those of strict tools are checked where rules are made
                    schema = json.loads(held.text)
                    check_schema(schema, tool.field)
                    RULES[source.style.arguments](source.quote).arguments(schema, tool.field)
                notes += more
        except Refused as error:
            if tool.is_strict:
                raise
            notes.append(_note(tool, str(error.advising(""))))
            tool = replace(tool, schema=None)
        tools.append(tool)
    return replace(source, tools=tuple(tools)), notes


def _note(tool: CallTool, why: str) -> str:
    return f"{why}; the arguments of {tool.name!r} are not held to the schema"


Source = GrammarSource | CallSource
