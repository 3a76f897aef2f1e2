"""Ctrl-C while a reply is generated: the first one ends the reply, the second one at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Presses:
    """Counts how often Ctrl-C was pressed; the second time it raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.count = 0
        self._on_first: Callable[[], None] = lambda: None

    def __call__(self, *_: object) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        self._on_first()

    def on_first(self, call: Callable[[], None]) -> None:
        """Calls `call` at the first Ctrl-C, which may already have been pressed."""
        self._on_first = call
        if self.count:
            call()


@contextmanager
def counted() -> Iterator[Presses]:
    """Within, Ctrl-C is counted."""
    presses = Presses()
    # Only the main thread may set signal handlers; a handler that is not Python's own, and a
    # SIGINT that is ignored, are the choice of the program that called this one.
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    replaces = usual and threading.current_thread() is threading.main_thread()
    if replaces:
        signal.signal(signal.SIGINT, presses)
    try:
        yield presses
    finally:
        if replaces:
            signal.signal(signal.SIGINT, signal.default_int_handler)
