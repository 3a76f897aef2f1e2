"""Whether a value may match several schemas at once, as far as types, listed values and names of
properties tell.

Says that schemas may overlap wherever it does not know better.  Knows plain data alone; never
recurses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from sfumato.diffusion.constraints.schema_limits import referred

MOST_BRANCHES = 64
"""Of one `oneOf`, with those that stand within its branches."""
MOST_PARTS = 32
"""Schemas that one branch is made of."""
MOST_WORK = 50_000
"""Comparisons, for one schema: less than a tenth of a second."""

_TYPES = {
    "object": {"object"},
    "array": {"array"},
    "string": {"string"},
    "number": {"integer", "fraction"},
    "integer": {"integer"},
    "boolean": {"boolean"},
    "null": {"null"},
}
NOTES = {"title", "description", "default", "examples", "$comment", "deprecated"}
NOTES |= {"readOnly", "writeOnly"}
"""Keywords that ask nothing of a value."""
_ALL = frozenset[str]().union(*_TYPES.values())


@dataclass(frozen=True)
class _Values:
    """A set that has all values of a schema."""

    kinds: frozenset[str]
    listed: frozenset[str] | None = None  # as JSON; None: not listed

    def meets(self, other: _Values) -> bool:
        if self.listed is not None and other.listed is not None:
            return not self.listed.isdisjoint(other.listed)
        return not self.kinds.isdisjoint(other.kinds)

    def within(self, other: _Values) -> _Values:
        listed = [each.listed for each in (self, other) if each.listed is not None]
        both = frozenset.intersection(*listed) if listed else None
        return _Values(self.kinds & other.kinds, both)


_ANY = _Values(_ALL)


@dataclass(frozen=True)
class _Branch:
    """One of the schemas that are compared."""

    number: int  # which of them; what stands in its `anyOf` has the same
    values: _Values
    parts: list[dict[str, Any]]  # which its values have to match together

    @cached_property
    def required(self) -> set[str]:
        """Names that an object of this branch has."""
        lists = (part.get("required") for part in self.parts)
        names = (name for each in lists if isinstance(each, list) for name in each)
        return {name for name in names if isinstance(name, str)}

    def lacks(self, name: str) -> bool:
        """Whether no object of this branch has the name."""
        return any(
            part.get("additionalProperties") is False
            and not part.get("patternProperties")
            and isinstance(properties := part.get("properties", {}), dict)
            and name not in properties
            for part in self.parts
        )


class References:
    """What the references within a schema name; each is looked up once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, Any] = {}

    def __call__(self, reference: Any) -> Any:
        """The part of the schema; None where there is none."""
        if not isinstance(reference, str):
            return None
        if reference not in self._known:
            self._known[reference] = referred(self._root, reference)
        return self._known[reference]


class Overlap:
    """Compares the parts of one schema, up to a limit of work for all of it."""

    def __init__(self, references: References) -> None:
        self._referred, self._left = references, MOST_WORK

    def of(self, schemas: Any) -> bool:
        """Whether a value may match two of the schemas in a list."""
        branches = self._branches(schemas) if isinstance(schemas, list) else None
        if branches is None:
            return True
        pairs = combinations(branches, 2)
        return any(one.number != other.number and self._meet(one, other) for one, other in pairs)

    def _branches(self, schemas: list[Any]) -> list[_Branch] | None:
        """The schemas of a list; the branches of one that is an `anyOf` or `oneOf` alone stand for
        it. None: there are too many."""
        pending, branches = list(enumerate(schemas)), list[_Branch]()
        while pending:
            if len(pending) + len(branches) > MOST_BRANCHES or self._left < 0:
                return None
            number, schema = pending.pop()
            parts = self._parts(schema)
            inner = parts[-1].get("anyOf", parts[-1].get("oneOf")) if parts else None
            if len(parts) == 1 and isinstance(inner, list):
                pending += [(number, each) for each in inner]
            else:
                branches.append(_Branch(number, self._values(parts), parts))
        return branches

    def _parts(self, schema: Any) -> list[dict[str, Any]]:
        """What a value has to match together with the schema: it, what it refers to, and its
        `allOf`. What is left out makes the branch seem larger."""
        pending, parts = [schema], list[dict[str, Any]]()
        while pending and len(parts) < MOST_PARTS:
            part = pending.pop()
            if not isinstance(part, dict):
                continue
            if part.keys() - NOTES != {"$ref"}:
                parts.append(part)
            if "$ref" in part:
                pending.append(self._referred(part["$ref"]))
            if isinstance(part.get("allOf"), list):
                pending += part["allOf"][:MOST_PARTS]
            self._left -= 1
            if self._left < 0:
                break
        return parts

    def _values(self, parts: list[dict[str, Any]]) -> _Values:
        values = _ANY
        for part in parts:
            listed = part.get("enum")
            self._left -= len(listed) if isinstance(listed, list) else 1
            if self._left < 0:
                return _ANY
            values = values.within(_values_of(part))
        return values

    def _meet(self, one: _Branch, other: _Branch) -> bool:
        self._left -= 1
        if not one.values.meets(other.values):
            return False
        if one.values.kinds & other.values.kinds != {"object"}:
            return True
        names = one.required | other.required
        self._left -= len(names)
        if self._left < 0:
            return True
        return not any(
            one.lacks(name) or other.lacks(name) or self._differ(one, other, name) for name in names
        )

    def _differ(self, one: _Branch, other: _Branch, name: str) -> bool:
        """Whether no value of a property fits both branches."""
        values = []
        for branch in (one, other):
            inner = (part.get("properties") for part in branch.parts)
            schemas = [each[name] for each in inner if isinstance(each, dict) and name in each]
            values.append(self._values([p for each in schemas for p in self._parts(each)]))
        return not values[0].meets(values[1])


def kinds_of(value: Any) -> set[str]:
    """The types of JSON that a value has."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        is_whole = isinstance(value, int) or value.is_integer()
        return {"number", "integer"} if is_whole else {"number"}
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}


def value_key(value: Any) -> str:
    """The same text for values that JSON schema calls equal, as far as they are no lists or
    objects."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _values_of(part: dict[str, Any]) -> _Values:
    """All that `type`, `enum` and `const` of a part say."""
    values = _ANY
    kinds = part.get("type")
    named = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind in [*_TYPES]]
    if named:
        values = _Values(frozenset().union(*(_TYPES[kind] for kind in named)))
    for listed in ([part["const"]] if "const" in part else None, part.get("enum")):
        if isinstance(listed, list) and not any(isinstance(each, list | dict) for each in listed):
            own = frozenset().union(*(_kinds(value) for value in listed))
            values = values.within(_Values(own, frozenset(map(value_key, listed))))
    return values


def _kinds(value: Any) -> set[str]:
    kinds = kinds_of(value)
    return {"integer"} if "integer" in kinds else {"fraction"} if "number" in kinds else kinds
