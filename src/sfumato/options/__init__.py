"""Every option of every command, and every choice of how a reply is decoded, once.

The command line, environment variables, configuration files, shell completion, docs/options.md and
the bounds that the code checks derive from these tables. A new option is one row. Knows what
options are called and which values they take, and not what they do; imports nothing heavy.

`settings.py` has the choices of decoding, which Python and HTTP have too; `general.py`,
`fill.py`, `decide.py`, `bench.py` and `serve.py` have the options of the command line; `limits.py`
has the bounds of numbers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sfumato.options.limits import LAST_SEED, MOST_STEPS, MOST_TOP_K
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

if TYPE_CHECKING:
    from sfumato.options.commands import OPTIONS, option_default, options_of
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
    from sfumato.options.option import PREFIX, Option

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

_HOMES = {
    **dict.fromkeys(("OPTIONS", "option_default", "options_of"), "commands"),
    **dict.fromkeys(("ACTIVATIONS", "CACHE_TYPES", "DEVICES", "DTYPES", "FORMATS"), "kinds"),
    **dict.fromkeys(("GROUP_NOTES", "ON_LOAD", "OTHER_LAYERS"), "kinds"),
    **dict.fromkeys(("PREFIX", "Option"), "option"),
}
"""Where names are that are imported when first used: a step needs no option of a command."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
