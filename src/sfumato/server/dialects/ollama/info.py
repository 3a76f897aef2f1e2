"""What Ollama's clients ask of the model and the server: tags, show, ps, version."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sfumato.refused import Refused
from sfumato.server.chat.call import call_token
from sfumato.server.chat.objects import written_at
from sfumato.server.dialects.ollama.chat import OLLAMA_ERRORS, OllamaShowBody, shown
from sfumato.server.http.dialect import Get, Post
from sfumato.server.http.errors import ApiError
from sfumato.server.service import Service

VERSION = "0.12.6"
"""The version of Ollama whose API this is: clients ask for a version that has what they need."""

NEVER = "2318-01-01T00:00:00Z"  # when the model is unloaded, as Ollama writes it
_LATEST = ":latest"


def version(service: Service) -> dict[str, Any]:
    return {"version": VERSION}


def tags(service: Service) -> dict[str, Any]:
    """The model under each of its names."""
    names = (service.name, *service.settings.aliases)
    return {"models": [_listed(service, name) for name in names]}


def running(service: Service) -> dict[str, Any]:
    """The model, which is always loaded."""
    nbytes = service.engine.used_memory()
    on_device = 0 if service.model.device == "cpu" else nbytes or 0
    more = {
        "size": nbytes or service.model.nbytes or 0,
        "size_vram": on_device,
        "expires_at": NEVER,
        "context_length": service.context,
    }
    return {"models": [_listed(service, service.name) | more]}


def show(service: Service, body: OllamaShowBody) -> dict[str, Any]:
    """Raises ApiError."""
    name = body.model or body.name
    if not name:
        raise Refused("model", "is missing", code="missing")
    if name.removesuffix(_LATEST) not in (service.name, *service.settings.aliases):
        raise ApiError(404, f"model {name[:200]!r} not found; this is {service.name!r}", "model")
    model, kind = service.model, _kind(service)
    return {
        "modelfile": f"FROM {service.name}\n",
        "parameters": f"num_ctx {service.context}",
        "template": model.template.source,
        "details": _details(service),
        "model_info": {
            "general.architecture": kind,
            "general.basename": service.name,
            f"{kind}.context_length": model.config.context_length,
            f"{kind}.embedding_length": model.config.hidden_size,
            f"{kind}.block_count": len(model.config.layers),
            f"{kind}.vocab_size": model.config.vocab_size,
            f"{kind}.canvas_length": model.config.canvas_length,
        },
        "capabilities": _capabilities(service),
        "modified_at": _modified(service),
    }


def _capabilities(service: Service) -> list[str]:
    markers = service.model.template.markers
    has_tools = call_token(service.model) is not None
    return [
        "completion",
        "insert",
        *(["tools"] if has_tools else []),
        *(["thinking"] if markers.thought_open else []),
    ]


def _listed(service: Service, name: str) -> dict[str, Any]:
    full = name if ":" in name else name + _LATEST
    return {
        "name": full,
        "model": full,
        "modified_at": _modified(service),
        "size": service.model.nbytes or 0,
        "digest": _digest(service),
        "details": _details(service),
    }


def _details(service: Service) -> Mapping[str, Any]:
    is_gguf = service.model.name.endswith(".gguf")
    kind = _kind(service)
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": kind,
        "families": [kind],
        "parameter_size": "",
        "quantization_level": "",
    }


def _kind(service: Service) -> str:
    return service.model.family.lower()


def _modified(service: Service) -> str:
    return shown(written_at(service))


def _digest(service: Service) -> str:
    """Differs between models. It is not that of the files, which would take minutes to read."""
    model = service.model
    text = f"{model.name} {model.written} {model.nbytes}"
    return hashlib.sha256(text.encode()).hexdigest()


_TAGS = Get(
    path="/api/tags",
    name="tags",
    tag="Ollama",
    help="The model under each of its names.",
    answer=tags,
    errors=OLLAMA_ERRORS,
    has_head=True,
)
GETS = (
    replace(
        _TAGS,
        path="/api/version",
        name="version",
        help="The version of Ollama whose API this is.",
        answer=version,
    ),
    _TAGS,
    replace(
        _TAGS,
        path="/api/ps",
        name="running",
        help="The model, which is always loaded.",
        answer=running,
        has_head=False,
    ),
)
SHOW = Post(
    path="/api/show",
    name="show",
    tag="Ollama",
    help="The model's properties and what it can do.",
    body_type=OllamaShowBody,
    at_once=show,
    statuses=(404,),
    errors=OLLAMA_ERRORS,
)
