"""`YesNo`, `Choice` and `Score`: questions as callers write them in Python. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sfumato.diffusion.constraints.questions import (
    ChoiceQuestion,
    Option,
    ScoreQuestion,
    YesNoQuestion,
)


@dataclass(frozen=True)
class YesNo:
    """Whether something holds; its value is a bool.

    instructions: the question; yes, no: what each answer means.
    """

    instructions: str = ""
    yes: str = ""
    no: str = ""

    def question(self) -> YesNoQuestion:
        return YesNoQuestion(*(_text(self, name) for name in ("instructions", "yes", "no")))


@dataclass(frozen=True, init=False)
class Choice:
    """Which option applies; its value is the name of one.

    options: names, or a mapping of names to descriptions, "" or None where the name says it all.
    """

    options: tuple[Option, ...]
    instructions: str

    def __init__(
        self, options: Mapping[str, str | None] | Iterable[str], instructions: str = ""
    ) -> None:
        object.__setattr__(self, "options", _options(options))
        object.__setattr__(self, "instructions", instructions)

    def question(self) -> ChoiceQuestion:
        return ChoiceQuestion(_text(self, "instructions"), self.options)


@dataclass(frozen=True, init=False)
class Score:
    """Which level applies, of levels that are listed from low to high; its value is the name of
    the most probable level, and its `score` is Σ i·pᵢ, from 0 to the number of levels less one."""

    levels: tuple[str, ...]
    instructions: str

    def __init__(self, *levels: str, instructions: str = "") -> None:
        for level in levels:
            if not isinstance(level, str) or not level:
                raise ValueError(
                    f"Score: a level must be a text that is not empty, got {level!r}; write "
                    'Score("calm", "annoyed", "furious")'
                )
        if len(set(levels)) < len(levels):
            raise ValueError("Score: two levels have the same name; name each level once")
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "instructions", instructions)

    def question(self) -> ScoreQuestion:
        return ScoreQuestion(_text(self, "instructions"), self.levels)


Kind = YesNo | Choice | Score


def _text(kind: Kind, name: str) -> str:
    value = getattr(kind, name)
    if not isinstance(value, str):
        raise ValueError(f"{type(kind).__name__}: {name} must be a text, got {value!r:.80}")
    return value


def _options(options: Mapping[str, str | None] | Iterable[str]) -> tuple[Option, ...]:
    if isinstance(options, str):
        raise ValueError(f"Choice: options must be several names, got the text {options!r:.80}")
    pairs = options.items() if isinstance(options, Mapping) else ((name, "") for name in options)
    made = []
    for name, description in pairs:
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"Choice: the name of an option must be a text that is not empty, got {name!r:.80}"
            )
        if not isinstance(description, str | None):
            raise ValueError(
                f"Choice: the description of {name!r:.80} must be a text or None, got "
                f"{description!r:.80}"
            )
        made.append(Option(name, description or ""))
    return tuple(made)
