"""`Option`: one row of the table of options. Knows no option by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sfumato.options.settings import setting
from sfumato.values import Kind

PREFIX = "SFUMATO_"


@dataclass(frozen=True)
class Option:
    """One option of one or more commands. A name may have several rows, for different commands."""

    name: str  # as on the command line: max-tokens
    kind: Kind
    commands: tuple[str, ...]
    help: str  # the default is added where there is one
    default: Any = None
    metavar: str = ""
    group: str = ""  # the heading that --help shows it under
    short: str = ""  # one letter
    required: bool = False
    secret: bool = False  # its value is shown nowhere

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def key(self) -> str:
        """Its attribute of the parsed arguments."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.key.upper()

    @property
    def off(self) -> str:
        """What turns a flag off again on the command line: --strict has --no-strict."""
        plain = self.name.removeprefix("no-")
        return f"--{plain}" if plain != self.name else f"--no-{self.name}"

    @property
    def shown_default(self) -> str:
        """The default as a user writes it; empty where there is none, or it does nothing."""
        nothing = self.default is None or self.default is False or self.default == ()
        return "" if nothing else self.kind.show(self.default)


def decoding(
    name: str,
    commands: tuple[str, ...],
    metavar: str = "",
    group: str = "",
    default: Any = None,
    more: str = "",
) -> Option:
    """The option of a setting: what the table of settings says of it, and `more` of its help."""
    chosen = setting(name)
    assert chosen.option
    return Option(chosen.option, chosen.kind, commands, chosen.help + more, default, metavar, group)
