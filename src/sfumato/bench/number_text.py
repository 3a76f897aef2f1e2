"""The text side of random weights: every token reads as its own number.

Random weights have no vocabulary, and the engine turns replies into text. Reads no text.
"""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models

from sfumato.api import TextSide
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Tokenizer


def number_text(size: int) -> TextSide:
    """A vocabulary of `size` tokens without special ones."""
    vocabulary = {f"{token}▁": token for token in range(size)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return TextSide(Tokenizer(inner), ChatTemplate("{{ messages[0].content }}"))
