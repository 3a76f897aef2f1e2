"""Grammars over one model's vocabulary: how its tokenizer and its chat format meet them.

Knows no network.  `diffusion/constraints/` knows grammars and no texts.
"""

from __future__ import annotations

from sfumato.diffusion.constraints.call_grammar import CallSource, Source
from sfumato.diffusion.constraints.constrained_reply import Constraint
from sfumato.diffusion.constraints.grammar import GrammarTokens
from sfumato.diffusion.constraints.grammar_cache import GrammarCache
from sfumato.text.tokenizer import Tokenizer
from sfumato.text_side import TextSide


class ModelGrammars:
    """The grammars of one model. Any thread may use them."""

    def __init__(self, text: TextSide, end_ids: tuple[int, ...]) -> None:
        self._text = text
        self.cache = GrammarCache(_grammar_tokens(text.tokenizer, end_ids))

    def constraint(self, source: Source, thinking: bool = False) -> Constraint:
        """What a reply must satisfy that is to match a source, behind a thought where one may come.
        Raises ValueError, naming the source's field, for what is no grammar or not supported."""
        quote = source.quote if isinstance(source, CallSource) else None
        return Constraint(self.cache.grammar(source), self._thought if thinking else None, quote)

    @property
    def _thought(self) -> tuple[int, int] | None:
        """The tokens that open and close a thought; None where the vocabulary has none."""
        markers, tokenizer = self._text.template.markers, self._text.tokenizer
        opens = tokenizer.token_id(markers.thought_open) if markers.thought_open else None
        closes = tokenizer.token_id(markers.thought_close) if markers.thought_close else None
        return None if opens is None or closes is None else (opens, closes)


def _grammar_tokens(tokenizer: Tokenizer, end_ids: tuple[int, ...]) -> GrammarTokens:
    size = tokenizer.vocab_size

    def piece(token: int) -> bytes:
        byte = tokenizer.byte(token)
        return tokenizer.token_text(token).encode() if byte is None else byte

    return GrammarTokens(
        lambda: [piece(token) for token in range(size)],
        frozenset(i for i in tokenizer.special_ids if i < size),
        tuple(token for token in end_ids if token < size),
        lambda plain: tokenizer.encode(plain, special=False),
    )
