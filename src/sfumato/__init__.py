"""Sfumato runs, serves and tunes block-diffusion language models.

The public names, and nothing else; they are imported when first used, so that importing the
package (as the command line does for `--help`) does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sfumato.threads import limit_spinning

if TYPE_CHECKING:
    from sfumato.api import Done, Model, Reply, Settled, load
    from sfumato.decisions import Choice, Decision, Score, YesNo
    from sfumato.diffusion.canvas import Draft
    from sfumato.diffusion.constraints.filling import Filled
    from sfumato.diffusion.constraints.hole import Hole
    from sfumato.diffusion.sampler import SoftTopK
    from sfumato.diffusion.sampler_config import SamplerConfig
    from sfumato.engine import Account, Engine, EngineConfig, Failed, Finished, Request

__version__ = "0.1.0"

limit_spinning()  # before torch is imported

_HOMES = {
    "load": "sfumato.api",
    "Model": "sfumato.api",
    "Reply": "sfumato.api",
    "Settled": "sfumato.api",
    "Done": "sfumato.api",
    "Choice": "sfumato.decisions",
    "Decision": "sfumato.decisions",
    "Score": "sfumato.decisions",
    "YesNo": "sfumato.decisions",
    "Draft": "sfumato.diffusion.canvas",
    "Filled": "sfumato.diffusion.constraints.filling",
    "Hole": "sfumato.diffusion.constraints.hole",
    "SamplerConfig": "sfumato.diffusion.sampler_config",
    "SoftTopK": "sfumato.diffusion.sampler",
    "Engine": "sfumato.engine",
    "EngineConfig": "sfumato.engine",
    "Request": "sfumato.engine",
    "Finished": "sfumato.engine",
    "Failed": "sfumato.engine",
    "Account": "sfumato.engine",
}
__all__ = [
    "Account",
    "Choice",
    "Decision",
    "Done",
    "Draft",
    "Engine",
    "EngineConfig",
    "Failed",
    "Filled",
    "Finished",
    "Hole",
    "Model",
    "Reply",
    "Request",
    "SamplerConfig",
    "Score",
    "Settled",
    "SoftTopK",
    "YesNo",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sfumato' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
