"""A prompt that is encoded and not continued, so that a later request finds it in the cache."""

from __future__ import annotations

from dataclasses import replace

from sfumato.engine import Pooling, Request


def encoded_only(request: Request) -> Request:
    """The request without its reply, which is empty."""
    return replace(request, opening=None, grammar=None, pooling=Pooling("last"), max_tokens=0)
