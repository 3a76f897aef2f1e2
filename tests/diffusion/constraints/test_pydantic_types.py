"""Types of pydantic's that have a JSON schema can be held, as a reply and as a tool's argument."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest
from pydantic import BaseModel, Field, conlist, conset, constr, create_model
from tests.diffusion.constraints.test_call_grammar import properties, source
from tests.diffusion.constraints.test_grammar import TOKENS, ids, reply
from tests.support.random_model import random_model
from tests.support.scripted_model import END

from sfumato.diffusion.constraints.grammar import schema_of_type, schema_source


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog", "puppy"] = "dog"
    name: str = ""


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Pair(NamedTuple):
    a: int
    b: str


@dataclass
class Plain:
    a: int
    b: str = "x"


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
ANY_TEXT, REPEATS, NAMES = "any text passes", "items may repeat", "other names"
# Each type with a part of the note about what is not held; none: all of it is.
TYPES: dict[str, tuple[Any, str]] = {
    "none": (None, ""),
    "scalars": (tuple[int, float, bool, str, None], ""),
    "any": (Any, ""),
    "datetime": (datetime.datetime, ""),
    "date": (datetime.date, ""),
    "time": (datetime.time, ""),
    "timedelta": (datetime.timedelta, ""),
    "AwareDatetime": (pydantic.AwareDatetime, ""),
    "PastDate": (pydantic.PastDate, ""),
    "UUID": (uuid.UUID, ""),
    "UUID1": (pydantic.UUID1, ""),
    "UUID4": (pydantic.UUID4, ""),
    "Decimal": (Decimal, ""),
    "Fraction": (Fraction, ANY_TEXT),
    "complex": (complex, ""),
    "ByteSize": (pydantic.ByteSize, ""),
    "AnyUrl": (pydantic.AnyUrl, ""),
    "HttpUrl": (pydantic.HttpUrl, ""),
    "PostgresDsn": (pydantic.PostgresDsn, ANY_TEXT),
    "Enum": (Color, ""),
    "IntEnum": (Number, ""),
    "Optional": (int | None, ""),
    "Union": (int | str | Cat, ""),
    "discriminated": (Pet, ""),
    "list of discriminated": (list[Pet], ""),
    "nested discriminated": (Pet | Tree, ""),
    "recursive": (Tree, ""),
    "tuple": (tuple[int, str], ""),
    "tuple of any length": (tuple[int, ...], ""),
    "empty tuple": (tuple[()], ""),
    "NamedTuple": (Pair, ""),
    "dataclass": (Plain, ""),
    "deque": (deque[int], ""),
    "conint": (Annotated[int, Field(gt=1, lt=10)], ""),
    "confloat": (Annotated[float, Field(ge=0, le=1, multiple_of=0.25)], ""),
    "constr": (constr(min_length=1, max_length=5), ""),
    "constr with a pattern": (constr(pattern="^[a-z]+$", max_length=5), ""),
    "conlist": (conlist(int, min_length=1, max_length=3), ""),
    "Json": (pydantic.Json, ""),
    "Json of a type": (pydantic.Json[list[int]], "the text may be any"),
    "Base64Str": (pydantic.Base64Str, ANY_TEXT),
    "Base64UrlBytes": (pydantic.Base64UrlBytes, ANY_TEXT),
    "set": (set[int], REPEATS),
    "frozenset": (frozenset[str], REPEATS),
    "conset": (conset(int, min_length=1, max_length=3), REPEATS),
    "set of an Enum": (set[Color], ""),
    "set of literals": (set[Literal["a", "b", "c"]], ""),
    "set of bools": (set[bool], ""),
    "set of sets": (list[set[str]], REPEATS),
    # The schema of EmailStr, which needs a package of its own.
    "EmailStr": (
        Annotated[str, pydantic.WithJsonSchema({"type": "string", "format": "email"})],
        "",
    ),
    "SecretStr": (pydantic.SecretStr, ""),
    "SecretBytes": (pydantic.SecretBytes, ""),
    "Path": (pathlib.Path, ""),
    "FilePath": (pydantic.FilePath, ANY_TEXT),
    "DirectoryPath": (pydantic.DirectoryPath, ANY_TEXT),
    "bytes": (bytes, ""),
    "IPv4Address": (ipaddress.IPv4Address, ""),
    "IPv6Address": (ipaddress.IPv6Address, ""),
    "IPv4Interface": (ipaddress.IPv4Interface, ANY_TEXT),
    "IPv6Network": (ipaddress.IPv6Network, ANY_TEXT),
    "IPvAnyAddress": (pydantic.IPvAnyAddress, ANY_TEXT),
    "dict": (dict[str, int], ""),
    "dict by int": (dict[int, str], ""),
    "dict by literals": (dict[Literal["a", "b"], int], ""),
    "dict by an Enum": (dict[Color, Tree], ""),
    "dict by UUIDs": (dict[uuid.UUID, int], NAMES),
    "dict by lengths": (dict[constr(min_length=2, max_length=4), int], ""),
    "dict by a pattern": (dict[constr(pattern="^[a-z]$"), int], ""),
    "dict with bounds": (Annotated[dict[str, int], Field(min_length=1, max_length=3)], ""),
    "dict by literals with bounds": (
        Annotated[dict[Literal["a", "b"], int], Field(min_length=1)],
        "",
    ),
    "Pattern": (re.Pattern, ANY_TEXT),
    "JsonValue": (pydantic.JsonValue, ""),
    "deprecated": (Annotated[int, Field(deprecated=True, examples=[1])], ""),
    "extra": (Annotated[int, Field(json_schema_extra={"example": 3, "x-order": 1})], ""),
}


def made_of(name: str) -> type[BaseModel]:
    return create_model("Made", value=(TYPES[name][0], ...))


@pytest.mark.parametrize("name", TYPES)
def test_a_type_can_be_held(name: str) -> None:
    note = TYPES[name][1]
    schema = schema_of_type(made_of(name))
    held = schema_source(schema).compile(TOKENS).notes
    assert len(held) == bool(note) and all(note in each for each in held), held
    calls = source(schema).compile(TOKENS).notes
    assert len(calls) == bool(note) and all(note in each for each in calls), calls


def test_decimals_of_older_versions() -> None:
    """They look ahead in their patterns."""
    schema = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    assert schema_source(schema).compile(TOKENS).notes == ()
    state = reply(schema)
    for text, fits in (("-0.50", True), ("+", False), ("", False)):
        assert state.read([*ids(f'"{text}"'), END]).ended == fits
    places = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$"}
    assert "looks ahead" in schema_source(places).compile(TOKENS).notes[0]
    assert source(properties(places)).compile(TOKENS).notes


class Trip(BaseModel):
    pet: Pet
    colors: set[Color]
    stays: dict[Literal["rome", "oslo"], Annotated[int, Field(ge=0, le=9)]]
    password: Annotated[pydantic.SecretStr, Field(max_length=4)]
    inside: ipaddress.IPv4Address
    tags: Annotated[set[Annotated[str, Field(max_length=2)]], Field(max_length=3)]


def test_a_reply_is_an_instance_of_the_class() -> None:
    made = random_model().generate("x", schema=Trip, max_tokens=320)
    assert made.stop_reason == "eos"
    trip = Trip.model_validate_json(made.text)
    data = json.loads(made.text)
    assert len(trip.colors) == len(data["colors"]) and data["pet"]["kind"] == trip.pet.kind
    assert made.warnings[0] == "schema: uniqueItems is not held: items may repeat"
