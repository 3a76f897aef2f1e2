"""What of a JSON schema or of a grammar is refused: parts that stand too deep in one another, long
chains of references, and what takes too long to compile.

llguidance recurses along nesting and along references, on the stack of the thread that calls it,
and an overflow ends the process.  Its own limits do not count the states that divide a number, the
pairs of optional properties of one object, and the patterns that one text has to match together.
All algorithms here are loops but for one, which is bounded.  Knows plain data and texts alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cache
from typing import Any
from urllib.parse import unquote

from sfumato.refused import Refused

MOST_CHAINED = 400
"""Schemas or rules of the longest chain without a repetition, each of which refers to the next. One
takes at most 5 KB of stack."""
MOST_NESTED = 100
"""Objects and lists within one another in a schema, and groups in a grammar or an expression."""

Graph = Mapping[Hashable, Iterable[Hashable]]
"""What refers to what."""

# Where no schema stands, but values; and schemas that count only where something refers to them.
_DEFINITIONS = {"$defs", "definitions"}
_NO_SCHEMAS = {"enum", "const", "default", "examples", *_DEFINITIONS}
_NAMED_SCHEMAS = {"properties", "patternProperties", "dependentSchemas"}

_NAME = r"[A-Za-z_][\w-]*+"  # takes whole words, so that no search tries each part of a long one
_NAMES = re.compile(_NAME)
_LARK_RULE = re.compile(rf"(?m)^[ \t]*+[?!]?({_NAME})[^\n:|]*+:")
_GBNF_RULE = re.compile(rf"(?<![\w-])({_NAME})\s*+::=")
# Of an expression: what is escaped, a class, and the brackets of groups.
_GROUPS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|[()]", re.DOTALL)


def check_depth(schema: Any, field: str) -> None:
    """Raises ValueError, naming the field, for a JSON schema that is too deep."""
    graph: dict[Hashable, list[Hashable]] = {}
    references = References(schema)
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if id(part) in graph or not isinstance(part, Mapping):
            continue
        named = (references(part[name]) for name in ("$ref", "$dynamicRef") if name in part)
        inner = [*inner_schemas(part), *named]
        graph[id(part)] = [id(each) for each in inner]
        pending += inner
        _check_patterns(part, field)
    _check_nested(_nested(schema), field)
    _check_chain(longest_chain(graph, [id(schema)]), "schemas", field)


def check_rules(text: str, is_lark: bool, field: str) -> None:
    """Raises ValueError, naming the field, for rules that are too deep. text: a grammar in which no
    literals, expressions and comments are left."""
    rules = list((_LARK_RULE if is_lark else _GBNF_RULE).finditer(text))
    names = {match[1] for match in rules}
    graph: dict[Hashable, set[Hashable]] = {name: set() for name in names}
    end = len(text)
    for match in reversed(rules):
        graph[match[1]] |= names.intersection(_NAMES.findall(text, match.end(), end))
        end = match.start()
    _check_nested(_deepest(char for char in text if char in "()"), field)
    _check_chain(longest_chain(graph, graph), "rules", field)


def check_groups(pattern: str, field: str) -> None:
    """Raises ValueError, naming the field, for a regular expression whose groups are too deep."""
    _check_nested(_deepest(_GROUPS.findall(pattern)), field)


def longest_chain(graph: Graph, begin: Iterable[Hashable]) -> int:
    """How many nodes the longest chain has that follows references from one of the nodes. What
    leads back into the chain is not followed: recursion costs nothing."""
    lengths: dict[Hashable, int] = {}  # of a node on the chain that is followed: 0
    pending = [node for node in begin if node in graph]
    while pending:
        node = pending[-1]
        if node not in lengths:
            lengths[node] = 0
            pending += [inner for inner in graph[node] if inner in graph and inner not in lengths]
        else:
            pending.pop()
            if not lengths[node]:
                lengths[node] = 1 + max((lengths.get(i, 0) for i in graph[node]), default=0)
    return max(lengths.values(), default=0)


def _check_chain(length: int, parts: str, field: str) -> None:
    if length > MOST_CHAINED:
        raise Refused(
            field,
            f"has a chain of {length:,} {parts}, each of which refers to the next, and at "
            f"most {MOST_CHAINED} are followed",
            "make it flatter",
        )


def _check_nested(depth: int, field: str) -> None:
    if depth > MOST_NESTED:
        raise Refused(
            field,
            f"is nested {depth:,} levels deep, and at most {MOST_NESTED} are read",
            "make it flatter",
        )


def _check_patterns(part: Mapping[str, Any], field: str) -> None:
    named = part.get("patternProperties")
    for pattern in (part.get("pattern"), *(named if isinstance(named, Mapping) else ())):
        if isinstance(pattern, str):
            check_groups(pattern, field)


def inner_schemas(
    part: Mapping[str, Any], keywords: Collection[str] | None = None
) -> Iterator[Mapping[str, Any]]:
    """The schemas that stand in a schema, under these keywords; None: under all."""
    for name, value in part.items():
        if name in _NO_SCHEMAS or (keywords is not None and name not in keywords):
            continue
        if name in _NAMED_SCHEMAS and isinstance(value, Mapping):
            value = [*value.values()]
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                yield each


class References:
    """What the references in a schema name: by places in it, and by names that its parts have. Each
    is looked up once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known = cache(self._target)
        self._named: dict[str, Any] = {}
        for part in _objects(root):
            for name in ("$id", "id", "$anchor", "$dynamicAnchor"):
                if isinstance(value := part.get(name), str):
                    self._named[value.rstrip("#")] = part

    def __call__(self, reference: Any) -> Any:
        """The part of the schema; None where there is none."""
        return self._known(reference) if isinstance(reference, str) else None

    def _target(self, reference: str) -> Any:
        base, _, place = reference.partition("#")
        target = self._root
        if base:
            target = self._named.get(base, self._named.get(base.rpartition("/")[2]))
        if not place.startswith("/"):
            return self._named.get(place) if place else target
        for step in unquote(place).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and len(name) < 10:
                target = target[int(name)] if int(name) < len(target) else None
            else:
                target = target.get(name) if isinstance(target, Mapping) else None
        return target


