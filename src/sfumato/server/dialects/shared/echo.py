"""The prompt in an answer: its text, and the log probabilities of its tokens.

In OpenAI's form for text completions (`echo` with `logprobs`), in which each token of prompt and
reply has an entry, end tokens too; and in vLLM's (`prompt_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sfumato.engine import PromptScores, ServedModel, Settled
from sfumato.server.dialects.shared.logprobs import Entry, Logged, TokenLog
from sfumato.server.service import Service, token_text
from sfumato.text.tokenizer import Detokenizer


def prompt_text(model: ServedModel, ids: Sequence[int]) -> str:
    """The text of a prompt's tokens, without the token that every text begins with."""
    return model.tokenizer.decode(ids[_begins(model, ids) :], skip_special=False)


def _begins(model: ServedModel, ids: Sequence[int]) -> int:
    """1 where the first token is the one that every text begins with."""
    return int(bool(ids) and ids[0] == model.tokenizer.bos_id)


class EchoLog(TokenLog):
    """Of a prompt and the reply to it: an entry for each token, in their order, once all are
    known."""

    def __init__(self, service: Service, alternatives: int, prompt: Sequence[int], by_id: bool):
        super().__init__(service, alternatives, (), by_id)
        self._prompt = prompt
        self._written: list[tuple[int, Entry]] = []

    def add(self, commit: Settled) -> None:
        ids = [*commit.token_ids, *([] if commit.end_id is None else [commit.end_id])]
        self._written += [(token, self._entry(commit, at, token)) for at, token in enumerate(ids)]

    def take(self, text: str) -> list[Logged]:
        """Nothing: the tokens come together, in `parts`."""
        return []

    def parts(self, scores: PromptScores | None) -> list[Logged]:
        """A part for each token, with the text that it completes; without scores (of a prompt that
        was not encoded to its end) the prompt's tokens have no numbers."""
        entries = [*zip(self._prompt, self._prompt_entries(scores), strict=True), *self._written]
        texts, begins = Detokenizer(self._model.tokenizer), _begins(self._model, self._prompt)
        return [
            ("" if place < begins else texts.push([token]), [entry])
            for place, (token, entry) in enumerate(entries)
        ]

    def _prompt_entries(self, scores: PromptScores | None) -> list[Entry]:
        known = None if scores is None else scores.scores
        if known is None:
            return [self._unknown(token) for token in self._prompt]
        entries = [self._unknown(token) for token in self._prompt[:1]]
        columns = known.log_probs, known.top_ids, known.top_log_probs
        rows = zip(self._prompt[1:], *(column.tolist() for column in columns), strict=True)
        for token, log, top_ids, top_logs in rows:
            top = zip(top_ids[: self._alternatives], top_logs, strict=False)
            alternatives = [self._token(i, own) for i, own in top]
            entries.append(self._token(token, log) | {"top_logprobs": alternatives})
        return entries

    def _unknown(self, token: int) -> Entry:
        return self._token(token, 0.0) | {"logprob": None, "top_logprobs": None}


def prompt_logprobs(
    model: ServedModel, scores: PromptScores | None, top: int
) -> list[dict[str, Any] | None] | None:
    """vLLM's list: null for the first token, and of each other token its own entry and those of the
    `top` most probable ones, by id; null where the prompt was not encoded to its end."""
    if scores is None:
        return None
    listed: list[dict[str, Any] | None] = [None]
    known = scores.scores
    if known is None:
        return listed
    columns = known.log_probs, known.ranks, known.top_ids, known.top_log_probs
    rows = zip(scores.ids[1:], *(column.tolist() for column in columns), strict=True)
    for token, log, rank, top_ids, top_logs in rows:
        entries = {str(token): _entry(model, token, log, rank)}
        for place, (i, own) in enumerate(zip(top_ids[:top], top_logs, strict=False), 1):
            entries.setdefault(str(i), _entry(model, i, own, place))
        listed.append(entries)
    return listed


def _entry(model: ServedModel, token: int, log: float, rank: int) -> dict[str, Any]:
    return {"logprob": log, "rank": rank, "decoded_token": token_text(model, token)}
