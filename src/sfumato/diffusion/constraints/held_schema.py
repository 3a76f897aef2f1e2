"""A JSON schema as grammars can hold it: in other words where grammars lack a keyword; and without
the keyword, and with a note, where no other words say the same.

Whatever matches the schema that is made matches the given one but for what the notes say.  Only
parts that a value may have to match are looked at: nothing within `enum`, `default` or `not`.
Knows plain data alone; never recurses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations
from math import perm
from typing import Any

from sfumato.diffusion.constraints.schema_limits import References, inner_schemas
from sfumato.weights.errors import quoted

MOST_BRANCHES = 64
"""Branches of one `oneOf` at most, with those that stand within its branches."""
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

_Values = dict[tuple[str, str | None], Any]
"""A set that has all values of a schema: kinds of values, with None, and listed values, by their
kind and `value_key`."""


def _both(one: _Values, other: _Values) -> _Values:
    """The values that are in two sets."""
    common = {key: value for key, value in one.items() if key in other or (key[0], None) in other}
    return common | {key: value for key, value in other.items() if (key[0], None) in one}


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


class _TooMuch(Exception):
    """Comparing would take longer than it may."""


class Overlap:
    """Whether a value may match several schemas at once, as far as types, listed values and names
    of properties tell: they may wherever it does not know better. Compares the parts of one schema,
    up to a limit of work for all of it."""

    def __init__(self, references: References) -> None:
        self._referred, self._left = references, MOST_WORK

    def of(self, schemas: Any) -> bool:
        """Whether a value may match two of the schemas in a list."""
        try:
            pairs = combinations(self._branches(schemas), 2)
            return any(a.number != b.number and self._meet(a, b) for a, b in pairs)
        except _TooMuch:
            return True

    def _spend(self, work: int) -> None:
        self._left -= work
        if self._left < 0:
            raise _TooMuch

    def _branches(self, schemas: Any) -> list[_Branch]:
        """The schemas of a list; the branches of one that is an `anyOf` or `oneOf` alone stand for
        it."""
        if not isinstance(schemas, list):
            raise _TooMuch
        pending, branches = list(enumerate(schemas)), list[_Branch]()
        while pending:
            if len(pending) + len(branches) > MOST_BRANCHES:
                raise _TooMuch
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
            self._spend(1)
            if part.keys() - NOTES != {"$ref"}:
                parts.append(part)
            if "$ref" in part:
                pending.append(self._referred(part["$ref"]))
            if isinstance(part.get("allOf"), list):
                pending += part["allOf"][:MOST_PARTS]
        return parts

    def _values(self, parts: list[dict[str, Any]]) -> _Values:
        values = _set_of({})
        for part in parts:
            listed = part.get("enum")
            self._spend(len(listed) if isinstance(listed, list) else 1)
            values = _both(values, _set_of(part))
        return values

    def _meet(self, one: _Branch, other: _Branch) -> bool:
        self._spend(1)
        kinds = {kind for kind, _ in _both(one.values, other.values)}
        if kinds != {"object"}:
            return bool(kinds)
        names = one.required | other.required
        self._spend(len(names))
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
        return not _both(*values)


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


def _set_of(part: dict[str, Any]) -> _Values:
    """All that `type`, `enum` and `const` of a part say."""
    kinds = part.get("type")
    named = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind in [*_TYPES]]
    values: _Values = {(kind, None): None for name in named or _TYPES for kind in _TYPES[name]}
    for listed in ([part["const"]] if "const" in part else None, part.get("enum")):
        if isinstance(listed, list) and not any(isinstance(each, list | dict) for each in listed):
            own: _Values = {
                (kind, value_key(each)): each for each in listed for kind in _kinds(each)
            }
            values = _both(values, own)
    return values


def _kinds(value: Any) -> set[str]:
    kinds = kinds_of(value)
    return {"integer"} if "integer" in kinds else {"fraction"} if "number" in kinds else kinds


MOST_NOTES = 8
MOST_LISTS = 400
"""Lists of different values that stand in place of one `uniqueItems`: those of 5 values are 326."""
MOST_NAMES = 400
"""Names that stand in place of one `propertyNames`."""
MOST_MADE = 2**16
"""Characters that stand in place of keywords, in one schema."""
_LONGEST_NAME = 1024

_HELD = {"items", "additionalItems", "prefixItems", "properties", "patternProperties"}
_HELD |= {"additionalProperties", "allOf", "anyOf", "oneOf"}
"""Keywords of schemas that a value may have to match."""
_ANNOTATIONS = {"discriminator", "example", "contentMediaType", "contentEncoding", "contentSchema"}
_HELD_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"}
_HELD_FORMATS |= {"uuid", "uri"}
_FREE_FORMATS = {"password", "path", "binary", "unknown"}
"""Formats that every text has."""
_OF_VERSION = re.compile(r"uuid[1-8]")
# pydantic's pattern of a Decimal, and the same without looking ahead.
_DECIMAL = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$"}
_LOOKS = re.compile(r"\(\?<?[=!]")
# Within a pattern: an escape, a class, and what looks at other places or opens and closes a group.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)|\(\?<?[=!]|[()]", re.DOTALL)
_REPEAT = re.compile(r"[*+?]\??|\{\d*,?\d*\}\??")


def held_schema(schema: Any, field: str, room: int = MOST_MADE) -> tuple[Any, tuple[str, ...]]:
    """The schema, which is changed in place, and notes about what it does not hold any more, which
    begin with the field's name. room: characters that may be added."""
    held = _Held(schema, min(room, MOST_MADE))
    notes = [f"{field}: {note}" for note in dict.fromkeys(held.notes)]
    more = len(notes) - MOST_NOTES
    if more > 0:
        notes[MOST_NOTES:] = [f"{field}: {more} more parts of the schema are not held"]
    return schema, tuple(notes)


