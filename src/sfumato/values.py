"""Kinds of option values: how one is read from text, checked as a plain value, and described.

Text comes from the command line and from environment variables, plain values from TOML. Every
method that refuses raises ValueError with a message that says what is wrong, and not where: that
is known to the caller. Knows no option and no source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

_DECIMAL = ("B", "kB", "MB", "GB", "TB")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_SHOWN = 60  # characters of a refused value
_INFINITY = float("inf")


class Kind(ABC):
    """One kind of values."""

    @abstractmethod
    def parse(self, text: str) -> Any:
        """The value that a text stands for. Raises ValueError."""

    @abstractmethod
    def accept(self, value: object) -> Any:
        """The value that a TOML value stands for. Raises ValueError."""

    def show(self, value: Any) -> str:
        """A value as a user writes it."""
        return str(value)

    @abstractmethod
    def describe(self) -> str:
        """What is accepted, in a few words."""


def size(count: float) -> str:
    """Bytes in decimal units, three significant digits: 16.8 GB."""
    power = 0
    while count >= 999.5 and power < len(_DECIMAL) - 1:
        count /= 1000
        power += 1
    return f"{count:.3g} {_DECIMAL[power]}"


def quoted(value: object) -> str:
    """A value for a message as a TOML file has it, cut where it is long."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class Flag(Kind):
    """True or false; on the command line the option alone says true."""

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        if word not in _ON + _OFF:
            raise ValueError(f"{quoted(text)} is neither true nor false")
        return word in _ON

    def accept(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"{quoted(value)} is neither true nor false (without quotes)")
        return value

    def show(self, value: bool) -> str:
        return str(value).lower()

    def describe(self) -> str:
        return "true or false"


