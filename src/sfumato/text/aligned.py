"""Which tokens each part of an answer's text is made of, as its canvases settle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sfumato.text.markers import ChatMarkers
from sfumato.text.reply import Region, common_start
from sfumato.text.tokenizer import Detokenizer, Tokenizer

Item = TypeVar("Item")


class AlignedTokens(Generic[Item]):
    """Matches tokens with the parts of an answer's text as these are known, an item for each token.

    Thoughts, tool calls and markers are not part of an answer's text and have no item.
    """

    def __init__(
        self, tokenizer: Tokenizer, markers: ChatMarkers, begins: Region = Region.ANSWER
    ) -> None:
        """begins: where the prompt ends."""
        self._tokenizer, self._markers, self._region = tokenizer, markers, begins
        self._detokenizer = Detokenizer(tokenizer)
        self._incomplete: list[Item] = []  # of the tokens of a character that is not complete
        # The items of tokens by the text that these complete.
        self._complete_texts: deque[tuple[str, list[Item]]] = deque()
        self._text = ""  # taken, and ends within a token

    def push(self, ids: Sequence[int], item: Callable[[int, int], Item]) -> None:
        """The tokens of a settled canvas. item: called with the place and the id of each token of
        the answer."""
        for at, token in enumerate(ids):
            if token in self._tokenizer.special_ids:
                self._flush()
                # Where an end marker ends the reply, no text follows that asks for its tokens.
                marker = self._tokenizer.token_text(token)
                region = self._region.begun_by(marker, self._markers, ignore_ends=True)
                self._region = region or self._region
            elif self._region is Region.ANSWER:
                if self._tokenizer.bytes_of(token) is None:
                    self._flush()
                text = self._detokenizer.push([token])
                self._incomplete.append(item(at, token))
                self._resolve(text)

    def take(self, text: str) -> list[tuple[str, list[Item]]]:
        """The answer's next text in parts, each with the items of its tokens. Text that ends within
        a token waits for the rest of that token."""
        self._text += text
        parts = []
        while self._complete_texts and self._text:
            written, items = self._complete_texts[0]
            if len(written) > len(self._text) and written.startswith(self._text):
                break
            self._complete_texts.popleft()
            # White space beside thoughts and calls is no part of the answer.
            shown = common_start(written, self._text)
            if shown:
                parts.append((self._text[:shown], items))
            self._text = self._text[shown:]
        return parts

    def end(self) -> list[tuple[str, list[Item]]]:
        """The text that still waits, once no text follows."""
        self._flush()
        parts = self.take("")
        if self._text:
            items = self._complete_texts.popleft()[1] if self._complete_texts else []
            self.cut(self._text, items)
            parts.append((self._text, items))
        return parts

    def completed(self, text: str, items: list[Item]) -> None:
        """Called where tokens have completed this text: several where they are the bytes of one
        character."""

    def cut(self, text: str, items: list[Item]) -> None:
        """Called where of the last tokens only this text is in the answer: a stop string may begin
        within a token."""

    def _flush(self) -> None:
        """The next token begins another character."""
        self._resolve(self._detokenizer.flush())

    def _resolve(self, text: str) -> None:
        """The incomplete tokens make up this text; there are none where it is no answer's."""
        if text and self._incomplete:
            self.completed(text, self._incomplete)
            self._complete_texts.append((text, self._incomplete))
            self._incomplete = []
