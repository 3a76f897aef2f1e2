"""The tokens of a text as llama-server names them: ids, and probabilities where they are wanted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from sfumato.server.dialects.shared.logprobs import Entry, TokenLog


class LlamaLog(TokenLog):
    """Entries with the ids of their tokens."""

    def _token(self, token: int, log: float) -> Entry:
        return {"id": token, **super()._token(token, log)}


def ids_of(entries: Iterable[Entry]) -> list[int]:
    return [entry["id"] for entry in entries]


def probabilities(entries: Iterable[Entry], as_probs: bool) -> list[dict[str, Any]]:
    """`completion_probabilities`. as_probs: as probabilities, without those that are 0, and not as
    their logarithms."""
    if not as_probs:
        return list(entries)
    return [
        {**_probability(entry), "top_probs": _nonzero(entry["top_logprobs"])} for entry in entries
    ]


def _nonzero(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    return [each for entry in entries if (each := _probability(entry))["prob"] > 0]


def _probability(entry: Entry) -> dict[str, Any]:
    fields = {name: entry[name] for name in ("id", "token", "bytes")}
    return fields | {"prob": min(1.0, math.exp(entry["logprob"]))}