class _Held:
    """One schema under way."""

    def __init__(self, root: Any, room: int) -> None:
        self.notes: list[str] = []
        self._root, self._room, self._referred = root, room, References(root)
        self._listed_values: dict[int, list[Any] | None] = {}  # by the id of a schema
        parts = list(_reachable(root, self._referred))
        # A reference to "#/$defs" means another place in a part that has an address of its own.
        self._has_ids = any("$id" in part or "id" in part for part in parts if part is not root)
        for part in parts:
            self._requires_tags(part)
            for name in [name for name in part if _is_annotation(name)]:
                if name == "contentSchema" and part[name] not in (True, {}):
                    self.notes.append("contentSchema is not held: the text may be any")
                del part[name]
            self._format(part)
            self._pattern(part)
            self._unique(part)
            self._names(part)
        overlap = Overlap(self._referred)
        if any(overlap.of(part["oneOf"]) for part in parts if "oneOf" in part):
            self.notes.append("oneOf is held as anyOf: a value may match several of its branches")

    def _requires_tags(self, part: dict[str, Any]) -> None:
        """The property that tells the branches of a union apart, which OpenAPI wants in each of
        them, has to be there: without it no class can be found for the object."""
        tag, branches = part.get("discriminator"), part.get("oneOf", part.get("anyOf"))
        name = tag.get("propertyName") if isinstance(tag, dict) else None
        if not isinstance(name, str) or not isinstance(branches, list):
            return
        for target in map(self._target, branches):
            properties = target.get("properties") if isinstance(target, dict) else None
            if not isinstance(properties, dict) or name not in properties:
                continue
            required = target.get("required", [])
            is_missing = isinstance(required, list) and name not in required
            if is_missing and self._takes(len(name) + 4):
                target["required"] = [*required, name]

    def _format(self, part: dict[str, Any]) -> None:
        name = part.get("format")
        if not isinstance(name, str) or name in _HELD_FORMATS:
            return
        del part["format"]
        if name in _FREE_FORMATS or not _may_be(part, "string"):
            return
        if _OF_VERSION.fullmatch(name) and "pattern" not in part and self._takes(64):
            part["format"], part["pattern"] = "uuid", f"^.{{14}}{name[4]}.{{4}}[89abAB]"
            return
        self.notes.append(f"format {quoted(name)} is not held: any text passes")

    def _pattern(self, part: dict[str, Any]) -> None:
        pattern = part.get("pattern")
        if not isinstance(pattern, str) or not _LOOKS.search(pattern):
            return
        same = _DECIMAL.get(pattern)
        part["pattern"] = _without_looks(pattern) if same is None else same
        if same is None and part["pattern"] != pattern:
            self.notes.append(
                "pattern: what looks ahead or behind is not held, and the rest of it is"
            )

    def _unique(self, part: dict[str, Any]) -> None:
        if not isinstance(part.get("uniqueItems"), bool):
            return
        if not part.pop("uniqueItems") or not _may_be(part, "array"):
            return
        most = _count_of(part.get("maxItems"))
        if most is not None and most <= 1:
            return
        lists = self._lists(part)
        if lists is None:
            self.notes.append("uniqueItems is not held: items may repeat")
            return
        for name in ("items", "minItems", "maxItems"):
            part.pop(name, None)
        part["enum"] = lists

    def _lists(self, part: dict[str, Any]) -> list[Any] | None:
        """All lists without repetition, where they are few."""
        if {"prefixItems", "additionalItems", "enum", "const"} & part.keys():
            return None
        if part.get("type") not in ("array", ["array"]):
            return None
        values = self._values(part.get("items"))
        least, most = _count_of(part.get("minItems", 0)), _count_of(part.get("maxItems", 2**20))
        if values is None or least is None or most is None:
            return None
        sizes, count = range(least, min(most, len(values)) + 1), 0
        for length in sizes:
            count += perm(len(values), length)
            if count > MOST_LISTS:
                return None
        size = count * sum(len(str(value)) + 4 for value in values)
        if not count or not self._takes(size):
            return None
        return [list(each) for length in sizes for each in permutations(values, length)]

    def _values(self, schema: Any) -> list[Any] | None:
        """The values of a schema that names all of them; None: of any other."""
        if schema is False:
            return []
        schema = self._target(schema)
        if id(schema) not in self._listed_values:
            self._listed_values[id(schema)] = _values_of(schema)
        return self._listed_values[id(schema)]

    def _names(self, part: dict[str, Any]) -> None:
        if not isinstance(part.get("propertyNames"), bool | dict):
            return
        names = self._target(part.pop("propertyNames"))
        others = part.get("additionalProperties", True)
        if names is True or not _may_be(part, "object"):
            return
        keywords = set(names) - NOTES if isinstance(names, dict) else {"not"}
        if isinstance(names, dict) and _may_be(names, "string"):
            keywords -= {"type"}  # what every name has
        is_map = not part.get("properties") and not part.get("patternProperties")
        if not keywords or (is_map and others is False):  # of no names, none is wrong
            return
        values = self._values(names)
        if values is not None and not {"minProperties", "maxProperties"} & part.keys():
            is_held = self._listed(part, values, others)
        else:
            pattern = _pattern_of(names, keywords, values) if is_map else None
            is_held = pattern is not None and self._takes(len(pattern))
            if is_held:
                part["patternProperties"] = {pattern: others}
                part["additionalProperties"] = False
        if not is_held:
            self.notes.append("propertyNames is not held: an object may have other names")

    def _listed(self, part: dict[str, Any], names: list[Any], others: Any) -> bool:
        """Makes the names the only properties of an object; whether that can be done. others: the
        schema of those that are not among its properties."""
        properties, defs = part.get("properties", {}), self._root.get("$defs", {})
        can_be = isinstance(properties, dict) and isinstance(defs, dict) and not self._has_ids
        texts = dict.fromkeys(name for name in names if isinstance(name, str))
        size = sum(map(len, texts)) + 40 * len(texts)
        if not can_be or part.get("patternProperties") or not self._takes(size):
            return False
        new = [name for name in texts if name not in properties and others is not False]
        if new and isinstance(others, dict) and others.keys() != {"$ref"}:
            at = f"value-{len(defs)}"
            while at in defs:
                at += "-"
            defs[at], others = others, {"$ref": f"#/$defs/{at}"}
            self._root["$defs"] = defs
        kept = {name: each for name, each in properties.items() if name in texts}
        part["properties"] = kept | dict.fromkeys(new, others)
        part["additionalProperties"] = False
        return True

    def _target(self, schema: Any) -> Any:
        """What a schema that is a reference alone names in the end; any other as it is."""
        for _ in range(32):
            if not isinstance(schema, dict) or set(schema) - NOTES != {"$ref"}:
                break
            schema = self._referred(schema["$ref"])
        return schema

    def _takes(self, size: int) -> bool:
        """Whether so many characters may be added; then they are counted."""
        fits = size <= self._room
        self._room -= size if fits else 0
        return fits


