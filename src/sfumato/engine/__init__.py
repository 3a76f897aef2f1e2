"""Many requests, one model: continuous batching at the grain of one denoising step."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sfumato.decisions.results import DecisionUsage
    from sfumato.engine.client import EngineClient, ServedModel
    from sfumato.engine.decision import DecisionRequest
    from sfumato.engine.engine import Engine
    from sfumato.engine.engine_config import EngineConfig
    from sfumato.engine.errors import EngineDead, EngineError, NotReady, QueueFull, RequestFailed
    from sfumato.engine.events import (
        Account,
        Completed,
        Decided,
        Draft,
        Event,
        Failed,
        Finished,
        Settled,
        Terminal,
    )
    from sfumato.engine.handle import DecisionHandle, DecisionSink, Handle
    from sfumato.engine.request import Request, TaskRequest, new_id
    from sfumato.engine.stats import EngineState, Health
    from sfumato.refused import TooLarge
    from sfumato.tasks.wants import Pooling, PromptScores, PromptScoring
    from sfumato.tasks.works import Prompt

_HOMES = {
    "TooLarge": "sfumato.refused",
    "EngineClient": "sfumato.engine.client",
    "ServedModel": "sfumato.engine.client",
    "Decided": "sfumato.engine.events",
    "DecisionHandle": "sfumato.engine.handle",
    "DecisionSink": "sfumato.engine.handle",
    "DecisionRequest": "sfumato.engine.decision",
    "DecisionUsage": "sfumato.decisions.results",
    "Engine": "sfumato.engine.engine",
    "EngineConfig": "sfumato.engine.engine_config",
    "EngineDead": "sfumato.engine.errors",
    "EngineError": "sfumato.engine.errors",
    "NotReady": "sfumato.engine.errors",
    "QueueFull": "sfumato.engine.errors",
    "RequestFailed": "sfumato.engine.errors",
    "Account": "sfumato.engine.events",
    "Draft": "sfumato.engine.events",
    "Event": "sfumato.engine.events",
    "Failed": "sfumato.engine.events",
    "Finished": "sfumato.engine.events",
    "Settled": "sfumato.engine.events",
    "Terminal": "sfumato.engine.events",
    "Handle": "sfumato.engine.handle",
    "Pooling": "sfumato.tasks.wants",
    "PromptScores": "sfumato.tasks.wants",
    "PromptScoring": "sfumato.tasks.wants",
    "Prompt": "sfumato.tasks.works",
    "Request": "sfumato.engine.request",
    "TaskRequest": "sfumato.engine.request",
    "Completed": "sfumato.engine.events",
    "new_id": "sfumato.engine.request",
    "EngineState": "sfumato.engine.stats",
    "Health": "sfumato.engine.stats",
}
__all__ = [
    "Account",
    "Completed",
    "Decided",
    "DecisionHandle",
    "DecisionRequest",
    "DecisionSink",
    "DecisionUsage",
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
    "Pooling",
    "Prompt",
    "PromptScores",
    "PromptScoring",
    "QueueFull",
    "Request",
    "RequestFailed",
    "ServedModel",
    "Settled",
    "TaskRequest",
    "Terminal",
    "TooLarge",
    "new_id",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sfumato.engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
