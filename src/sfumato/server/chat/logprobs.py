"""Log probabilities of an answer's tokens, taken from the step in which each canvas settled."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sfumato.engine import Request, ServedModel, Settled
from sfumato.server.chat.sampling import reads
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

    def __init__(
        self,
        service: Service,
        alternatives: int,
        named: Sequence[int] = (),
        by_id: bool = False,
    ) -> None:
        """alternatives: most probable tokens at each position; named: tokens that are named there
        too; by_id: tokens are named by their ids, and not by their texts."""
        self._model, self._alternatives = service.model, alternatives
        self._named, self._by_id = tuple(named), by_id
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
            if tokens and not self._by_id:
                tokens[-1] |= {"token": self._text, "bytes": list(self._text.encode())}
            parts.append((self._text, tokens))
        return parts

    def _flush(self) -> None:
        """The next token begins another character."""
        self._resolve(self._detokenizer.flush())

    def _resolve(self, text: str) -> None:
        """The incomplete tokens make up this text; there are none where it is no answer's."""
        if text and self._incomplete:
            if not self._by_id:
                for entry in self._incomplete:
                    entry["token"] = ""
                self._incomplete[-1]["token"] = text
            self._complete_texts.append((text, self._incomplete))
            self._incomplete = []

    def _entry(self, commit: Settled, at: int, token: int) -> Entry:
        top: list[tuple[int, float]] = []
        if commit.top_ids is not None and commit.top_probs is not None:
            top = list(zip(commit.top_ids[at].tolist(), commit.top_probs[at].tolist(), strict=True))
        logs = {i: math.log(p) if p > 0 else NOT_IN_TOP for i, p in top}
        if commit.named is not None:
            # Of a token that is named twice, one number: the most probable ones' own.
            own = zip(self._named, commit.named[at].tolist(), strict=True)
            logs = {i: max(log, NOT_IN_TOP) for i, log in own} | logs
        if commit.log_probs is not None:
            logs = {token: commit.log_probs[at].item()} | logs
        shown = [i for i, _ in top[: self._alternatives]]
        shown += [i for i in self._named if i not in shown]
        alternatives = [self._token(i, logs[i]) for i in shown]
        return self._token(token, logs.get(token, NOT_IN_TOP)) | {"top_logprobs": alternatives}

    def _token(self, token: int, log: float) -> Entry:
        shown, raw = _text_and_bytes(self._model, token)
        name = f"token_id:{token}" if self._by_id else shown
        return {"token": name, "logprob": log, "bytes": list(raw)}


class ReadLog(TokenLog):
    """The log of a read: every position has an entry, markers and padding too, and the text is
    complete at the end alone."""

    def __init__(self, service: Service, alternatives: int, named: Sequence[int], by_id: bool):
        super().__init__(service, alternatives, named, by_id)
        self._entries: list[Entry] = []

    def add(self, commit: Settled) -> None:
        for at, token in enumerate(commit.token_ids):
            self._entries.append(self._entry(commit, at, token))

    def take(self, text: str) -> list[Logged]:
        self._text += text
        return []

    def end(self) -> list[Logged]:
        return [(self._text, self._entries)]


def log_of(service: Service, alternatives: int, request: Request, by_id: bool | None) -> TokenLog:
    """For the reply to a request. alternatives, by_id: as `TokenLog` has them."""
    named = request.sampler.named_tokens if request.sampler else ()
    kind = ReadLog if reads(request) else TokenLog
    return kind(service, alternatives, named, bool(by_id))


def logged(log: TokenLog, collected: CollectedReply) -> list[Logged]:
    """All of an answer, in parts with their tokens. log: a fresh one. The canvases are dropped."""
    for commit in collected.settled:
        log.add(commit)
    collected.settled.clear()
    return log.take(collected.finished.reply.text) + log.end()


@lru_cache(maxsize=2**16)
def _text_and_bytes(model: ServedModel, token: int) -> tuple[str, bytes]:
    """A token as text, and its bytes."""
    text = token_text(model, token)
    shown = model.tokenizer.decode([token], skip_special=False) if text else ""
    return shown, model.tokenizer.byte(token) or text.encode()


def legacy(parts: Sequence[Logged], offset: int = 0) -> dict[str, Any]:
    """The same in the form of text completions; offset: of the first token, in characters."""
    offsets = []
    for text, tokens in parts:
        offsets += [offset] * len(tokens)
        offset += len(text)
    entries = [entry for _, tokens in parts for entry in tokens]
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [_named(entry["top_logprobs"]) for entry in entries],
        "text_offset": offsets,
    }


def _named(top: Sequence[Entry] | None) -> dict[str, float] | None:
    """The number of the most probable of the tokens with one text."""
    return None if top is None else {each["token"]: each["logprob"] for each in reversed(top)}
