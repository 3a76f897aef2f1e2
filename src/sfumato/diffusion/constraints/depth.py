"""How deep the parts of a grammar stand in one another, and how long chains of references are.

llguidance recurses along both, on the stack of the thread that calls it, and an overflow ends the
process. All algorithms here are loops. Knows plain data and texts alone.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
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
_NO_SCHEMAS = {"enum", "const", "default", "examples", "$defs", "definitions"}
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
    references = _References(schema)
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if id(part) in graph or not isinstance(part, Mapping):
            continue
        inner = [*_inner(part), *references.of(part)]
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
    for root in begin:
        if root in lengths or root not in graph:
            continue
        lengths[root] = 0
        chain: list[tuple[Hashable, Iterator[Hashable], int]] = [(root, iter(graph[root]), 0)]
        while chain:
            node, rest, longest = chain.pop()
            for inner in rest:
                if inner not in lengths and inner in graph:
                    lengths[inner] = 0
                    chain += [(node, rest, longest), (inner, iter(graph[inner]), 0)]
                    break
                longest = max(longest, lengths.get(inner, 0))
            else:
                lengths[node] = longest + 1
                if chain:
                    before, others, most = chain[-1]
                    chain[-1] = before, others, max(most, longest + 1)
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


def _inner(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas that stand in a schema."""
    for name, value in part.items():
        if name in _NO_SCHEMAS:
            continue
        if name in _NAMED_SCHEMAS and isinstance(value, Mapping):
            value = [*value.values()]
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                yield each


class _References:
    """What the references in a schema name: by places in it, and by names that its parts have."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._named: dict[str, Any] = {}
        for part in _mappings(root):
            for name in ("$id", "id", "$anchor", "$dynamicAnchor"):
                if isinstance(value := part.get(name), str):
                    self._named[value.rstrip("#")] = part

    def of(self, part: Mapping[str, Any]) -> Iterator[Any]:
        for name in ("$ref", "$dynamicRef"):
            if isinstance(reference := part.get(name), str):
                yield self._target(reference)

    def _target(self, reference: str) -> Any:
        """None where there is none."""
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


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in plain data."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            yield part
            pending += part.values()
        elif isinstance(part, list):
            pending += part


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