def entries(data: Any) -> Iterator[tuple[str, Any]]:
    """All that stands in a schema or other plain data, with the keyword that it stands under: none
    where a key is a name, and that keyword for all that is below `enum` and `const`."""
    pending: list[tuple[str, Any]] = [("", data)]
    while pending:
        name, value = pending.pop()
        yield name, value
        if isinstance(value, Mapping):
            own = name if name in _VALUES else ""
            are_names = name in _VALUES | _NAMED_SCHEMAS | _DEFINITIONS
            pending += [(own if are_names else key, each) for key, each in value.items()]
        elif isinstance(value, list):
            pending += [(name, each) for each in value]


def _objects(data: Any) -> Iterator[Mapping[str, Any]]:
    return (value for _, value in entries(data) if isinstance(value, Mapping))


def _nested(value: Any) -> int:
    """How many objects and lists stand in one another in plain data."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, Mapping | list)]:
        depth += 1
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, Mapping) else each)
        ]
    return depth


def _deepest(brackets: Iterable[str]) -> int:
    """How many groups are open at most; what is no round bracket does not count."""
    deepest = level = 0
    for bracket in brackets:
        level = level + (bracket == "(") - (bracket == ")" and level > 0)
        deepest = max(deepest, level)
    return deepest


MOST_MULTIPLES = 10_000
"""The largest `multipleOf` as a whole number (0.25 is 25); its grammar has as many states: 0.05 s
of CPU."""
MOST_MULTIPLES_IN_ALL = 50_000
"""The sum over a schema, or over the schemas of all tools: 0.4 s."""
MOST_OPTIONAL = 400
"""Optional properties of one object: 0.03 s of CPU, and the time goes with the square. From 500 on
llguidance's parser refuses the object in the middle of a reply."""
MOST_COMBINED_OPTIONAL = 1_000
"""The sum over a schema that combines schemas: 0.2 s, were they all in one object."""
MOST_PATTERNS = 8
"""Different patterns in a schema that combines schemas, which may have to match one text (each
doubles the time; 0.01 s), and patterns of one `patternProperties`, which must not overlap."""
MOST_WAYS = 512
"""Ways to choose one branch of every `anyOf` of an `allOf`, summed over a schema; 4,096: 2 s."""
_READ = {"properties", "required", "additionalProperties", "patternProperties", "items", "pattern"}
_READ |= {"prefixItems", "multipleOf", "minimum", "maximum", "minLength", "maxLength", "format"}
_READ |= {"enum", "const", "anyOf", "oneOf", "$ref", "allOf"}
_VALUES = {"const", "enum"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", *_VALUES}
MOST_NUMBER = 2**53


def check_schema(schema: Any, field: str) -> None:
    """Raises ValueError, naming the field, for a schema whose grammar is too deep or too large.
    Where the schema combines schemas, all its parts count as combined with one another."""
    check_depth(schema, field)
    check_numbers(schema, field)
    parts = list(_objects(schema))
    combines = any(_combines(part) for part in parts)
    check_multiples(schema, field, combines)
    optional = [_optional(part) for part in parts]
    most, held, where = max(optional, default=0), MOST_OPTIONAL, "an object"
    if combines and most <= held:
        most, held = sum(optional), MOST_COMBINED_OPTIONAL
        where = "a schema that combines schemas"
    if most > held:
        raise Refused(
            field,
            f"properties: {where} has {most:,} optional ones, and at most {held:,} are held",
            "list more names in required",
        )
    names = [part.get("patternProperties") for part in parts]
    if any(isinstance(each, Mapping) and len(each) > MOST_PATTERNS for each in names):
        raise Refused(
            field, f"patternProperties: at most {MOST_PATTERNS} patterns are held", "leave some out"
        )
    if combines:
        _check_combined(schema, parts, field)


def check_numbers(schema: Any, field: str) -> None:
    """Raises ValueError, naming the field, for a whole number that float64 need not hold: grammars
    count in such numbers, and would let others pass."""
    for name, value in entries(schema):
        if name in _NUMBERS and type(value) is int and abs(value) > MOST_NUMBER:
            raise Refused(
                field,
                f"{name}: {str(value)[:40]} is beyond 2^53, and such whole numbers are not held "
                "exactly",
                "use smaller ones, or a text",
            )


def _check_combined(schema: Any, parts: list[Mapping[str, Any]], field: str) -> None:
    patterns = {text for part in parts if isinstance(text := part.get("pattern"), str)}
    for part in parts:
        if isinstance(names := part.get("patternProperties"), Mapping):
            patterns |= names.keys()
    if len(patterns) > MOST_PATTERNS:
        raise Refused(
            field,
            f"pattern: a schema that combines schemas has {len(patterns):,} different ones, "
            f"and at most {MOST_PATTERNS} are held",
            "leave allOf out",
        )
    known: dict[int, int] = {}
    try:
        referred = References(schema)
        each = (_ways(referred, part, known) for part in parts if _combines(part))
        most = sum(ways for ways in each if ways > 1)
    except RecursionError:
        raise Refused(field, "its schemas refer to one another too deeply") from None
    if most > MOST_WAYS:
        raise Refused(
            field,
            f"allOf: its anyOf can be chosen in more than {MOST_WAYS} ways",
            "leave allOf out",
        )


def _combines(part: Mapping[str, Any]) -> bool:
    """Whether a value has to match several schemas together."""
    branches = part.get("allOf")
    if isinstance(branches, list) and len(branches) > 1:
        return True
    known = part.keys() & _READ
    return len(known) > 1 and any(name in part for name in ("allOf", "anyOf", "oneOf", "$ref"))


def _ways(referred: References, part: Any, known: dict[int, int]) -> int:
    """In how many ways one branch of each `anyOf` can be chosen; more than the most: one more."""
    if not isinstance(part, Mapping):
        return 1
    if id(part) in known:
        return known[id(part)]
    known[id(part)] = 1  # what a schema that names itself takes for itself
    ways = 1
    for name in ("anyOf", "oneOf", "allOf", "$ref"):
        inner = part.get(name)
        if name == "$ref":
            inner = [referred(inner)]
        if not isinstance(inner, list) or not inner:
            continue
        each = (_ways(referred, branch, known) for branch in inner)
        if name in ("anyOf", "oneOf"):
            ways *= sum(each)
        else:
            for more in each:
                ways = min(ways * more, MOST_WAYS + 1)
    # Properties of the same name, and items, are combined with one another too.
    inside = [part.get(name) for name in ("items", "additionalProperties")]
    if isinstance(properties := part.get("properties"), Mapping):
        inside += properties.values()
    ways = max(ways, *(_ways(referred, each, known) for each in inside))
    known[id(part)] = min(ways, MOST_WAYS + 1)
    return known[id(part)]


def check_multiples(schemas: Any, field: str, combines: bool = False) -> None:
    """Raises ValueError where a divisor of schemas is too large, or all of them together are."""
    exact = [Decimal(str(value)) for value in _multiples(_objects(schemas))]
    if any(not value.is_finite() or abs(value.adjusted()) > 30 for value in exact):
        raise Refused(field, "multipleOf: is too large or too small", "leave it out")
    scales = [max(0, -int(value.as_tuple().exponent)) for value in exact]
    wholes = [abs(int(value.scaleb(scale))) for value, scale in zip(exact, scales, strict=True)]
    most, total = max(wholes, default=0), sum(wholes)
    if combines:
        same = (abs(int(value.scaleb(max(scales)))) or 1 for value in dict.fromkeys(exact))
        most = math.lcm(*same)
    if most > MOST_MULTIPLES:
        raise Refused(
            field,
            f"multipleOf: {max(exact)} is too large a divisor: without the decimal point, "
            "and as the least common multiple where schemas are combined, it may be at "
            f"most {MOST_MULTIPLES:,}",
            "leave it out",
        )
    if total > MOST_MULTIPLES_IN_ALL:
        raise Refused(
            field,
            f"multipleOf: the divisors together are {total:,}, and at most "
            f"{MOST_MULTIPLES_IN_ALL:,} are held",
            "leave some out",
        )


def _multiples(parts: Iterable[Mapping[str, Any]]) -> Iterator[int | float]:
    for part in parts:
        value = part.get("multipleOf")
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value


def _optional(part: Mapping[str, Any]) -> int:
    """How many properties of an object may be absent."""
    properties, required = part.get("properties"), part.get("required")
    if not isinstance(properties, Mapping):
        return 0
    names = required if isinstance(required, list) else []
    return len(properties.keys() - {name for name in names if isinstance(name, str)})
