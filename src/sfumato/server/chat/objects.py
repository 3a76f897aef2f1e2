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
from sfumato.server.schemas import Body
from sfumato.server.service import FINGERPRINT, Service
from sfumato.text.calls import ToolCall
from sfumato.text_side import Verification


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


def usage(accounts: Sequence[Account], each: int | None = None) -> dict[str, Any]:
    """The tokens of so many replies to each of several prompts (None: of all replies, to one
    prompt). A prompt counts once."""
    firsts = accounts[:: each or len(accounts)]
    prompts = sum(account.prompt_tokens for account in firsts)
    written = sum(account.output_tokens for account in accounts)
    details = {"reasoning_tokens": sum(account.thought_tokens for account in accounts)}
    if accounts[0].accepted_prediction is not None:
        # Tokens of a prediction that stand in the replies, and that do not.
        details |= {
            "accepted_prediction_tokens": sum(a.accepted_prediction or 0 for a in accounts),
            "rejected_prediction_tokens": sum(a.rejected_prediction or 0 for a in accounts),
        }
    return {
        "prompt_tokens": prompts,
        "completion_tokens": written,
        "total_tokens": prompts + written,
        "prompt_tokens_details": {"cached_tokens": sum(first.cached_tokens for first in firsts)},
        "completion_tokens_details": details,
    }


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
            "canvas_tokens_per_second": _per(account.canvas_tokens, denoise),
            "tokens_per_forward": _per(account.output_tokens, steps),
            "convergence": list(account.convergence),
            "retries": account.retries,
            **({} if account.constraint is None else {"constraint": asdict(account.constraint)}),
            "seed": account.seed,
            "queue_ms": 1e3 * account.queue_s,
            "first_draft_ms": _ms(account.first_draft_s),
            "first_commit_ms": _ms(account.first_commit_s),
            "total_ms": 1e3 * account.total_s,
        },
    }


def _per(over: float, under: float) -> float:
    return over / under if under else 0.0


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def notes(body: Body) -> list[str]:
    """A line for `warnings` where a lenient server has ignored fields."""
    unknown = body.envelope.unknown
    return [f"{unknown}: unknown, and ignored"] if unknown.count else []


def warned(body: Body) -> dict[str, Any]:
    """The notes as a field of an answer."""
    lines = notes(body)
    return {"warnings": lines} if lines else {}


def verification(service: Service, verified: Verification) -> dict[str, Any]:
    """The findings of a second reader: the tokens of a reply with their log probabilities by both
    phases, those of thoughts and calls too, and the parts of the answer that it doubts."""
    tokens = []
    for each in verified.canvases:
        texts, preferred = map(service.token_texts, (each.token_ids, each.preferred))
        columns = each.log_probs, each.ranks, each.canvas_log_probs, each.canvas_entropy
        for text, other, log, rank, own, entropy in zip(texts, preferred, *columns, strict=True):
            tokens.append(
                {
                    "token": text,
                    "logprob": log,
                    "rank": rank,
                    "preferred": other,
                    "canvas_logprob": own,
                    "canvas_entropy": entropy,
                }
            )
    undecided = {"undecided": True, "other": verified.other} if verified.undecided else {}
    return {
        "agreement": verified.agreement,
        "agreement_per_canvas": [each.agreement for each in verified.canvases],
        "doubts": [asdict(doubt) for doubt in verified.doubts],
        **undecided,
        "tokens": tokens,
    }


def figures(ends: Sequence[Finished], warnings: list[str]) -> dict[str, Any]:
    """Fields of an answer beside its choices: the timings of a single reply, and warnings."""
    fields: dict[str, Any] = {}
    if len(ends) == 1:
        fields["timings"] = timings(ends[0].account)
    if warnings:
        fields["warnings"] = warnings
    return fields


def iso(moment: datetime) -> str:
    """A moment in UTC, to the second."""
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def written_at(service: Service) -> datetime:
    """When the model's weights were written; where that is not known, when this server started."""
    written = service.model.written
    return datetime.fromtimestamp(service.started if written is None else written, UTC)
