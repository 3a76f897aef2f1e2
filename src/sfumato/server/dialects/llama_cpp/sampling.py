"""How replies are drawn, as all routes of llama-server read it from their bodies."""

from __future__ import annotations

from typing import Any

from sfumato.server.dialects.llama_cpp.bias import biases_of
from sfumato.server.dialects.shared.sampling import request_fields, seeds_of
from sfumato.server.schemas.llama_cpp import RANDOM_SEEDS, LlamaSampling
from sfumato.server.service import Service


def writing_s(body: LlamaSampling) -> float | None:
    """Seconds that a reply may be written, from its first text."""
    limit_ms = body.t_max_predict_ms or 0
    return limit_ms / 1e3 if limit_ms > 0 else None


def llama_fields(
    service: Service, body: LlamaSampling, path: str, alternatives: int | None = None
) -> dict[str, Any]:
    """Fields of a Request. Raises Refused."""
    plain = body.model_copy(update={"logit_bias": biases_of(service, body.logit_bias)})
    fields = request_fields(plain, service.model, path, alternatives=alternatives or None)
    fields["seed"] = seeds_of(None if body.seed in RANDOM_SEEDS else body.seed, 1)[0]
    return fields
