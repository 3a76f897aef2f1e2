"""A vocabulary as grammars see it: the bytes of every token, and which tokens end a reply.

The only module that makes llguidance's tokenizer.  Knows no texts beyond their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from types import ModuleType
from typing import Any

from sfumato.refused import Refused

_CLOSERS = ("}", "]", ")", '"', "0", "1", "null", "true", "{", "[", ",", ":", "a")

_SEPARATORS = ("@", ".", "#", ":", "/", "-", "_", " ", "0", "a", "A")


def llguidance() -> ModuleType:
    """The library, imported at its first use. Raises ValueError where it is not installed."""
    try:
        import llguidance as library
    except ImportError:
        raise Refused(
            ("schema", "grammar"),
            "need the package llguidance",
            "install it with `pip install 'llguidance>=1.9'`",
        ) from None
    return library  # type: ignore[no-any-return,unused-ignore]


@dataclass(frozen=True, eq=False)
class GrammarTokens:
    """A vocabulary. Any thread may use it; what the library makes of it is made once, which takes
    seconds for a vocabulary of 262,144 tokens."""

    pieces: Callable[[], Sequence[bytes]]  # of each token its bytes; of a special one its name's
    special_ids: frozenset[int]
    end_ids: tuple[int, ...]  # each of them may end a reply
    encode: Callable[[str], list[int]]  # plain text to ids, as the model's tokenizer writes it
    _lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def tokenizer(self) -> Any:
        """llguidance's `LLTokenizer`."""
        with self._lock:
            return self._tokenizer

    @cached_property
    def tokens(self) -> tuple[bytes, ...]:
        """The bytes of every token, by id."""
        return tuple(self.pieces())

    @cached_property
    def alphabet(self) -> frozenset[str] | None:
        """The characters that plain tokens can write; None: all, by tokens of single bytes."""
        plain = [text for i, text in enumerate(self.tokens) if i not in self.special_ids]
        if len({text for text in plain if len(text) == 1}) == 256:
            return None
        return frozenset("".join(text.decode(errors="ignore") for text in plain))

    @cached_property
    def closers(self) -> tuple[int, ...]:
        """Tokens that end objects and lists, and then those that begin short values: what a short
        completion tries first."""
        return tuple(token for text in _CLOSERS if (token := self._single(text)) is not None)

    @cached_property
    def text_closers(self) -> tuple[int | None, int | None]:
        """A token that only texts hold, and the one that ends a text of JSON."""
        return self._single("~"), self._single('"')

    @cached_property
    def of_texts(self) -> tuple[int | None, int | None]:
        """A bracket and a letter: where both may follow, a text is open."""
        return self._single("}"), self._single("a")

    @cached_property
    def separators(self) -> tuple[int, ...]:
        """What stands between the parts of a text: a short completion tries them first in one."""
        return tuple(token for text in _SEPARATORS if (token := self._single(text)) is not None)

    def _single(self, text: str) -> int | None:
        """The token that the tokenizer writes a text as; None where it writes several."""
        ids = self.encode(text) if self.alphabet is None or set(text) <= self.alphabet else []
        return ids[0] if len(ids) == 1 and self.tokens[ids[0]] == text.encode() else None

    @cached_property
    def _tokenizer(self) -> Any:
        library = llguidance()
        if not self.end_ids:
            raise Refused(("schema", "grammar"), "this model has no token that ends a reply")
        wrapper = _Wrapper(
            self.tokens, self.end_ids[0], sorted(self.special_ids | {*self.end_ids}), self.encode
        )
        return library.LLTokenizer(wrapper, eos_token=list(self.end_ids))


class _Wrapper:
    """What `LLTokenizer` takes in place of a tokenizer.

    It must really tokenize: where grammars force bytes, masks leave only the tokens with which the
    tokenizer would write them.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        end_id: int,
        special_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, end_id, special_ids
        self._encode = encode
        special = {*special_ids}
        self._bytes = {
            piece: i for i, piece in enumerate(tokens) if len(piece) == 1 and i not in special
        }

    def __call__(self, text: str | bytes) -> list[int]:
        """Bytes that are no text, as the first ones of a character that a grammar forces, are
        written as tokens of one byte. From the first byte that has none on, nothing is written:
        the grammar leaves the rest to masks."""
        if isinstance(text, str):
            return self._encode(text)
        ids: list[int] = []
        while text:
            try:
                return ids + self._encode(text.decode())
            except UnicodeDecodeError as error:
                start, stop = error.start, error.end
            ids += self._encode(text[:start].decode()) if start else []
            for at in range(start, stop):
                token = self._bytes.get(text[at : at + 1])
                if token is None:
                    return ids
                ids.append(token)
            text = text[stop:]
        return ids
