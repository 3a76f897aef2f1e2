"""A compiled grammar, and its state along the tokens of one reply.

llguidance reads bytes, whatever tokens they come in.  Errors of a grammar are ValueErrors whose
message begins with the field that it came in.  Loads torch for masks alone, so that `trial_process`
does without.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sfumato.diffusion.constraints.grammar_source import GrammarSource
from sfumato.diffusion.constraints.grammar_tokens import GrammarTokens, llguidance
from sfumato.refused import Refused

if TYPE_CHECKING:
    from torch import Tensor

_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""What one grammar may take: some tenths of a second, and some tens of megabytes."""
_LONGEST_MESSAGE = 300
_NO_BEGINNING = "NoExtensionBias"  # llguidance's word where no token may come first
_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")


@dataclass(frozen=True, eq=False)
class Grammar:
    """A grammar over a vocabulary; any thread may share it."""

    tokens: GrammarTokens
    field: str
    text: str  # as llguidance takes it
    _matcher: Any  # at its beginning; only ever copied
    notes: tuple[str, ...] = ()  # what of the source it does not hold, as warnings say it

    def begin(self) -> GrammarState:
        """The state before the first token."""
        return GrammarState(self, self._matcher.deep_copy())


def compile_grammar(source: GrammarSource, tokens: GrammarTokens) -> Grammar:
    """Raises ValueError, naming the source's field, for what is no grammar, for what llguidance
    does not support or finds too large, and for texts that the vocabulary cannot write."""
    source, notes = source.held()
    check_alphabet(source, tokens)
    try:
        compiled = source.compiled()
    except Refused:
        raise
    except ValueError as error:  # of llguidance
        raise _refused(source.field, str(error)) from None
    return replace(compiled_grammar(compiled, source.field, tokens), notes=notes)


def compiled_grammar(compiled: str, field: str, tokens: GrammarTokens) -> Grammar:
    """Of a grammar as llguidance takes it. Raises ValueError."""
    library = llguidance()
    limits = library.LLParserLimits(**_LIMITS)
    matcher = library.LLMatcher(tokens.tokenizer, compiled, log_level=0, limits=limits)
    if matcher.is_error():
        raise _refused(field, matcher.get_error())
    grammar = Grammar(tokens, field, compiled, matcher)
    if grammar.begin().dead():
        raise Refused(field, "no text of this model's vocabulary matches it")
    return grammar


def check_alphabet(source: GrammarSource, tokens: GrammarTokens) -> None:
    """Raises ValueError for a literal with characters that no token writes."""
    alphabet = tokens.alphabet
    if alphabet is None:
        return
    for literal in source.literals():
        if lacking := set(literal) - alphabet:
            raise Refused(
                source.field,
                f"{literal[:80]!r} cannot be written with this model's vocabulary, which lacks "
                f"{min(lacking)!r}",
            )


class GrammarState:
    """How far a grammar has come: of one reply, in one thread."""

    def __init__(self, grammar: Grammar, matcher: Any) -> None:
        self.grammar, self._matcher = grammar, matcher
        self._vocab_size = len(grammar.tokens.tokens)

    def copy(self) -> GrammarState:
        """An independent state; costs microseconds."""
        return GrammarState(self.grammar, self._matcher.deep_copy())

    def valid(self, ids: list[int]) -> int:
        """How many of the ids, no end token among them, may follow one after another."""
        beyond = (n for n, token in enumerate(ids) if token >= self._vocab_size)
        count: int = self._matcher.validate_tokens(ids[: next(beyond, len(ids))])
        self._check()
        return count

    def take(self, ids: list[int]) -> None:
        """Moves on by ids that are valid."""
        if ids and not self._matcher.consume_tokens(ids):
            self._check()
            raise AssertionError("only valid ids are taken")

    @property
    def accepts(self) -> bool:
        """Whether the reply may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def is_complete(self) -> bool:
        """Whether the reply may end here, and nothing may follow."""
        return self.accepts and bool(self._matcher.is_stopped())

    def forced(self) -> list[int]:
        """The tokens that must follow, as the tokenizer writes them; end tokens are not among
        them."""
        if self._matcher.is_stopped():
            return []
        ids: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        ends = self.grammar.tokens.end_ids
        return ids[: next((n for n, token in enumerate(ids) if token in ends), len(ids))]

    def mask(self, known: bytes | None = None) -> Tensor:
        """bool [tokens of the vocabulary]: which may follow. End tokens are among them only where
        the grammar accepts: at a dead end llguidance leaves these alone. known: what `bits` has
        given here."""
        import numpy as np
        import torch

        packed = np.frombuffer(self.bits() if known is None else known, np.uint8)
        bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
        allowed = torch.from_numpy(bits).bool()
        allowed[list(self.grammar.tokens.end_ids)] = self.accepts
        return allowed

    def bits(self) -> bytes:
        """The same, a bit for each token, the lowest of a byte first; but end tokens are among them
        at a dead end too."""
        packed: bytes = self._matcher.compute_bitmask()
        self._check()
        return packed

    def dead(self) -> bool:
        """Whether no token may follow."""
        allowed = int.from_bytes(self.bits(), "little") & (1 << self._vocab_size) - 1
        ends = sum(1 << token for token in self.grammar.tokens.end_ids)
        return not (self.accepts or allowed & ~ends)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refused(self.grammar.field, self._matcher.get_error())


def _refused(field: str, why: str) -> Refused:
    """A message of llguidance as one of ours, in one line and without the parser's state."""
    unsupported = _UNSUPPORTED.search(why)
    if unsupported is not None:
        return Refused(field, f"{unsupported[1]} is not supported", "leave it out")
    if _NO_BEGINNING in why:
        return Refused(
            field,
            "no text of this model's vocabulary can begin to match it",
            "look for a rule or a $ref that leads back to itself without end",
        )
    if "forced bytes" in why:
        return Refused(field, "it needs a character that this model's vocabulary lacks")
    if "Too many items" in why:
        return Refused(field, "is too large, or a rule leads back to itself", "make it smaller")
    why = why.replace("<non-verbose/>", "")
    lines = [line.strip() for line in why.split("<state>")[0].splitlines() if line.strip()]
    text = "; ".join(lines)[:_LONGEST_MESSAGE] or "cannot be followed any further"
    return Refused(field, f"{text[0].lower()}{text[1:]}")
