"""Routes about the server itself: health, model, settings, slots, memory; also in llama-server's
words."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, is_dataclass, replace
from typing import Any

from fastapi.responses import JSONResponse, Response

from sfumato import __version__
from sfumato.diffusion.sampler import EntropyBound, LinearTemperature, StableAndConfident
from sfumato.engine import EngineDead
from sfumato.engine.stats import EngineState, RowState, SlotState
from sfumato.options import MOST_STEPS
from sfumato.server.chat.objects import written_at
from sfumato.server.dialects.anthropic.messages import anthropic_card
from sfumato.server.dialects.llama_cpp import default_settings
from sfumato.server.examples import decisions, demonstration, examples, modes
from sfumato.server.http.errors import ApiError, dead, openai_error, without_paths
from sfumato.server.plain_routes import Get
from sfumato.server.schemas.json_schemas import greatest
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


def _llama_props(service: Service) -> dict[str, Any]:
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


_BOUNDED = ("stability", "top_k", "soft_top_k", "top_logprobs")


def health(service: Service) -> Response:
    """200, or 503 with the reason where the engine takes no requests."""
    state = service.engine.health()
    body = {"status": "ok" if state.ok else "error", **asdict(state)}
    if not state.ok:
        body["error"] = openai_error(ApiError(503, without_paths(state.reason or "not ready")))[
            "error"
        ]
        body["reason"] = body["error"]["message"]
    return JSONResponse(body, 200 if state.ok else 503)


def alive(service: Service) -> Response:
    """200, or 503 with the reason where the engine has stopped for good."""
    death = service.engine.death
    if death is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "error", "reason": without_paths(death)}, 503)


def model_card(service: Service) -> dict[str, Any]:
    """The model as each API has it, in one object: OpenAI's fields, Anthropic's, and our own."""
    config, decides = service.model.config, service.model.undecided is None
    return {
        "id": service.name,
        **anthropic_card(service),
        "object": "model",
        "aliases": list(service.settings.aliases),
        "created": service.started,
        "owned_by": "sfumato",
        "meta": {
            "vocab_size": config.vocab_size,
            "context_length": config.context_length,
            "canvas_length": config.canvas_length,
        },
        # As llama-server marks a model that decides; others get no decisions.
        "architecture": {
            "input_modalities": ["text"],
            "output_modalities": ["text", *(["decisions"] if decides else [])],
        },
    }


def models(service: Service) -> dict[str, Any]:
    """One body for the clients of all APIs: OpenAI's and Anthropic's list, and System One's beside
    it. No checkpoint says when it was released, so the date is the day on which its weights were
    written; where that is not known, on which this server started, as `created` is."""
    model, released = service.model, written_at(service).date().isoformat()
    card = {
        "description": f"{model.family}, {model.config.context_length:,} tokens of context.",
        "release_date": released,
    }
    names = (service.name, *service.settings.aliases)
    return {
        "object": "list",
        "data": [model_card(service)],
        # Anthropic's pages: this is the only one.
        "has_more": False,
        "first_id": service.name,
        "last_id": service.name,
        "models": [{"name": name, **card} for name in names],
    }


def model_named(service: Service, name: str) -> dict[str, Any]:
    """Raises ApiError."""
    if name not in (service.name, *service.settings.aliases):
        raise ApiError(404, f"there is no model {name[:200]!r}; this is {service.name!r}", "model")
    return model_card(service)


def tokenizer_info(service: Service) -> dict[str, Any]:
    """vLLM's form of what a client needs to render and count prompts itself."""
    tokenizer, template = service.model.tokenizer, service.model.template
    special = sorted(tokenizer.special_ids)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": service.context,
        "bos_token": template.bos,
        "eos_token": template.eos,
        "pad_token": next((t for t in ("<pad>",) if tokenizer.token_id(t) is not None), None),
        "additional_special_tokens": [tokenizer.token_text(token) for token in special],
        "chat_template": template.source,
    }


async def reset_prefix_cache(service: Service) -> dict[str, Any]:
    """Raises ApiError."""
    try:
        return {"emptied_slots": await asyncio.wrap_future(service.engine.reset_prefix_cache())}
    except EngineDead as error:
        raise dead(error) from None


