"""Many requests, one model: continuous batching at the grain of one denoising step."""

from __future__ import annotations

from sfumato.diffusion.limits import TooLarge
from sfumato.engine.client import EngineClient, ServedModel
from sfumato.engine.engine import Engine
from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.errors import EngineDead, EngineError, NotReady, QueueFull, RequestFailed
from sfumato.engine.events import Account, Draft, Event, Failed, Finished, Settled, Terminal
from sfumato.engine.handle import Handle
from sfumato.engine.request import Prompt, Request, new_id
from sfumato.engine.stats import EngineState, Health

__all__ = [
    "Account",
    "Draft",
    "Engine",
    "EngineClient",
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
    "ServedModel",
    "Settled",
    "Terminal",
    "TooLarge",
    "new_id",
]
