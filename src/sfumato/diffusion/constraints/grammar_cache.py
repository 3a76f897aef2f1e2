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
    Vocabulary,
    on_a_stack_of,
)
from sfumato.refused import Refused

KEPT = 32
"""Grammars; the largest have some megabytes."""
KEPT_REFUSALS = 256
"""Messages of sources that were refused."""


class GrammarCache:
    """Compiles for one vocabulary. Any thread may use it."""

    def __init__(self, tokens: GrammarTokens) -> None:
        self.tokens = tokens
        self.trials: Trials | None = None  # of a cache that is guarded
        self._grammars: OrderedDict[Source, Grammar] = OrderedDict()
        self._tried: OrderedDict[Source, Tried] = OrderedDict()  # and not compiled yet
        self._refusals: OrderedDict[bytes, Refused] = OrderedDict()  # by digests of sources
        self._going: dict[Source, Future[Grammar]] = {}
        self._lock = Lock()

    def guard(self, busy: Callable[[str], Exception] = RuntimeError) -> None:
        """From now on every source is tried in another process before it is compiled in this one.
        busy: the error where too many wait for that. Without effect where processes cannot fork,
        as on Windows."""
        with self._lock:
            if self.trials is None and hasattr(os, "fork"):
                self.trials = Trials(self._vocabulary, busy, self._trial_ended)

    def close(self, error: Exception) -> None:
        """Ends the process of trials, and those under way with the error."""
        if self.trials is not None:
            self.trials.close(error)

    def tried(self, source: Source, client: str = "") -> Future[Any]:
        """Begins to try a source, unless that is not needed; `grammar` then only compiles it.
        Cancelling the future ends the trial. Raises, as the future does, what `Trials.start`
        raises."""
        llguidance()
        digest, has_ends = _digest(source), bool(self.tokens.end_ids)
        with self._lock:
            is_known = source in self._grammars or source in self._tried
            refusal = self._refusals.get(digest)
        if self.trials is not None and has_ends and not is_known and refusal is None:
            return self.trials.start(source, client)
        done = Future[None]()
        if refusal is None:
            done.set_result(None)
        else:
            done.set_exception(copy(refusal))
        return done

    def grammar(self, source: Source) -> Grammar:
        """The compiled grammar of a source, which one thread at a time compiles; the others wait
        for it. Raises ValueError as a source's `compile` does, and what a trial raises."""
        tokens, digest = self.tokens, _digest(source)
        with self._lock:
            if source in self._grammars:
                self._grammars.move_to_end(source)
                return self._grammars[source]
            if digest in self._refusals:
                self._refusals.move_to_end(digest)
                raise copy(self._refusals[digest])
            going = self._going.get(source)
            if going is None:
                mine = self._going[source] = Future[Grammar]()
        if going is not None:
            return _result(going)
        try:
            mine.set_result(self._compiled(source, tokens))
        except BaseException as error:
            mine.set_exception(error)
        with self._lock:
            del self._going[source]
            self._keep(source, digest, mine)
        return _result(mine)

    def _compiled(self, source: Source, tokens: GrammarTokens) -> Grammar:
        if self.trials is None or not tokens.end_ids:
            return on_a_stack_of(SERVER_STACK, lambda: source.compile(tokens))
        with self._lock:
            tried = self._tried.pop(source, None)
        made = tried or self.trials.start(source).result()
        work = partial(compiled_grammar, made.text, made.field, tokens)
        grammar = on_a_stack_of(SERVER_STACK, work, NICENESS)
        return replace(grammar, notes=made.notes)

    def _trial_ended(self, source: Source, outcome: Tried | Exception) -> None:
        """Keeps what came of a trial."""
        with self._lock:
            if not isinstance(outcome, Tried):
                return self._keep_refusal(_digest(source), outcome)
            self._tried[source] = outcome
            if len(self._tried) > KEPT:
                self._tried.popitem(last=False)

    def _vocabulary(self) -> Vocabulary:
        tokens = self.tokens
        return Vocabulary(tokens.tokens, tokens.special_ids, tokens.end_ids)

    def _keep(self, source: Source, digest: bytes, done: Future[Grammar]) -> None:
        """Keeps what came of a compilation. The lock is held."""
        error = done.exception()
        if error is not None:
            return self._keep_refusal(digest, error)
        self._grammars[source] = done.result()
        if len(self._grammars) > KEPT:
            self._grammars.popitem(last=False)

    def _keep_refusal(self, digest: bytes, error: BaseException) -> None:
        """Nothing of a failure that is no refusal. The lock is held."""
        if isinstance(error, Refused):
            self._refusals[digest] = copy(error)
            if len(self._refusals) > KEPT_REFUSALS:
                self._refusals.popitem(last=False)


def _result(done: Future[Grammar]) -> Grammar:
    """Waits for it. Raises an error of the caller's own where the source is refused: threads do not
    share one."""
    error = done.exception()
    if isinstance(error, Refused):
        raise copy(error)
    return done.result()


def _digest(source: Source) -> bytes:
    """Of all fields, so that refused sources, which may be long, need not be kept."""
    return sha256(repr(source).encode("utf-8", "surrogatepass")).digest()
