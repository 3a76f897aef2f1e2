"""Log probabilities of the tokens of an answer, as the step that settled them found them."""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from typing import Any

from sfumato.engine import ServedModel, Settled
from sfumato.server.http.inflight import Outcome
from sfumato.server.service import Service, piece
from sfumato.text.reply import Region
from sfumato.text.tokenizer import Detokenizer

UNLIKELY = -9999.0  # what OpenAI's API says of a token that is not among the likeliest
Entry = dict[str, Any]  # of one token, as OpenAI's API has it
Logged = tuple[str, list[Entry]]  # text, and the tokens that it is made of


class TokenLog:
    """Matches tokens with the text of an answer as it goes out, part by part.

    Thoughts, tool calls and markers are no part of an answer's text, and so not in here. The
    `token` of an entry is the text that it completes, so that tokens joined are the answer: of the
    tokens that are the bytes of one character, the last has it.
    """

    def __init__(self, service: Service, alternatives: int) -> None:
        self._model, self._few = service.model, alternatives
        self._region = Region.ANSWER
        self._detokenizer = Detokenizer(service.model.tokenizer)
        self._open: list[Entry] = []  # tokens of a character that is not complete
        self._ready: deque[Logged] = deque()  # tokens by the text they complete
        self._text = ""  # what has been taken and goes on within a token

    def add(self, commit: Settled) -> None:
        """The tokens of a settled canvas."""
        special = self._model.tokenizer.special_ids
        for at, token in enumerate(commit.token_ids):
            if token in special:
                self._flush()
                # Where an end marker ends the reply, no text follows that asks for its tokens.
                markers = self._model.template.markers
                begun = self._region.begun_by(piece(self._model, token), markers, ignore_ends=True)
                self._region = begun or self._region
            elif self._region is Region.ANSWER:
                if self._model.tokenizer.byte(token) is None:
                    self._flush()
                text = self._detokenizer.push([token])
                self._open.append(self._entry(commit, at, token))
                self._complete(text)

    def take(self, text: str) -> list[Logged]:
        """The answer's next text in parts, each with the tokens that it is made of. What ends
        within a token waits for the rest of it."""
        self._text += text
        parts, at = [], 0
        while self._ready and at + len(self._ready[0][0]) <= len(self._text):
            whole, tokens = self._ready.popleft()
            parts.append((whole, tokens))
            at += len(whole)
        self._text = self._text[at:]
        return parts

    def end(self) -> list[Logged]:
        """What waits once no text follows. A stop string may begin within a token, which is shown
        as far as it is in the text."""
        self._flush()
        parts = self.take("")
        if self._text:
            tokens = self._ready.popleft()[1] if self._ready else []
            if tokens:
                tokens[-1] |= {"token": self._text, "bytes": list(self._text.encode())}
            parts.append((self._text, tokens))
        return parts

    def _flush(self) -> None:
        """What follows is of another character."""
        self._complete(self._detokenizer.flush())

    def _complete(self, text: str) -> None:
        """The text is that of the open tokens; there are none where it belongs to no answer."""
        if text and self._open:
            self._open[-1]["token"] = text
            self._ready.append((text, self._open))
            self._open = []

    def _entry(self, commit: Settled, at: int, token: int) -> Entry:
        likely: list[tuple[int, float]] = []
        if commit.top_ids is not None and commit.top_probs is not None:
            likely = list(
                zip(commit.top_ids[at].tolist(), commit.top_probs[at].tolist(), strict=True)
            )
        own = next((p for i, p in likely if i == token), 0.0)
        top = [self._token(i, p) for i, p in likely[: self._few]]
        return self._token(token, own) | {"token": "", "top_logprobs": top}

    def _token(self, token: int, probability: float) -> Entry:
        shown, raw = _looks(self._model, token)
        return {
            "token": shown,
            "logprob": math.log(probability) if probability > 0 else UNLIKELY,
            "bytes": list(raw),
        }


def entries(service: Service, alternatives: int, outcome: Outcome) -> list[Entry]:
    """All tokens of a whole answer."""
    log = TokenLog(service, alternatives)
    for commit in outcome.commits:
        log.add(commit)
    parts = log.take(outcome.finished.reply.text) + log.end()
    return [entry for _, tokens in parts for entry in tokens]


@lru_cache(maxsize=2**16)
def _looks(model: ServedModel, token: int) -> tuple[str, bytes]:
    """A token as text, and its bytes."""
    text = piece(model, token)
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
