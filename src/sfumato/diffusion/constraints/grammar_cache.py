"""Grammars that have been compiled, for requests that ask for the same one again."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from functools import partial
from hashlib import sha256
from threading import Lock
from typing import Any

from sfumato.diffusion.constraints.call_grammar import Source
from sfumato.diffusion.constraints.grammar import (
    Grammar,
    GrammarTokens,
    compiled_grammar,
    llguidance,
)
from sfumato.diffusion.constraints.trials import (
    NICENESS,
    SERVER_STACK,
    Trials,
    Tried,
    on_a_stack_of,
)
from sfumato.refused import Refused

KEPT = 32
"""Grammars, and as many that were tried and are not compiled yet; some have megabytes."""
KEPT_REFUSALS = 256
"""Messages of sources that were refused."""


class GrammarCache:
    """Compiles for one vocabulary. Any thread may use it."""

    def __init__(self, tokens: GrammarTokens) -> None:
        self.tokens = tokens
        self.trials: Trials | None = None  # of a cache that is guarded
        # By digests of sources: what came of each, the last asked for at the end.
        self._known: OrderedDict[bytes, Grammar | Tried | Refused] = OrderedDict()
        self._going: dict[bytes, Future[Grammar]] = {}
        self._lock = Lock()

    def guard(self, busy: Callable[[str], Exception] = RuntimeError) -> None:
        """From now on every source is tried in another process before it is compiled in this one.
        busy: the error where too many wait for that. Without effect where processes cannot fork,
        as on Windows."""
        with self._lock:
            if self.trials is None and hasattr(os, "fork"):
                self.trials = Trials(self.tokens, busy, self._trial_ended)

    def close(self, error: Exception) -> None:
        """Ends the process of trials, and those under way with the error."""
        if self.trials is not None:
            self.trials.close(error)

    def tried(self, source: Source, client: str = "") -> Future[Any]:
        """Begins to try a source, unless that is not needed; `grammar` then only compiles it.
        Cancelling the future ends the trial. Raises, as the future does, what `Trials.start`
        raises."""
        llguidance()
        with self._lock:
            known = self._known.get(_digest(source))
        if self.trials is not None and self.tokens.end_ids and known is None:
            return self.trials.start(source, client)
        done = Future[None]()
        if isinstance(known, Refused):
            done.set_exception(copy(known))
        else:
            done.set_result(None)
        return done

    def grammar(self, source: Source) -> Grammar:
        """The compiled grammar of a source, which one thread at a time compiles; the others wait
        for it. Raises ValueError as a source's `compile` does, and what a trial raises."""
        digest = _digest(source)
        with self._lock:
            known = self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
            if isinstance(known, Grammar):
                return known
            if isinstance(known, Refused):
                raise copy(known)
            going = self._going.get(digest)
            if going is None:
                mine = self._going[digest] = Future[Grammar]()
        if going is not None:
            return _result(going)
        try:
            mine.set_result(self._compiled(source, known))
        except BaseException as error:
            mine.set_exception(error)
        with self._lock:
            del self._going[digest]
            self._keep(digest, mine.exception() or mine.result())
        return _result(mine)

    def _compiled(self, source: Source, tried: Tried | None) -> Grammar:
        if self.trials is None or not self.tokens.end_ids:
            return on_a_stack_of(SERVER_STACK, lambda: source.compile(self.tokens))
        made = tried or self.trials.start(source).result()
        work = partial(compiled_grammar, made.text, made.field, self.tokens)
        grammar = on_a_stack_of(SERVER_STACK, work, NICENESS)
        return replace(grammar, notes=made.notes)

    def _trial_ended(self, source: Source, outcome: Tried | Exception) -> None:
        with self._lock:
            self._keep(_digest(source), outcome)

    def _keep(self, digest: bytes, known: Grammar | Tried | BaseException) -> None:
        """Nothing of a failure that is no refusal. The lock is held."""
        if not isinstance(known, Grammar | Tried | Refused):
            return
        self._known[digest] = copy(known) if isinstance(known, Refused) else known
        self._known.move_to_end(digest)
        alike = [key for key, each in self._known.items() if type(each) is type(known)]
        if len(alike) > (KEPT_REFUSALS if isinstance(known, Refused) else KEPT):
            del self._known[alike[0]]


def _result(done: Future[Grammar]) -> Grammar:
    """Waits for it. Raises an error of the caller's own where the source is refused: threads do not
    share one."""
    error = done.exception()
    if isinstance(error, Refused):
        raise copy(error)
    return done.result()


def _digest(source: Source) -> bytes:
    """Tells sources apart by all their fields: those that are refused, which may be long, need not
    be kept."""
    return sha256(repr(source).encode("utf-8", "surrogatepass")).digest()
