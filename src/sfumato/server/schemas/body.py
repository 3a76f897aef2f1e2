"""The base of all bodies: strict, with a bounded list of unknown fields; and fields that have no
effect.

Knows no field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from sfumato.refused import Refused
from sfumato.server.schemas import json_schemas

# Only the first wrong item of a list is reported: an error for each of millions takes gigabytes.
First = Field(fail_fast=True)
Texts = Annotated[list[str], First]
Ids = Annotated[list[int], First]
Objects = Annotated[list[dict[str, Any]], First]


def at_most(count: int) -> BeforeValidator:
    """Refuses an object of more fields before any of them is read."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_many", f"at most {count} fields")
        return value

    return BeforeValidator(check)


MOST_NAMED = 20  # of unknown fields
UNKNOWN_FIELD = "unknown; remove it, or start the server with --lenient"
"""What an error says of one."""


class Unknown:
    """Names of unknown fields: the first ones, and how many there are."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.named: list[str] = []
        self.count = 0
        self.add(names)

    def add(self, names: Iterable[str]) -> None:
        for name in names:
            self.count += 1
            if len(self.named) < MOST_NAMED:
                self.named.append(name)

    def __str__(self) -> str:
        more = self.count - len(self.named)
        return ", ".join(self.named) + (f" and {more:,} more" if more else "")

    def refused(self) -> Refused:
        """The error of a server that leaves none of them out."""
        more = self.count - len(self.named)
        *first, last = self.named
        fields = (*first, f"{last} and {more:,} more" if more else last)
        return Refused(fields, UNKNOWN_FIELD, code="unknown_field")


class Body(BaseModel):
    """Strict: no unknown field that is not null, no text for a number, no NaN."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra=json_schemas.with_settings,
    )

    _ignored: Unknown = PrivateAttr(default_factory=Unknown)
    _since: float | None = PrivateAttr(None)
    _owner: str = PrivateAttr("")

    @property
    def ignored(self) -> Unknown:
        """The unknown fields that a lenient server has left out."""
        return self._ignored

    @property
    def since(self) -> float | None:
        """When the body had arrived, by the engine's clock."""
        return self._since

    def leave_out(self, unknown: Unknown) -> None:
        """Sets `ignored`."""
        self._ignored = unknown

    @property
    def owner(self) -> str:
        """Whose body it is: a digest of the API key, or empty."""
        return self._owner

    def arrived(self, since: float | None, owner: str) -> None:
        """Sets `since` and `owner`."""
        self._since, self._owner = since, owner


Ignored = Annotated[Any, Field(description="Accepted and ignored.")]
AtTheEnd = Annotated[Any, Field(description="Accepted and ignored: the last piece has them.")]


class Only(AfterValidator):
    """Null and the `neutral` values pass; anything else is refused with `why`."""

    def __init__(self, *neutral: Any, why: str) -> None:
        values = (None, *neutral)

        def check(value: Any) -> Any:
            for good in values:
                if value == good and isinstance(value, bool) == isinstance(good, bool):
                    return value
            raise ValueError(why)

        super().__init__(check)
        shown = " or ".join(json.dumps(value) for value in neutral) or "null"
        schema = {"enum": list(values), "description": f"Refused unless {shown}: {why}."}
        object.__setattr__(self, "schema", schema)  # an AfterValidator is frozen

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = self.__dict__["schema"]
        return schema