def props(service: Service) -> dict[str, Any]:
    """What a page or client needs before its first request; nothing of the machine's files."""
    model, settings, engine = service.model, service.settings, service.engine.config
    own = _llama_props(service)
    return {
        "model": service.name,
        "version": __version__,
        "architecture": model.family,
        "canvas_length": model.config.canvas_length,
        "vocab_size": model.config.vocab_size,
        "context_length": model.config.context_length,
        "total_slots": engine.slots,
        "chat_template": model.template.source,
        "bos_token": model.template.bos,
        "eos_token": model.template.eos,
        **own,
        "default_generation_settings": {
            "n_ctx": service.context,
            "params": own.pop("generation_settings") | defaults(service),
        },
        "sampler": defaults(service),
        "limits": {
            "context": service.context,
            "slots": engine.slots,
            "queue": engine.queue,
            "max_body": settings.max_body,
            "max_messages": settings.max_messages,
            "max_choices": settings.max_choices,
            "max_tokens": settings.max_tokens,
            "max_steps": engine.max_steps,
            **{name: greatest(name) for name in _BOUNDED},
            "request_timeout": engine.request_timeout_s,
        },
        "demonstration": demonstration(model.embedded),
        "examples": examples(model.embedded),
        "decisions": decisions(model.embedded) if model.undecided is None else None,
        "modes": modes(model.embedded),
        "markers": asdict(model.template.markers),
    }


def defaults(service: Service) -> dict[str, Any]:
    """The checkpoint's sampling defaults by the names of request fields; null where the
    checkpoint's schedule or stopping rule has no such field."""
    config = service.model.sampler_defaults
    sampler, schedule, stopping = config.sampler, config.schedule, config.stopping
    linear = schedule if isinstance(schedule, LinearTemperature) else None
    stable = stopping if isinstance(stopping, StableAndConfident) else None
    bound = sampler.bound if isinstance(sampler, EntropyBound) else None
    return {
        "max_steps": min(config.max_steps or MOST_STEPS, service.engine.config.max_steps),
        "sampler": "entropy-bound" if bound is not None else type(sampler).__name__,
        "entropy_bound": bound,
        "temperature": config.temperature,
        "t_min": linear and linear.t_min,
        "t_max": linear and linear.t_max,
        "stability": stable and stable.stability,
        "confidence": stable and stable.confidence,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "max_tokens": service.settings.max_tokens,
    }


def state(service: Service) -> dict[str, Any]:
    """The engine's state, by the names of its fields."""
    fields: dict[str, Any] = plain(service.engine.state())
    fields.pop("memory", None)
    return fields


def memory(service: Service) -> dict[str, Any]:
    """The engine's predicted memory, the memory that was free at its start, and the use now."""
    state = service.engine.state()
    view = state.memory
    fields: dict[str, Any] = plain(view)
    fields["prediction"]["total"] = view.prediction.total
    return fields | {
        "used": service.engine.used_memory(),
        "snapshot_bytes": state.snapshot_bytes,
        "larger_bytes": state.larger_bytes,
    }


def plain(value: Any) -> Any:
    """The value with dataclasses, tuples and mappings as JSON objects and lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(item) for name, item in vars(value).items()}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


MODELS = Get("/v1/models", "model_list", "OpenAI", "The model that is loaded.", models)
_HEALTH = Get(
    "/health",
    "health",
    "server",
    "200 while requests are taken, else 503 with the reason.",
    health,
    None,
    (503,),
    has_head=True,
)
GETS = (
    Get(
        "/livez",
        "live",
        "server",
        "200 while the engine lives, ready or not; 503: start the server again.",
        alive,
        None,
        (503,),
        has_head=True,
    ),
    replace(_HEALTH, path="/v1/health", hidden=True),
    _HEALTH,
    replace(_HEALTH, path="/readyz"),
    Get(
        "/props",
        "props",
        "server",
        "The model's properties, defaults and the server's limits.",
        props,
    ),
)
FURTHER_GETS = (
    Get(
        "/state",
        "state",
        "server",
        "Slots, the requests that run, the queue, totals and speeds.",
        state,
    ),
    Get("/memory", "memory", "server", "Memory as predicted, and as there is.", memory),
    Get(
        "/tokenizer_info",
        "tokenizer_info",
        "vLLM",
        "The tokenizer's special tokens and the chat template.",
        tokenizer_info,
    ),
)
