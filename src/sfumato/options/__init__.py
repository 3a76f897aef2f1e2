"""Every option of every command, and every choice of how a reply is decoded, once.

The command line, environment variables, configuration files, shell completion, docs/options.md and
the bounds that the code checks derive from these tables. A new option is one row. Knows what
options are called and which values they take, and not what they do; imports nothing heavy.

`settings.py` has the choices of decoding, which Python and HTTP have too; `table.py` has the
options of the command line, which a step does not load; `exclusions.py` says what does not go
together; `limits.py` has the bounds of numbers.
"""

from sfumato.options.limits import LAST_SEED, MOST_STEPS, MOST_TOP_K
from sfumato.options.settings import (
    DENOISING,
    MODES,
    PACES,
    SAMPLERS,
    SETTINGS,
    VERIFICATIONS,
    Setting,
    bounds,
    default,
    setting,
)

__all__ = [
    "DENOISING",
    "LAST_SEED",
    "MODES",
    "MOST_STEPS",
    "MOST_TOP_K",
    "PACES",
    "SAMPLERS",
    "SETTINGS",
    "VERIFICATIONS",
    "Setting",
    "bounds",
    "default",
    "setting",
]
