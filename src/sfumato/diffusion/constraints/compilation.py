"""A source becomes a grammar, on a stack that is large enough."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from sfumato.diffusion.constraints.call_grammar import CallSource, compile_calls
from sfumato.diffusion.constraints.grammar import Grammar, compile_grammar
from sfumato.diffusion.constraints.grammar_source import GrammarSource
from sfumato.diffusion.constraints.grammar_tokens import GrammarTokens

T = TypeVar("T")

Source = GrammarSource | CallSource

STACK = 16 << 20
"""Bytes, whatever the threads of the system have: a grammar that `depth` lets pass takes 2 MB."""
NICENESS = 5
"""By which compiling what clients send yields to the model's steps: it has a quarter of a core that
both want. More would starve it on a machine that is busy with other programs."""
_starting = threading.Lock()


def compiled_source(source: Source, tokens: GrammarTokens) -> Grammar:
    """Raises ValueError, as `compile_grammar` and `compile_calls` do."""
    if isinstance(source, CallSource):
        return compile_calls(source, tokens)
    return compile_grammar(source, tokens)


def on_a_stack_of(nbytes: int, work: Callable[[], T], niceness: int = 0) -> T:
    """Calls `work` in a thread that has such a stack, and waits for it. niceness: by
    which the thread yields to others, on Linux, where each has its own."""
    done = Future[T]()

    def run() -> None:
        if niceness and sys.platform == "linux":
            with suppress(OSError):  # as a sandbox may have it
                os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="sfumato-grammar", daemon=True)
    with _starting:  # the size is one for all threads that start
        before = threading.stack_size(nbytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return done.result()
