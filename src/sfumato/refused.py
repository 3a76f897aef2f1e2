"""`Refused`: what a user gave and cannot have, as a value that carries the field.

The message is composed of the parts: "field: why; advice". Who shows it may give the field another
name, or the advice other words, and never reads the message. Knows no field; imports nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from typing import TypeVar

Self = TypeVar("Self", bound="Refused")

_INDEX = re.compile(r"\[(\d+)\]")


class Refused(ValueError):
    """A value of a user that is refused. The field is a path such as messages[0].role."""

    def __init__(
        self,
        field: str | tuple[str, ...] | None,
        why: str,
        advice: str = "",
        code: str | None = None,
    ) -> None:
        """field: several where they are wrong together, of which the first counts; None where no
        field in particular is wrong. code: a word for programs, where there is one."""
        super().__init__(field, why, advice, code)
        self.fields = (field,) if isinstance(field, str) else field or ()
        self.why, self.advice, self.code = why, advice, code
        self.recorded: str | None = None  # the id of the request that an engine has recorded it for

    @property
    def field(self) -> str | None:
        """The field, of several the first."""
        return self.fields[0] if self.fields else None

    @property
    def reason(self) -> str:
        """The message without the field."""
        return f"{self.why}; {self.advice}" if self.advice else self.why

    def __str__(self) -> str:
        return f"{', '.join(self.fields)}: {self.reason}" if self.fields else self.reason

    def about(self: Self, *fields: str) -> Self:
        """The same of other fields."""
        other = copy(self)
        other.fields = fields
        return other

    def advising(self: Self, advice: str) -> Self:
        """The same with other advice."""
        other = copy(self)
        other.advice = advice
        return other

    def renamed(self: Self, names: Mapping[str, str]) -> Self:
        """The same in another's words. names: what fields are called there, or beginnings of their
        paths; "tools[].function" is about each of the tools."""
        return self.about(*(_renamed(field, names) for field in self.fields))


def _renamed(field: str, names: Mapping[str, str]) -> str:
    """The longest beginning of the path that has another name gets that name."""
    ends = [len(field), *(at for at in range(len(field) - 1, 0, -1) if field[at] in ".[")]
    for end in ends:
        begins = field[:end]
        name = names.get(begins)
        if name is None and (name := names.get(_INDEX.sub("[]", begins))) is not None:
            for number in _INDEX.findall(begins):
                name = name.replace("[]", f"[{number}]", 1)
        if name is not None:
            return name + field[end:]
    return field


class TooLarge(Refused):
    """A request that can never be served here. Says what it needs, what there is, and what to
    change; in numbers too, as far as they are known."""

    def __init__(
        self,
        field: str | tuple[str, ...] | None,
        why: str,
        advice: str = "",
        prompt_tokens: int | None = None,
        context: int | None = None,
    ) -> None:
        super().__init__(field, why, advice, "context_length_exceeded")
        self.args = (field, why, advice, prompt_tokens, context)
        self.prompt_tokens, self.context = prompt_tokens, context
