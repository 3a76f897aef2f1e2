"""What llama-server says of itself, in its words: slots, and fields of /props."""

from __future__ import annotations

from typing import Any

from sfumato.engine.stats import EngineState, RowState, SlotState
from sfumato.server.dialects.llama_cpp.settings import default_settings
from sfumato.server.http.errors import ApiError
from sfumato.server.service import FINGERPRINT, Service


def slots(service: Service, fail_on_no_slot: bool) -> list[dict[str, Any]]:
    """llama-server's list. Raises ApiError where no slot is free and that is to fail."""
    state: EngineState = service.engine.state()
    if fail_on_no_slot and all(slot.busy for slot in state.slots):
        raise ApiError(503, "no slot is free", code="no_slot")
    rows = {row.slot: row for row in state.running}
    return [_slot(slot, rows.get(slot.index)) for slot in state.slots]


def _slot(slot: SlotState, row: RowState | None) -> dict[str, Any]:
    """Neither texts nor settings of requests: they are their clients'."""
    return {
        "id": slot.index,
        "n_ctx": slot.context,
        "speculative": False,
        "is_processing": slot.busy,
        "n_prompt_tokens": slot.tokens if row is None else row.prompt_tokens,
        "next_token": [
            {
                "has_next_token": row is not None,
                "n_remain": -1,
                "n_decoded": 0 if row is None else row.output_tokens,
            }
        ],
        **({} if row is None else {"request": row.id, "phase": row.phase}),
    }


def props(service: Service) -> dict[str, Any]:
    """llama-server's fields of /props, as far as ours have other names."""
    path = service.settings.model_path
    return {
        "model_alias": service.name,
        "model_path": service.model.name if path is None else path,
        "modalities": {"vision": False, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "build_info": FINGERPRINT,
        "is_sleeping": False,
        "generation_settings": default_settings(service),
    }
