"""Many requests, one model: continuous batching at the grain of one denoising step."""

from __future__ import annotations

from sfumato.diffusion.limits import TooLarge
from sfumato.engine.config import EngineConfig
from sfumato.engine.engine import Engine
from sfumato.engine.errors import EngineDead, EngineError, NotReady, QueueFull, RequestFailed
from sfumato.engine.events import Account, Commit, Draft, Event, Failed, Finished, Terminal
from sfumato.engine.handle import Handle
from sfumato.engine.request import Prompt, Request, new_id
from sfumato.engine.state import EngineState, Health

__all__ = [
    "Account",
    "Commit",
    "Draft",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "EngineState",
    "Event",
    "Failed",
    "Finished",
    "Handle",
    "Health",
    "NotReady",
    "Prompt",
    "QueueFull",
    "Request",
    "RequestFailed",
    "Terminal",
    "TooLarge",
    "new_id",
]
