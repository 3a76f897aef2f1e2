"""Many requests, one model: continuous batching at the grain of one denoising step."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sfumato.decisions.schema import DecisionUsage
    from sfumato.engine.engine import Engine, own_engine
    from sfumato.engine.engine_config import EngineConfig
    from sfumato.engine.errors import EngineDead, EngineError, NotReady, QueueFull
    from sfumato.engine.events import (
        Account,
        Completed,
        Decided,
        DecisionSink,
        Draft,
        Event,
        Failed,
        Finished,
        Handle,
        RequestFailed,
        Settled,
        Terminal,
    )
    from sfumato.engine.request import DecisionRequest, Request, ServedModel, new_id
    from sfumato.engine.stats import EngineState, Health
    from sfumato.refused import TooLarge
    from sfumato.tasks.wants import Pooling, PromptScores, PromptScoring
    from sfumato.tasks.works import Prompt

_HOMES = {
    "TooLarge": "sfumato.refused",
    "ServedModel": "sfumato.engine.request",
    "Decided": "sfumato.engine.events",
    "DecisionSink": "sfumato.engine.events",
    "DecisionRequest": "sfumato.engine.request",
    "DecisionUsage": "sfumato.decisions.schema",
    "Engine": "sfumato.engine.engine",
    "own_engine": "sfumato.engine.engine",
    "EngineConfig": "sfumato.engine.engine_config",
    "EngineDead": "sfumato.engine.errors",
    "EngineError": "sfumato.engine.errors",
    "NotReady": "sfumato.engine.errors",
    "QueueFull": "sfumato.engine.errors",
    "RequestFailed": "sfumato.engine.events",
    "Account": "sfumato.engine.events",
    "Draft": "sfumato.engine.events",
    "Event": "sfumato.engine.events",
    "Failed": "sfumato.engine.events",
    "Finished": "sfumato.engine.events",
    "Settled": "sfumato.engine.events",
    "Terminal": "sfumato.engine.events",
    "Handle": "sfumato.engine.events",
    "Pooling": "sfumato.tasks.wants",
    "PromptScores": "sfumato.tasks.wants",
    "PromptScoring": "sfumato.tasks.wants",
    "Prompt": "sfumato.tasks.works",
    "Request": "sfumato.engine.request",
    "Completed": "sfumato.engine.events",
    "new_id": "sfumato.engine.request",
    "EngineState": "sfumato.engine.stats",
    "Health": "sfumato.engine.stats",
}
__all__ = [
    "Account",
    "Completed",
    "Decided",
    "DecisionRequest",
    "DecisionSink",
    "DecisionUsage",
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
    "Pooling",
    "Prompt",
    "PromptScores",
    "PromptScoring",
    "QueueFull",
    "Request",
    "RequestFailed",
    "ServedModel",
    "Settled",
    "Terminal",
    "TooLarge",
    "new_id",
    "own_engine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sfumato.engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
