"""llama-server's forms of `logit_bias`: an object or pairs, of token ids or texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sfumato.options.limits import LONGEST_STOP, MOST_BIAS, MOST_BIASES
from sfumato.refused import Refused
from sfumato.server.service import Service

NAME = "logit_bias"
BAN = -100.0


def biases_of(service: Service, value: Any) -> dict[str, float] | None:
    """OpenAI's form: token ids as texts, and numbers; of a text each of its tokens. False bans a
    token. Raises Refused."""
    if value is None:
        return None
    if not isinstance(value, dict | list):
        raise Refused(NAME, "must be an object, or a list of pairs")
    if len(value) > MOST_BIASES:
        raise Refused(NAME, f"at most {MOST_BIASES} tokens")
    biases: dict[str, float] = {}
    for key, bias in _pairs(value):
        if bias is False:
            bias = BAN
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise Refused(NAME, "a bias must be a number or false")
        if not -MOST_BIAS <= bias <= MOST_BIAS:
            raise Refused(NAME, f"a bias is not from -{MOST_BIAS} to {MOST_BIAS}")
        for token in _tokens(service, key):
            biases[token] = float(bias)
    return biases


def _pairs(value: dict[str, Any] | list[Any]) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in value):
        raise Refused(NAME, "each item must be a pair of a token and a bias")
    return ((key, bias) for key, bias in value)


def _tokens(service: Service, key: Any) -> list[str]:
    """Token ids as texts; whether they are the model's is checked where all biases are."""
    if type(key) is int or (isinstance(key, str) and key.isascii() and key.isdecimal()):
        return [str(key)]
    if not isinstance(key, str):
        raise Refused(NAME, "a token must be its id or a text")
    if len(key) > LONGEST_STOP:
        raise Refused(NAME, f"a text has at most {LONGEST_STOP} characters")
    return [str(token) for token in service.encode(key, NAME, special=False)]
