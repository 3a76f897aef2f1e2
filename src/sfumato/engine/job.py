"""A request that can be done: its task, and the terminal event that the task's outcome becomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sfumato.engine.events import Account, Terminal
from sfumato.tasks.works import Task


@dataclass(frozen=True)
class Job:
    """What the engine runs; `task` is all that it knows of the request's kind."""

    task: Task
    conclude: Callable[[Any, Account], Terminal]  # of the task's outcome
    wants_drafts: bool = False  # whether Draft events are delivered
