"""Operations that the user turned off: the environment variable SFUMATO_OFF names them.

Their references in plain torch serve then, on every device: for finding out which faster form makes
a wrong result, and for a device on which one does.
"""

from __future__ import annotations

import logging
import os

from sfumato.ops import registry

log = logging.getLogger(__name__)

VARIABLE = "SFUMATO_OFF"
OPERATIONS = (
    *("after_attention", "after_layer", "attend", "attend_shared", "attention"),
    *("canvas_attention", "dense", "embed", "experts", "geglu", "linear", "move_rows"),
    *("own_scores", "phase_attention", "prepare_heads", "read_attention", "rms_norm", "rotate"),
    *("route", "step_noise", "update_softmax", "vocabulary_mass", "vocabulary_pass"),
    "write_cache",
)
"""All of them, those too that other packages specify."""


def named(wanted: str) -> frozenset[str]:
    """The operations of a list with commas. Raises ValueError for a name that is none."""
    names = frozenset(name.strip() for name in wanted.split(",") if name.strip())
    for name in sorted(names):
        if name not in OPERATIONS:
            raise ValueError(f"{VARIABLE}: {name!r} is none of {', '.join(OPERATIONS)}")
    return names


_off = named(os.environ.get(VARIABLE, ""))
registry.turn_off(_off)
if _off:
    log.warning("%s: torch serves, since %s asks for it", ", ".join(sorted(_off)), VARIABLE)