class Text(Kind):
    """Any text."""

    def parse(self, text: str) -> str:
        return text

    def accept(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{quoted(value)} is not text; write it in quotes")
        return self.parse(value)

    def describe(self) -> str:
        return "text"


class Path(Text):
    """A file or folder, relative to the working directory."""

    def parse(self, text: str) -> str:
        if not text:  # which pathlib would take for the working directory
            raise ValueError("the path is empty")
        return text

    def describe(self) -> str:
        return "path"


@dataclass(frozen=True)
class Choice(Text):
    """One of a few names."""

    names: tuple[str, ...]

    def parse(self, text: str) -> str:
        if text not in self.names:
            raise ValueError(f"{quoted(text)} is none of {self.describe()}")
        return text

    def describe(self) -> str:
        return ", ".join(self.names)


@dataclass(frozen=True)
class Number(Kind):
    """A number from `low` to `high` (None: without end); the ends count where they are not named in
    `without`."""

    low: float
    high: float | None = None
    without: tuple[float, ...] = ()
    unit: str = ""

    read: ClassVar[Callable[[Any], Any]] = float
    accepted: ClassVar[tuple[type, ...]] = (int, float)
    name: ClassVar[str] = "number"

    def parse(self, text: str) -> Any:
        return self._inside(text, text)

    def accept(self, value: object) -> Any:
        if not isinstance(value, self.accepted) or isinstance(value, bool):
            hint = "; write it without quotes" if isinstance(value, str) else ""
            raise ValueError(f"{quoted(value)} is not a {self.describe()}{hint}")
        return self._inside(value, value)

    def _inside(self, given: Any, shown: object) -> Any:
        try:
            value = type(self).read(given)
        except (ValueError, OverflowError):
            value = float("nan")
        high = _INFINITY if self.high is None else self.high
        if not self.low <= value <= high or value in (*self.without, _INFINITY):
            raise ValueError(f"{quoted(shown)} is not a {self.describe()}")
        return value

    def show(self, value: float) -> str:
        return f"{value:g}"

    def describe(self) -> str:
        low = "over" if self.low in self.without else "from"
        high = "on" if self.high is None else f"to {self.high}"
        if self.high in self.without:
            high = f"to under {self.high}"
        return f"{self.name}{self.unit and f' of {self.unit}'} {low} {self.low} {high}"


@dataclass(frozen=True)
class Whole(Number):
    """A whole number from `low` to `high`."""

    read = int
    accepted = (int,)
    name = "whole number"

    def show(self, value: float) -> str:
        return str(value)


@dataclass(frozen=True)
class WholeOr(Kind):
    """A whole number, or a word that stands for none in particular."""

    number: Whole
    word: str

    def parse(self, text: str) -> int | str:
        return self._read(self.number.parse, text)

    def accept(self, value: object) -> int | str:
        return self._read(self.number.accept, value)

    def _read(self, read: Callable[[Any], int], value: object) -> int | str:
        try:
            return self.word if value == self.word else read(value)
        except ValueError as error:
            raise ValueError(f"{error}, and not {self.word}") from None

    def describe(self) -> str:
        return f"{self.number.describe()}, or {self.word}"


@dataclass(frozen=True)
class CountOf(Kind):
    """How many of a thing: 8, or image=8, as other servers' options name what they count."""

    name: str

    def parse(self, text: str) -> int:
        digits = text.removeprefix(f"{self.name}=")
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 6):
            raise ValueError(f"{quoted(text)} is no number; write {self.describe()}")
        return int(digits)

    def accept(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(f"{quoted(value)} is no number; write {self.describe()}")
        return self.parse(str(value))

    def describe(self) -> str:
        return f"8 or {self.name}=8"


class Size(Kind):
    """Bytes: 4096, 512K, 8M or 1G."""

    def parse(self, text: str) -> int:
        digits = text[:-1] if text[-1:].upper() in _UNITS else text
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 16):
            raise ValueError(f"{quoted(text)} is no size; write {self.describe()}")
        return int(digits) * (1 if digits == text else _UNITS[text[-1].upper()])

    def accept(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(f'{quoted(value)} is no size; write 4096, "512K", "8M" or "1G"')
        return self.parse(str(value))

    def show(self, value: int) -> str:
        for letter in reversed(_UNITS):
            if value and value % _UNITS[letter] == 0:
                return f"{value // _UNITS[letter]}{letter}"
        return str(value)

    def describe(self) -> str:
        return "4096, 512K, 8M or 1G"


@dataclass(frozen=True)
class Listed(Kind):
    """One or more values with commas between them: 256,512; an array in TOML."""

    item: Kind

    between: ClassVar[str] = ","
    note: ClassVar[str] = "; several with commas"

    def parse(self, text: str) -> Any:
        return [self.item.parse(part) for part in text.split(self.between)]

    def accept(self, value: object) -> Any:
        if value == []:
            raise ValueError("the array is empty")
        return [self.item.accept(one) for one in (value if isinstance(value, list) else [value])]

    def show(self, value: Any) -> str:
        return self.between.join(map(self.item.show, value))

    def describe(self) -> str:
        return f"{self.item.describe()}{self.note}"


class Each(Listed):
    """Several values: an option that may be given several times; an array in TOML.

    As one text, values stand between commas, or in a JSON array, where they hold commas themselves.
    """

    note = ", several times"

    def parse(self, text: str) -> list[Any]:
        if not text.lstrip().startswith("["):
            return [self.item.parse(part.strip()) for part in text.split(",") if part.strip()]
        import json  # here: `sfumato --help` needs none

        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(
                'a value that begins with [ must be a JSON array, as ["a", "b"]'
            ) from None
        return self.accept(values)

    def accept(self, value: object) -> list[Any]:
        return [] if value == [] else super().accept(value)


class OneOrTwo(Listed):
    """One value, or two with a colon between them: 64:8; in TOML also an array."""

    between = ":"
    note = "; or two with a colon"

    def parse(self, text: str) -> tuple[Any, ...]:
        if text.count(":") > 1:
            raise ValueError(f"{quoted(text)} is more than two values")
        return tuple(super().parse(text))

    def accept(self, value: object) -> tuple[Any, ...]:
        if isinstance(value, str):
            return self.parse(value)
        if isinstance(value, list) and not 1 <= len(value) <= 2:
            raise ValueError(f"{quoted(value)} is not one value or two")
        return tuple(super().accept(value))


@dataclass(frozen=True)
class Biases(Kind):
    """Token ids and a number for each, at most `count` of them; an object in JSON."""

    count: int
    most: float  # of the numbers, above and below 0

    def parse(self, text: str) -> dict[int, float]:
        raise ValueError("token ids and their numbers can be given in a request alone")

    def accept(self, value: object) -> dict[int, float]:
        if not isinstance(value, dict) or len(value) > self.count:
            raise ValueError(f"{quoted(value)} is not {self.describe()}")
        key, number = Whole(0), Number(-self.most, self.most)
        return {key.parse(str(token)): number.accept(bias) for token, bias in value.items()}

    def show(self, value: dict[int, float]) -> str:
        return ",".join(f"{token}:{bias:g}" for token, bias in value.items())

    def describe(self) -> str:
        return f"token ids with numbers from -{self.most} to {self.most}, {self.count} at most"
