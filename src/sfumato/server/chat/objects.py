"""A reply, its account and the model as the objects that several APIs have. Knows no HTTP."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sfumato.api import Reply
from sfumato.engine import Account, Finished
from sfumato.server.schemas.body import Body
from sfumato.server.schemas.generation import StreamOptions
from sfumato.server.service import FINGERPRINT, Service
from sfumato.text.calls import ToolCall
from sfumato.text.markers import ChatMarkers


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


def head(kind: str, what: str, request_id: str, model: str) -> dict[str, Any]:
    """The first fields of each of OpenAI's objects. The id is the request's in the audit log, with
    `kind` as its prefix."""
    return {
        "id": f"{kind}-{request_id.removeprefix('req-')}",
        "object": what,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def finish_reason(reply: Reply, calls: Sequence[ToolCall] = ()) -> str:
    """OpenAI's word: "length", "tool_calls" (of a chat, with its calls) or "stop"."""
    if reply.stop_reason == "max_tokens":
        return "length"
    return "tool_calls" if calls else "stop"


def arguments(call: ToolCall) -> str:
    """The arguments of a call, as a JSON text."""
    return json.dumps(call.arguments, ensure_ascii=False)


def call_object(call: ToolCall, arguments: str) -> dict[str, Any]:
    """arguments: as a JSON text; empty where they follow."""
    function = {"name": call.name, "arguments": arguments}
    return {"id": new_id("call"), "type": "function", "function": function}


def usage(accounts: Sequence[Account]) -> dict[str, Any]:
    """The tokens of the replies to one prompt; the prompt counts once."""
    written = sum(account.output_tokens for account in accounts)
    return {
        "prompt_tokens": accounts[0].prompt_tokens,
        "completion_tokens": written,
        "total_tokens": accounts[0].prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": accounts[0].cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(a.thought_tokens for a in accounts),
            **_predicted(accounts),
        },
    }


def _predicted(accounts: Sequence[Account]) -> dict[str, int]:
    """Tokens of a prediction that stand in the replies, and that do not, where there was one."""
    if accounts[0].accepted_prediction is None:
        return {}
    return {
        "accepted_prediction_tokens": sum(a.accepted_prediction or 0 for a in accounts),
        "rejected_prediction_tokens": sum(a.rejected_prediction or 0 for a in accounts),
    }


def usage_of_prompts(accounts: Sequence[Account], each: int) -> dict[str, Any]:
    """The tokens of `each` replies to each of several prompts."""
    parts = [usage(accounts[i : i + each]) for i in range(0, len(accounts), each)]
    total = parts[0]
    for part in parts[1:]:
        total = _sum(total, part)
    return total


def _sum(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {k: _sum(v, b[k]) if isinstance(v, dict) else v + b[k] for k, v in a.items()}


def timings(account: Account) -> dict[str, Any]:
    """llama-server's figures; in `diffusion`, those of this engine alone."""
    encoded = account.prompt_tokens - account.cached_tokens
    prefill_ms = 1e3 * account.prefill_s
    generating_ms = 1e3 * (account.denoise_s + account.commit_s)
    steps, denoise = sum(account.steps), account.denoise_s
    return {
        "cache_n": account.cached_tokens,
        "prompt_n": encoded,
        "prompt_ms": prefill_ms,
        "prompt_per_token_ms": _per(prefill_ms, encoded),
        "prompt_per_second": _per(encoded, account.prefill_s),
        "predicted_n": account.output_tokens,
        "predicted_ms": generating_ms,
        "predicted_per_token_ms": _per(generating_ms, account.output_tokens),
        "predicted_per_second": _per(1e3 * account.output_tokens, generating_ms),
        "diffusion": {
            "blocks": len(account.steps),
            "steps": steps,
            "steps_per_block": list(account.steps),
            "canvas_tokens": account.canvas_tokens,
            "ms_per_step": _per(1e3 * denoise, steps),
            "steps_per_second": _per(steps, denoise),
            "canvas_tokens_per_second": account.canvas_tokens_per_second or 0.0,
            "tokens_per_forward": _per(account.output_tokens, steps),
            "convergence": list(account.convergence),
            "retries": account.retries,
            **_constraint(account),
            "seed": account.seed,
            "queue_ms": 1e3 * account.queue_s,
            "first_draft_ms": _ms(account.first_draft_s),
            "first_commit_ms": _ms(account.first_commit_s),
            "total_ms": 1e3 * account.total_s,
        },
    }


def _constraint(account: Account) -> dict[str, Any]:
    """The effort for a schema or grammar, of a reply that had one."""
    return {} if account.constraint is None else {"constraint": asdict(account.constraint)}


def _per(over: float, under: float) -> float:
    return over / under if under else 0.0


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def closing(usage: dict[str, Any], accounts: Sequence[Account]) -> dict[str, Any]:
    """Fields of the last chunk of a stream: the usage and, of a single reply, the timings, which
    clients of llama-server read there."""
    return {"usage": usage, **({"timings": timings(accounts[0])} if len(accounts) == 1 else {})}


def notes(body: Body) -> list[str]:
    """A line for `warnings` where a lenient server has ignored fields."""
    return [f"{body.ignored}: unknown, and ignored"] if body.ignored.count else []


def wants_usage(options: StreamOptions | None) -> bool:
    """Whether a stream ends in a chunk with the usage."""
    return options is not None and bool(options.include_usage)


def warned(body: Body) -> dict[str, Any]:
    """The same as a field of an answer."""
    lines = notes(body)
    return {"warnings": lines} if lines else {}


def figures(ends: Sequence[Finished], warnings: list[str]) -> dict[str, Any]:
    """Fields of an answer beside its choices: the timings of a single reply, and warnings."""
    fields: dict[str, Any] = {}
    if len(ends) == 1:
        fields["timings"] = timings(ends[0].account)
    if warnings:
        fields["warnings"] = warnings
    return fields


def written_at(service: Service) -> datetime:
    """When the model's weights were written; where that is not known, when this server started."""
    written = service.model.written
    return datetime.fromtimestamp(service.started if written is None else written, UTC)


def thinks(markers: ChatMarkers) -> bool:
    """Whether a chat format has thoughts."""
    return bool(markers.thought_open)
