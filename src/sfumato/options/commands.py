"""All options of all commands, in the table's order."""

from __future__ import annotations

from typing import Any

from sfumato.options.bench import MEASURING
from sfumato.options.decide import DECIDING
from sfumato.options.fill import FILLING
from sfumato.options.general import GENERAL, VISIBLE
from sfumato.options.option import Option
from sfumato.options.serve import SERVING

OPTIONS = (*GENERAL, *FILLING, *DECIDING, *MEASURING, *SERVING, *VISIBLE)


def options_of(command: str) -> list[Option]:
    """The options of a command, in the table's order."""
    return [option for option in OPTIONS if command in option.commands]


def option_default(command: str, name: str) -> Any:
    """The default of an option of a command, which there is: ("serve", "max-body")."""
    return next(option.default for option in options_of(command) if option.name == name)
