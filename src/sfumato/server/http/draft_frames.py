"""What the web page is sent of a canvas: drafts on the way, and what the canvas settled to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sfumato.engine import Draft, Settled
from sfumato.server.service import Service


def draft_frame(service: Service, number: int, draft: Draft) -> dict[str, Any]:
    """One step. Probabilities and entropies (nats) are rounded: they are for display."""
    ids = draft.token_ids.tolist()
    top_ids, top_probs = draft.top_ids.tolist(), _rounded(draft.top_probs)
    noise = {} if draft.noise is None else {"noise": service.token_texts(draft.noise.tolist())}
    pinned = {} if draft.pinned is None else {"pinned": draft.pinned.tolist()}
    return {
        "index": number,
        "canvas": draft.canvas,
        "step": draft.step,
        "max_steps": draft.max_steps,
        "token_ids": ids,
        "tokens": service.token_texts(ids),
        "text": draft.text,
        "entropy": _rounded(draft.entropy),
        "accepted": draft.accepted.tolist(),
        "top": [
            list(zip(tokens, probs, strict=True))
            for tokens, probs in zip(top_ids, top_probs, strict=True)
        ],
        **noise,
        **pinned,
    }


def _rounded(values: Tensor) -> Any:
    """Lists of the values, to four digits."""
    return values.double().mul(1e4).round().div(1e4).tolist()


def settled_frame(service: Service, number: int, settled: Settled, steps: int) -> dict[str, Any]:
    return {
        "index": number,
        "canvas": settled.canvas,
        "convergence": settled.convergence,
        "token_ids": settled.token_ids,
        "tokens": service.token_texts(settled.token_ids),
        "steps": steps,
    }