def _reachable(root: Any, referred: References) -> Iterator[dict[str, Any]]:
    """Every part that a value may have to match and that is an object, once."""
    pending, seen = [root], set()
    while pending:
        part = pending.pop()
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            yield part
            pending += [*inner_schemas(part, _HELD), referred(part.get("$ref"))]


def _values_of(schema: Any) -> list[Any] | None:
    """The values that a schema lists, each once, where it says nothing else of them."""
    if not isinstance(schema, dict) or schema.keys() - {"type", "enum", "const"} - NOTES:
        return None
    given, values = {"enum", "const"} & schema.keys(), _set_of(schema)
    if not given and schema.get("type") == "boolean":
        return [True, False]
    is_listed = len(given) == 1 and all(key is not None for _, key in values)
    return [*values.values()] if is_listed and len(values) <= MOST_NAMES else None


def _is_annotation(name: str) -> bool:
    """Whether a keyword asks nothing of a value, and is none that all readers of schemas know."""
    return name in _ANNOTATIONS or (name.startswith("x-") and name != "x-guidance")


def _may_be(part: dict[str, Any], kind: str) -> bool:
    """Whether the type of a schema lets a value be of this one."""
    kinds = part.get("type", kind)
    return kinds == kind or (isinstance(kinds, list) and kind in kinds)


