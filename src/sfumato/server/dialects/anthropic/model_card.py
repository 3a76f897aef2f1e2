"""A model as Anthropic's API lists it."""

from __future__ import annotations

from typing import Any

from sfumato.server.dialects.shared.model_facts import thinks, written_at
from sfumato.server.service import Service

_NO = {"supported": False}
_YES = {"supported": True}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


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
