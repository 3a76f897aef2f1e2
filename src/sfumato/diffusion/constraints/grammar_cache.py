"""Grammars that have been compiled, for requests that ask for the same one again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from hashlib import sha256
from threading import Lock

from sfumato.diffusion.constraints.call_grammar import CallSource, compile_calls
from sfumato.diffusion.constraints.grammar import Grammar, compile_grammar
from sfumato.diffusion.constraints.grammar_source import GrammarSource
from sfumato.diffusion.constraints.grammar_tokens import GrammarTokens

KEPT = 32
"""Grammars; the largest have some megabytes."""
KEPT_REFUSALS = 256
"""Messages of sources that were refused."""

Source = GrammarSource | CallSource


class GrammarCache:
    """Compiles for one vocabulary. Any thread may use it."""

    def __init__(self, tokens: Callable[[], GrammarTokens]) -> None:
        """tokens: called at the first grammar."""
        self._make_tokens = tokens
        self._tokens: GrammarTokens | None = None
        self._grammars: OrderedDict[Source, Grammar] = OrderedDict()
        self._refusals: OrderedDict[bytes, str] = OrderedDict()  # by digests of sources
        self._going: dict[Source, Future[Grammar]] = {}
        self._lock = Lock()

    @property
    def tokens(self) -> GrammarTokens:
        with self._lock:
            if self._tokens is None:
                self._tokens = self._make_tokens()
            return self._tokens

    def grammar(self, source: Source) -> Grammar:
        """The compiled grammar of a source, which one thread at a time compiles; the others wait
        for it. Raises ValueError as `compile_grammar` does."""
        tokens, digest = self.tokens, _digest(source)
        with self._lock:
            if source in self._grammars:
                self._grammars.move_to_end(source)
                return self._grammars[source]
            if digest in self._refusals:
                self._refusals.move_to_end(digest)
                raise ValueError(self._refusals[digest])
            going = self._going.get(source)
            if going is None:
                mine = self._going[source] = Future[Grammar]()
        if going is not None:
            return _result(going)
        try:
            mine.set_result(_compiled(source, tokens))
        except BaseException as error:
            mine.set_exception(error)
        with self._lock:
            del self._going[source]
            self._keep(source, digest, mine)
        return _result(mine)

    def _keep(self, source: Source, digest: bytes, done: Future[Grammar]) -> None:
        """Keeps what came of a compilation; a failure that is no refusal is not kept."""
        error = done.exception()
        if error is None:
            self._grammars[source] = done.result()
            if len(self._grammars) > KEPT:
                self._grammars.popitem(last=False)
        elif type(error) is ValueError:
            self._refusals[digest] = str(error)
            if len(self._refusals) > KEPT_REFUSALS:
                self._refusals.popitem(last=False)


def _compiled(source: Source, tokens: GrammarTokens) -> Grammar:
    if isinstance(source, CallSource):
        return compile_calls(source, tokens)
    return compile_grammar(source, tokens)


def _result(done: Future[Grammar]) -> Grammar:
    """Waits for it. Raises an error of the caller's own where the source is refused: threads do not
    share one."""
    error = done.exception()
    if type(error) is ValueError:
        raise ValueError(str(error))
    return done.result()


def _digest(source: Source) -> bytes:
    """Of all fields, so that refused sources, which may be long, need not be kept."""
    return sha256(repr(source).encode("utf-8", "surrogatepass")).digest()
