"""A model as Anthropic's API lists it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sfumato.server.service import Service
from sfumato.text.markers import ChatMarkers

_NO = {"supported": False}
_YES = {"supported": True}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def written_at(service: Service) -> datetime:
    """When the model's weights were written; where that is not known, when this server started."""
    written = service.model.written
    return datetime.fromtimestamp(service.started if written is None else written, UTC)


def thinks(markers: ChatMarkers) -> bool:
    """Whether a chat format has thoughts."""
    return bool(markers.thought_open)


def anthropic_card(service: Service) -> dict[str, Any]:
    """Fields beside OpenAI's."""
    model = service.model
    can_think = {"supported": thinks(model.template.markers)}
    return {
        "type": "model",
        "display_name": service.name,
        "created_at": written_at(service).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": service.context,
        "max_tokens": service.context,
        "capabilities": {
            "batch": _NO,
            "citations": _NO,
            "code_execution": _NO,
            "context_management": _NO,
            "effort": can_think | dict.fromkeys(_EFFORTS, can_think),
            "image_input": _NO,
            "pdf_input": _NO,
            "server_tools": _NO | {"code_execution": _NO, "web_search": _NO},
            "structured_outputs": _YES,
            "thinking": can_think
            | {
                "types": {
                    "adaptive": can_think,
                    "between_tools": _YES,
                    "disabled": _YES,
                    "enabled": can_think,
                }
            },
        },
    }
