"""Log probabilities of an answer's tokens, taken from the step in which each canvas settled."""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from typing import Any

from sfumato.engine import ServedModel, Settled
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.service import Service, token_text
from sfumato.text.reply import Region
from sfumato.text.tokenizer import Detokenizer

NOT_IN_TOP = -9999.0  # OpenAI's value for a token that is not among the most probable
Entry = dict[str, Any]  # of one token, as OpenAI's API has it
Logged = tuple[str, list[Entry]]  # text, and the tokens that it is made of


class TokenLog:
    """Matches tokens with the parts of an answer's text as they are sent.

    Thoughts, tool calls and markers are not part of an answer's text and have no entry. The
    `token` of an entry is the text that it completes, so that tokens joined are the answer: of the
    tokens that are the bytes of one character, the last has it.
    """

    def __init__(self, service: Service, alternatives: int) -> None:
        self._model, self._alternatives = service.model, alternatives
        self._region = Region.ANSWER
        self._detokenizer = Detokenizer(service.model.tokenizer)
        self._incomplete: list[Entry] = []  # tokens of a character that is not complete
        self._complete_texts: deque[Logged] = deque()  # tokens by the text they complete
        self._text = ""  # taken, and ends within a token

    def add(self, commit: Settled) -> None:
        """The tokens of a settled canvas."""
        special = self._model.tokenizer.special_ids
        for at, token in enumerate(commit.token_ids):
            if token in special:
                self._flush()
                # Where an end marker ends the reply, no text follows that asks for its tokens.
                markers = self._model.template.markers
                region = self._region.begun_by(
                    token_text(self._model, token), markers, ignore_ends=True
                )
                self._region = region or self._region
            elif self._region is Region.ANSWER:
                if self._model.tokenizer.byte(token) is None:
                    self._flush()
                text = self._detokenizer.push([token])
                self._incomplete.append(self._entry(commit, at, token))
                self._resolve(text)

    def take(self, text: str) -> list[Logged]:
        """The answer's next text in parts, each with its tokens. Text that ends within a token
        waits for the rest of that token."""
        self._text += text
        parts, at = [], 0
        while self._complete_texts and at + len(self._complete_texts[0][0]) <= len(self._text):
            done, tokens = self._complete_texts.popleft()
            parts.append((done, tokens))
            at += len(done)
        self._text = self._text[at:]
        return parts

    def end(self) -> list[Logged]:
        """The text that still waits, once no text follows. A stop string may begin within a token;
        of such a token the entry has the part that is in the text."""
        self._flush()
        parts = self.take("")
        if self._text:
            tokens = self._complete_texts.popleft()[1] if self._complete_texts else []
            if tokens:
                tokens[-1] |= {"token": self._text, "bytes": list(self._text.encode())}
            parts.append((self._text, tokens))
        return parts

    def _flush(self) -> None:
        """The next token begins another character."""
        self._resolve(self._detokenizer.flush())

    def _resolve(self, text: str) -> None:
        """The incomplete tokens make up this text; there are none where it is no answer's."""
        if text and self._incomplete:
            self._incomplete[-1]["token"] = text
            self._complete_texts.append((text, self._incomplete))
            self._incomplete = []

    def _entry(self, commit: Settled, at: int, token: int) -> Entry:
        top: list[tuple[int, float]] = []
        if commit.top_ids is not None and commit.top_probs is not None:
            top = list(zip(commit.top_ids[at].tolist(), commit.top_probs[at].tolist(), strict=True))
        probability = next((p for i, p in top if i == token), 0.0)
        alternatives = [self._token(i, p) for i, p in top[: self._alternatives]]
        return self._token(token, probability) | {"token": "", "top_logprobs": alternatives}

    def _token(self, token: int, probability: float) -> Entry:
        shown, raw = _text_and_bytes(self._model, token)
        return {
            "token": shown,
            "logprob": math.log(probability) if probability > 0 else NOT_IN_TOP,
            "bytes": list(raw),
        }


def entries(service: Service, alternatives: int, collected: CollectedReply) -> list[Entry]:
    """All tokens of an answer."""
    log = TokenLog(service, alternatives)
    for commit in collected.settled:
        log.add(commit)
    parts = log.take(collected.finished.reply.text) + log.end()
    return [entry for _, tokens in parts for entry in tokens]


@lru_cache(maxsize=2**16)
def _text_and_bytes(model: ServedModel, token: int) -> tuple[str, bytes]:
    """A token as text, and its bytes."""
    text = token_text(model, token)
    shown = model.tokenizer.decode([token], skip_special=False) if text else ""
    return shown, model.tokenizer.byte(token) or text.encode()


def legacy(entries: list[Entry], offset: int = 0) -> dict[str, Any]:
    """The same in the form of text completions; offset: of the first token, in characters."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries
        ],
        "text_offset": offsets,
    }
