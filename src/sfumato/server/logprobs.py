"""Log probabilities of the tokens of an answer, as the step that settled them found them."""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from typing import Any

from sfumato.api import Model
from sfumato.engine import Commit
from sfumato.server.running import Outcome
from sfumato.server.service import Service, piece
from sfumato.text.tokenizer import Detokenizer

UNLIKELY = -9999.0  # what OpenAI's API says of a token that is not among the likeliest
_REGIONS = {"<|channel>": "<channel|>", "<|tool_call>": "<tool_call|>"}


class TokenLog:
    """Matches tokens with the text of an answer as it goes out, piece by piece.

    Thoughts, tool calls and markers are no part of an answer's text, and so not in here.
    """

    def __init__(self, service: Service, alternatives: int) -> None:
        self._model, self._few = service.model, alternatives
        self._until: str | None = None  # the marker that ends a region that is not the answer's
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()  # with the characters it ends
        self._detokenizer = Detokenizer(service.model.tokenizer)

    def add(self, commit: Commit) -> None:
        """The tokens of a settled canvas."""
        special = self._model.tokenizer.special_ids
        for at, token in enumerate(commit.token_ids):
            if token in special:
                self._enter(piece(self._model, token))
            elif self._until is None:
                characters = len(self._detokenizer.push([token]))
                self._waiting.append((characters, self._entry(commit, at, token)))

    def take(self, characters: int) -> list[dict[str, Any]]:
        """The tokens of the answer's next so many characters."""
        taken = []
        while self._waiting and characters > 0:
            ends, entry = self._waiting.popleft()
            characters -= ends
            taken.append(entry)
        return taken

    def _enter(self, marker: str) -> None:
        if self._until is None:
            self._until = _REGIONS.get(marker)
        elif marker == self._until:
            self._until = None

    def _entry(self, commit: Commit, at: int, token: int) -> dict[str, Any]:
        law: list[tuple[int, float]] = []
        if commit.top_ids is not None and commit.top_probs is not None:
            law = list(zip(commit.top_ids[at].tolist(), commit.top_probs[at].tolist(), strict=True))
        own = next((p for i, p in law if i == token), 0.0)
        top = [self._token(i, p) for i, p in law[: self._few]]
        return self._token(token, own) | {"top_logprobs": top}

    def _token(self, token: int, probability: float) -> dict[str, Any]:
        shown, raw = _looks(self._model, token)
        return {
            "token": shown,
            "logprob": math.log(probability) if probability > 0 else UNLIKELY,
            "bytes": list(raw),
        }


def entries(service: Service, alternatives: int, outcome: Outcome) -> list[dict[str, Any]]:
    """All tokens of a whole answer."""
    log = TokenLog(service, alternatives)
    for commit in outcome.commits:
        log.add(commit)
    return log.take(len(outcome.finished.reply.text))


@lru_cache(maxsize=2**16)
def _looks(model: Model, token: int) -> tuple[str, bytes]:
    """A token as text, and its bytes."""
    text = piece(model, token)
    shown = model.tokenizer.decode([token], skip_special=False) if text else ""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return shown, bytes([int(text[3:5], 16)])
    return shown, text.encode()


def legacy(entries: list[dict[str, Any]], offset: int = 0) -> dict[str, Any]:
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
