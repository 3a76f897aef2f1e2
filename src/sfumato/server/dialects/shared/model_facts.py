"""What several APIs say of the model, each in a form of its own."""

from __future__ import annotations

from datetime import UTC, datetime

from sfumato.server.service import Service
from sfumato.text.markers import ChatMarkers


def written_at(service: Service) -> datetime:
    """When the model's weights were written; where that is not known, when this server started."""
    written = service.model.written
    return datetime.fromtimestamp(service.started if written is None else written, UTC)


def thinks(markers: ChatMarkers) -> bool:
    """Whether a chat format has thoughts."""
    return bool(markers.thought_open)
