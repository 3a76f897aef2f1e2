"""Ollama's routes that generate: POST /api/chat and POST /api/generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sfumato.server.dialects.ollama.errors import OLLAMA_ERRORS
from sfumato.server.dialects.ollama.parsing import (
    CHAT_PATH,
    GENERATE_PATH,
    parse_chat,
    parse_generate,
    streams,
)
from sfumato.server.dialects.ollama.renderer import WIRE, GenerateRenderer, OllamaRenderer
from sfumato.server.dialects.ollama.times import now
from sfumato.server.http.dialect import Dialect
from sfumato.server.http.errors import Wording
from sfumato.server.schemas.ollama import (
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaGeneration,
    OllamaOptions,
)
from sfumato.server.service import Service

_WORDING: Wording = {
    **{name: f"options.{name}" for name in OllamaOptions.model_fields},
    "max_tokens": "options.num_predict",
}


def _loaded(service: Service, body: OllamaGeneration, content: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a client that only wants the model loaded, or unloaded: the model stays."""
    unloads = body.keep_alive in (0, "0", "0s")
    reason = "unload" if unloads else "load"
    end = {"done": True, "done_reason": reason}
    return {"model": service.name, "created_at": now(), **content, **end}


def _without_messages(service: Service, body: OllamaChatBody) -> dict[str, Any] | None:
    if body.messages:
        return None
    # The other fields are checked as those of any message.
    parse_chat(service, body.model_copy(update={"messages": [{"role": "user", "content": ""}]}))
    return _loaded(service, body, {"message": {"role": "assistant", "content": ""}})


def _without_prompt(service: Service, body: OllamaGenerateBody) -> dict[str, Any] | None:
    if body.prompt or body.suffix or body.system:
        return None
    parse_generate(service, body.model_copy(update={"prompt": " "}))  # checks the other fields
    return _loaded(service, body, {"response": ""})


OLLAMA_CHAT = Dialect(
    name="ollama_chat",
    path=CHAT_PATH,
    tag="Ollama",
    help="The reply to a conversation, as lines of JSON or, without a stream, as one body.",
    body_type=OllamaChatBody,
    parse=parse_chat,
    renderer=OllamaRenderer,
    streams=streams,
    wire=WIRE,
    errors=OLLAMA_ERRORS,
    wording=_WORDING,
    at_once=_without_messages,
)

OLLAMA_GENERATE = Dialect(
    name="ollama_generate",
    path=GENERATE_PATH,
    tag="Ollama",
    help="The reply to a prompt, or the text between a prompt and a suffix.",
    body_type=OllamaGenerateBody,
    parse=parse_generate,
    renderer=GenerateRenderer,
    streams=streams,
    wire=WIRE,
    errors=OLLAMA_ERRORS,
    wording={"messages": "prompt", **_WORDING},
    at_once=_without_prompt,
)
