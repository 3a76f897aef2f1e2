"""Grammars that have been compiled, for requests that ask for the same one again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from sfumato.diffusion.constraints.call_grammar import CallSource, compile_calls
from sfumato.diffusion.constraints.grammar import Grammar, compile_grammar
from sfumato.diffusion.constraints.grammar_source import GrammarSource
from sfumato.diffusion.constraints.grammar_tokens import GrammarTokens

KEPT = 32
"""Grammars; the largest have some megabytes."""

Source = GrammarSource | CallSource


class GrammarCache:
    """Compiles for one vocabulary. Any thread may use it."""

    def __init__(self, tokens: Callable[[], GrammarTokens]) -> None:
        """tokens: called at the first grammar."""
        self._make_tokens = tokens
        self._tokens: GrammarTokens | None = None
        self._grammars: OrderedDict[Source, Grammar] = OrderedDict()
        self._lock = Lock()

    @property
    def tokens(self) -> GrammarTokens:
        with self._lock:
            if self._tokens is None:
                self._tokens = self._make_tokens()
            return self._tokens

    def grammar(self, source: Source) -> Grammar:
        """The compiled grammar of a source. Raises ValueError as `compile_grammar` does."""
        tokens = self.tokens
        with self._lock:
            if source in self._grammars:
                self._grammars.move_to_end(source)
                return self._grammars[source]
        if isinstance(source, CallSource):
            made = compile_calls(source, tokens)
        else:
            made = compile_grammar(source, tokens)
        with self._lock:
            self._grammars[source] = made
            if len(self._grammars) > KEPT:
                self._grammars.popitem(last=False)
        return made
