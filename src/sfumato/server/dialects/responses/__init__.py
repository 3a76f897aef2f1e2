"""OpenAI's responses: a body becomes a request, and a reply becomes items or events."""

from __future__ import annotations

from sfumato.server.dialects.responses.renderer import RESPONSES

__all__ = ["RESPONSES"]