def _count_of(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _pattern_of(names: Any, keywords: set[str], values: list[Any] | None) -> str | None:
    """The pattern that the names of properties match; None where no pattern says the same."""
    if values is not None:
        texts = [re.escape(value) for value in values if isinstance(value, str)]
        return f"^(?:{'|'.join(texts)})$" if texts else None
    if keywords == {"pattern"}:
        pattern = names["pattern"]
        return pattern if isinstance(pattern, str) else None
    if not keywords <= {"minLength", "maxLength"}:
        return None
    least, most = _count_of(names.get("minLength", 0)), _count_of(names.get("maxLength", 0))
    if least is None or most is None or max(least, most) > _LONGEST_NAME:
        return None
    return f"^(?s:.{{{least},{most if 'maxLength' in names else ''}}})$"


def _without_looks(pattern: str) -> str:
    """A regular expression without what looks ahead or behind, which more texts match."""
    kept, at, opened, inside = [], 0, 0, 0  # inside: the group at which one that looks was opened
    for piece in _PIECE.finditer(pattern):
        text = piece[0]
        if not inside:
            kept.append(pattern[at : piece.start()])
        at = piece.end()
        if text in ("(", ")") or text.startswith("(?"):
            opened += -1 if text == ")" else 1
            if not inside and _LOOKS.fullmatch(text):
                inside = opened
                continue
            if inside and opened < inside:
                inside = 0
                repeat = _REPEAT.match(pattern, at)
                at = repeat.end() if repeat else at
                continue
        if not inside:
            kept.append(text)
    return "".join([*kept, "" if inside else pattern[at:]])
