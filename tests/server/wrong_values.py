"""Values that a JSON schema does not allow, for every field of it, to some depth.

`schemathesis` draws such bodies at random; here each field gets each kind of value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Schema = dict[str, Any]

ODD = ("AAA", -7, [], None, True, 1.5, 10**12, {}, ["AAA"], {"AAA": 1})


class Fields:
    """Values for the fields of the schemas of an API description, right and wrong ones."""

    def __init__(self, schemas: dict[str, Schema], odd: Sequence[Any], deepest: int) -> None:
        """odd: values that each field gets; deepest: levels within a field whose parts get them
        too, branches of unions included."""
        self._schemas, self._odd, self._deepest = schemas, odd, deepest

    def resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def least(self, schema: Schema) -> Any:
        """The smallest value that the schema allows."""
        schema = self.resolved(schema)
        if "anyOf" in schema:
            return self.least(schema["anyOf"][0])
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else schema["enum"][0]
        kind = schema.get("type")
        if kind == "object":
            fields = schema.get("required", ())
            return {name: self.least(schema["properties"][name]) for name in fields}
        if kind == "array":
            return [self.least(schema["items"])] * schema.get("minItems", 0)
        plain = {"string": "a", "boolean": True, "integer": schema.get("minimum", 1), "number": 1}
        return plain.get(kind or "")

    def values(self, schema: Schema, depth: int = 0) -> Iterator[Any]:
        """Values for a field of that schema. Some are right: the caller leaves these out."""
        schema = self.resolved(schema)
        yield from self._odd
        if depth >= self._deepest:
            return
        for branch in schema.get("anyOf", ()):
            yield from self.values(branch, depth + 1)
        if "minimum" in schema:
            yield schema["minimum"] - 1
        if "maximum" in schema:
            yield schema["maximum"] + 1
        if "items" in schema:
            for value in self.values(schema["items"], depth + 1):
                yield [value]
        if isinstance(schema.get("additionalProperties"), dict):
            for value in self.values(schema["additionalProperties"], depth + 1):
                yield {"k": value}
        if "properties" not in schema:
            return
        right = self.least(schema)
        for name, field in schema["properties"].items():
            for value in self.values(field, depth + 1):
                yield {**right, name: value}
        for name in schema.get("required", ()):
            yield {other: value for other, value in right.items() if other != name}
        yield {**right, "unknown_": 1}
