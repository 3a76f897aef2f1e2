"""Every option of every command, and every choice of how a reply is decoded, once.

The command line, environment variables, configuration files, shell completion, docs/options.md and
the bounds that the code checks derive from these tables. A new option is one row. Knows what
options are called and which values they take, and not what they do; imports nothing heavy.

`settings.py` has the choices of decoding, which Python and HTTP have too; `general.py`,
`fill.py`, `decide.py`, `bench.py` and `serve.py` have the options of the command line; `limits.py`
has the bounds of numbers.
"""

from __future__ import annotations

from typing import Any

from sfumato.options.bench import MEASURING
from sfumato.options.decide import DECIDING
from sfumato.options.fill import FILLING
from sfumato.options.general import GENERAL, VISIBLE
from sfumato.options.kinds import (
    ACTIVATIONS,
    CACHE_TYPES,
    DEVICES,
    DTYPES,
    FORMATS,
    GROUP_NOTES,
    ON_LOAD,
    OTHER_LAYERS,
)
from sfumato.options.limits import LAST_SEED, MOST_STEPS, MOST_TOP_K
from sfumato.options.option import PREFIX, Option
from sfumato.options.serve import SERVING
from sfumato.options.settings import (
    DENOISING,
    MODES,
    SAMPLERS,
    SETTINGS,
    Setting,
    bounds,
    default,
    setting,
)

__all__ = [
    "ACTIVATIONS",
    "CACHE_TYPES",
    "DENOISING",
    "DEVICES",
    "DTYPES",
    "FORMATS",
    "GROUP_NOTES",
    "LAST_SEED",
    "MODES",
    "MOST_STEPS",
    "MOST_TOP_K",
    "ON_LOAD",
    "OPTIONS",
    "OTHER_LAYERS",
    "PREFIX",
    "SAMPLERS",
    "SETTINGS",
    "Option",
    "Setting",
    "bounds",
    "default",
    "option_default",
    "options_of",
    "setting",
]

OPTIONS = (*GENERAL, *FILLING, *DECIDING, *MEASURING, *SERVING, *VISIBLE)


def options_of(command: str) -> list[Option]:
    """The options of a command, in the table's order."""
    return [option for option in OPTIONS if command in option.commands]


def option_default(command: str, name: str) -> Any:
    """The default of an option of a command, which there is: ("serve", "max-body")."""
    return next(option.default for option in options_of(command) if option.name == name)
