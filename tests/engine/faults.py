"""Faults for the tests of the engine: raised on purpose, and what came of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.scripted_engine import Script, engine

from sfumato.engine import (
    Engine,
    Failed,
    Handle,
)

LONG = "one two three four five six seven.<turn|>"


def outcome(handle: Handle) -> str:
    assert handle.terminal is not None
    if isinstance(handle.terminal, Failed):
        return handle.terminal.kind
    return handle.terminal.reply.stop_reason


def raising(
    error: BaseException, what: str, keys: set[int], times: int = 1000
) -> Callable[[str, list[int]], None]:
    """Raises in forwards of one kind in which one of the keys takes part."""
    left = [times]

    def before(kind: str, row_keys: list[int]) -> None:
        if kind == what and keys & set(row_keys) and left[0]:
            left[0] -= 1
            raise error

    return before


def three(**config: Any) -> tuple[Engine, Any, list[Script], list[Handle]]:
    scripts = [Script(key, 5, LONG) for key in (40, 41, 42)]
    serving, network = engine(*scripts, **config)
    handles = [serving.submit(script.request()) for script in scripts]
    return serving, network, scripts, handles


def no_slot_is_leaked(serving: Engine) -> bool:
    return not any(slot.busy for slot in serving.state().slots) and not serving.state().running
