"""Routes that generate nothing: the server's health, model, settings, slots and memory, also in
llama-server's words; and those around the tokenizer.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import Field, WithJsonSchema
from pydantic_core import to_jsonable_python

from sfumato import __version__
from sfumato.diffusion.sampler import (
    SAMPLERS,
    EntropyBound,
    LinearTemperature,
    StableAndConfident,
)
from sfumato.engine import EngineDead
from sfumato.engine.queue.slots import SlotState
from sfumato.engine.stats import EngineState, RowState
from sfumato.options import MOST_STEPS
from sfumato.refused import Refused
from sfumato.server import schemas
from sfumato.server.chat import pictures
from sfumato.server.chat.call import MARKER, continuation
from sfumato.server.chat.objects import iso, warned, written_at
from sfumato.server.dialects import openai_chat
from sfumato.server.dialects.anthropic import anthropic_card
from sfumato.server.dialects.llama_cpp import default_settings
from sfumato.server.examples import page_texts
from sfumato.server.http.errors import RETRY_LATER, ApiError, openai_error, without_paths
from sfumato.server.http.route import Get, Post
from sfumato.server.models import ServedAdapter
from sfumato.server.openapi import fails
from sfumato.server.schemas import (
    Body,
    Continue,
    Ids,
    Messages,
    ModelName,
    TemplateKwargs,
    Tools,
    greatest,
)
from sfumato.server.service import FINGERPRINT, Service
from sfumato.text.prompt import rewritten


def add_routes(app: FastAPI, service: Service) -> None:
    """The routes that take something of a path or of a query, or wait for the engine."""

    @app.get("/v1/models/{model:path}", tags=["OpenAI"], responses=fails(404))
    async def model_named(model: str) -> dict[str, Any]:
        """A model by its name."""
        if (name := service.registered(model)) is None:
            raise service.unknown(model)
        return model_card(service, name)

    @app.get("/slots", tags=["llama-server"], responses=fails(503))
    async def slots(fail_on_no_slot: str = "") -> list[dict[str, Any]]:
        """Each slot, and what it does, as llama-server has it."""
        state: EngineState = service.engine.state()
        if fail_on_no_slot and all(slot.busy for slot in state.slots):
            raise ApiError(503, "no slot is free", code="no_slot")
        rows = {row.slot: row for row in state.running}
        return [_slot(slot, rows.get(slot.index)) for slot in state.slots]

    @app.post("/reset_prefix_cache", tags=["vLLM"], responses=fails(503))
    async def reset_prefix_cache() -> dict[str, Any]:
        """Slots that are free forget what they hold."""
        try:
            return {"emptied_slots": await asyncio.wrap_future(service.engine.reset_prefix_cache())}
        except EngineDead as error:
            message, headers = without_paths(str(error)), dict(RETRY_LATER)
            raise ApiError(503, message, code="engine_unavailable", headers=headers) from None


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
        **({} if row is None else {"request": row.request_id, "phase": row.phase}),
    }


_BOUNDED = ("stability", "top_k", "soft_top_k", "top_logprobs")


def health(service: Service) -> Response:
    """200 while requests are taken, also where they wait until a model is loaded."""
    if service.models.loading is None:
        return ready(service)
    return JSONResponse({"status": "loading", **asdict(service.models.health())})


def ready(service: Service) -> Response:
    """200, or 503 with the reason where no request can be answered now."""
    state = service.models.health()
    body = {"status": "ok" if state.ok else "error", **asdict(state)}
    if not state.ok:
        body |= openai_error(ApiError(503, without_paths(state.reason or "not ready")))
        body["reason"] = body["error"]["message"]
    return JSONResponse(body, 200 if state.ok else 503)


def alive(service: Service) -> Response:
    """200, or 503 with the reason where the engine has stopped for good."""
    death = service.models.death
    if death is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "error", "reason": without_paths(death)}, 503)


def model_card(service: Service, name: str) -> dict[str, Any]:
    """A registered model as each API has it, in one object: OpenAI's fields, Anthropic's, and our
    own. Of a model that is not loaded nothing but the name is known, and its date is the server's
    start."""
    adapter = service.models.adapters.get(name)
    base = name if adapter is None else adapter.base
    is_loaded = service.models.is_loaded and base == service.models.name
    other = "loading" if name == service.models.loading else "unloaded"
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "object": "model",
        "status": {"value": "loaded" if is_loaded else other},  # as llama-server has it
        "created": service.started,
        "created_at": iso(datetime.fromtimestamp(service.started, UTC)),
        "owned_by": "sfumato",
        **(_loaded_card(service) if is_loaded else {}),
        **({} if adapter is None else _adapter_card(service, adapter)),
    }


def _adapter_card(service: Service, adapter: ServedAdapter) -> dict[str, Any]:
    """What the card of an adapter has beside that of its model, as vLLM has it."""
    path = adapter.path if service.settings.model_paths else Path(adapter.path).name
    return {"parent": adapter.base, "root": path, "aliases": []}


def _loaded_card(service: Service) -> dict[str, Any]:
    """What is known of the loaded model alone."""
    config, decides = service.model.config, service.model.undecided is None
    return {
        **anthropic_card(service),
        "aliases": list(service.aliases),
        "meta": {
            "vocab_size": config.vocab_size,
            "context_length": config.context_length,
            "canvas_length": config.canvas_length,
        },
        # As llama-server marks a model that decides; others get no decisions.
        "architecture": {
            "input_modalities": ["text", *(["image"] if service.model.cut else [])],
            "output_modalities": ["text", *(["decisions"] if decides else [])],
        },
    }


def models(service: Service) -> dict[str, Any]:
    """One body for the clients of all APIs: OpenAI's and Anthropic's list, and System One's and
    llama-server's beside it."""
    loaded = service.served_names[:1]
    others = (*service.adapters, *service.unloaded) if loaded else service.unloaded
    cards = [model_card(service, name) for name in (*loaded, *others)]
    return {
        "object": "list",
        "data": cards,
        # Anthropic's pages: this is the only one.
        "has_more": False,
        "first_id": cards[0]["id"],
        "last_id": cards[-1]["id"],
        "models": _described(service) if loaded else [],
    }


def _described(service: Service) -> list[dict[str, Any]]:
    """The loaded model under each of its names. No checkpoint says when it was released, so the
    date is the day on which its weights were written; where that is not known, on which this
    server started, as `created` is."""
    model = service.model
    card = {
        "description": f"{model.family}, {model.config.context_length:,} tokens of context.",
        "release_date": written_at(service).date().isoformat(),
        "capabilities": ["completion", *(["multimodal"] if model.cut else [])],  # llama-server's
    }
    return [{"name": name, **card} for name in service.served_names]


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


def props(service: Service) -> dict[str, Any]:
    """What a page or client needs before its first request; nothing of the machine's files."""
    model, settings, engine = service.model, service.settings, service.engine.config
    path = settings.model_paths.get(service.name)
    return {
        "model": service.name,
        "models": list(service.models.names),
        "version": __version__,
        "architecture": model.family,
        "canvas_length": model.config.canvas_length,
        "vocab_size": model.config.vocab_size,
        "context_length": model.config.context_length,
        "total_slots": engine.slots,
        "chat_template": model.template.source,
        "bos_token": model.template.bos,
        "eos_token": model.template.eos,
        # llama-server's fields, as far as ours have other names.
        "model_alias": service.name,
        "model_path": model.name if path is None else path,
        "modalities": {"vision": model.cut is not None, "audio": False},
        "media_marker": MARKER,
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "build_info": FINGERPRINT,
        "is_sleeping": False,
        "generation_settings": default_settings(service),
        "default_generation_settings": {
            "n_ctx": service.context,
            "params": default_settings(service) | defaults(service),
        },
        "sampler": defaults(service),
        "limits": {
            "context": service.context,
            "slots": engine.slots,
            "queue": engine.queue,
            "max_body": settings.max_body,
            "max_messages": settings.max_messages,
            "max_choices": settings.max_choices,
            "max_tokens": service.most_unasked,
            "max_steps": engine.max_steps,
            "images": settings.limit_images if model.cut else 0,
            **{name: greatest(name) for name in _BOUNDED},
            "request_timeout": engine.request_timeout_s,
        },
        **page_texts(model.packaged, model.config.mask_id is not None),
        **({} if model.undecided is None else {"decisions": None}),
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
    names: dict[type, str] = {kind: name for name, kind in SAMPLERS.items()}
    return {
        "max_steps": min(config.max_steps or MOST_STEPS, service.engine.config.max_steps),
        "sampler": names.get(type(sampler), type(sampler).__name__),
        "entropy_bound": bound,
        "temperature": config.temperature,
        "t_min": linear and linear.t_min,
        "t_max": linear and linear.t_max,
        "stability": stable and stable.stability,
        "confidence": stable and stable.confidence,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "max_tokens": service.most_unasked,
    }


def state(service: Service) -> dict[str, Any]:
    """The engine's state, by the names of its fields."""
    fields: dict[str, Any] = to_jsonable_python(service.engine.state())
    fields.pop("memory", None)
    return fields


def memory(service: Service) -> dict[str, Any]:
    """The engine's predicted memory, the memory that was free at its start, and the use now."""
    state = service.engine.state()
    view = state.memory
    fields: dict[str, Any] = to_jsonable_python(view)
    fields["prediction"]["total"] = view.prediction.total
    return fields | {
        "used": service.engine.used_memory(),
        "snapshot_bytes": state.snapshot_bytes,
        "larger_bytes": state.larger_bytes,
    }


class TokenizeBody(Body):
    """llama-server's, with a content, or vLLM's, with a prompt."""

    model: ModelName = None
    content: str | None = None
    prompt: str | None = Field(None, description="The same as content.")
    add_special: bool | None = Field(None, description="Put bos in front (false).")
    add_special_tokens: bool | None = Field(None, description="The same as add_special.")
    parse_special: bool | None = Field(None, description="Read markers as their tokens (true).")
    with_pieces: bool | None = Field(None, description="Answer objects with id and piece (false).")


class DetokenizeBody(Body):
    model: ModelName = None
    tokens: Annotated[Ids, WithJsonSchema(schemas.IDS)]


class TemplateBody(Body):
    model: ModelName = None
    messages: Messages = Field(min_length=1)
    tools: Tools = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = Field(None, description="Open the model's turn (true).")
    continue_final_message: Continue = None


def _tokens(service: Service, body: TokenizeBody) -> dict[str, Any]:
    """Raises Refused."""
    tokenizer = service.model.tokenizer
    text = body.prompt if body.content is None else body.content
    field = "prompt" if body.content is None else "content"
    if text is None:
        raise Refused("content", "is missing", code="missing")
    if body.prompt is not None and body.prompt != text:
        raise Refused(("content", "prompt"), "differ", "send one")
    marked = body.parse_special is not False
    ids = service.encode(text, field, marked)
    if (body.add_special or body.add_special_tokens) and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    fields: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": service.context}
    if body.with_pieces:
        pieces = zip(ids, service.token_texts(ids), strict=True)
        fields["tokens"] = [{"id": token, "piece": piece} for token, piece in pieces]
    return fields | warned(body)


def _input_tokens(service: Service, body: openai_chat.ChatBody) -> dict[str, Any]:
    """Raises Refused."""
    (request, *_) = openai_chat.parse(service, body)
    assert request.made is not None
    return {"input_tokens": len(request.made.ids)} | warned(body)


def _text(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    """Raises Refused."""
    ids = body.tokens
    most = service.model.config.context_length
    if len(ids) > most:
        raise Refused(
            "tokens",
            f"are {len(ids):,}, and this model's context has {most:,}",
            "send them in parts",
        )
    try:
        text = service.model.tokenizer.decode(ids, skip_special=False)
    except (ValueError, OverflowError) as error:
        raise Refused("tokens", str(error)) from None
    # The prompt is as vLLM has it.
    return {"content": text, "prompt": text} | warned(body)


def _prompt(service: Service, body: TemplateBody) -> dict[str, Any]:
    """Raises Refused."""
    unknown = body.envelope.unknown
    talk, continued = openai_chat.conversation(body.messages, service.settings, unknown), None
    opens_turn = body.add_generation_prompt
    if opens_turn is not False or body.continue_final_message:
        talk, continued = continuation(service, talk, body.continue_final_message, opens_turn)
    kwargs = body.chat_template_kwargs
    pictures.check(service, list(pictures.sources_in(talk)))
    template, shows_pictures = service.model.template, service.model.cut is not None
    check = partial(service.engine.check_length, field="messages")
    shown, _ = rewritten(template, talk, body.tools, check, shows_pictures)
    prompt = template.render(
        shown,
        thinking=bool(kwargs and kwargs.enable_thinking),
        tools=body.tools,
        add_generation_prompt=opens_turn is not False or continued is not None,
        pictures=[] if shows_pictures else None,
    )
    return {"prompt": prompt + (continued or "")} | warned(body)


_HEALTH = Get(
    path="/health",
    name="health",
    tag="server",
    help="200 while requests are taken, else 503 with the reason.",
    answer=health,
    shape=None,
    statuses=(503,),
    has_head=True,
)
_LIVE = "200 while the engine lives, ready or not; 503: start the server again."
_READY = "200 while a request can run now, else 503 with the reason, also while a model is loaded."
GETS = (
    Get(
        path="/v1/models",
        name="model_list",
        tag="OpenAI",
        help="The models, and which one is loaded.",
        answer=models,
    ),
    replace(_HEALTH, path="/livez", name="live", help=_LIVE, answer=alive),
    replace(_HEALTH, path="/v1/health", hidden=True),
    _HEALTH,
    replace(_HEALTH, path="/readyz", name="ready", help=_READY, answer=ready),
    Get(
        path="/props",
        name="props",
        tag="server",
        help="The model's properties, defaults and the server's limits.",
        answer=props,
    ),
    Get(
        path="/state",
        name="state",
        tag="server",
        help="Slots, the requests that run, the queue, totals and speeds.",
        answer=state,
    ),
    Get(
        path="/memory",
        name="memory",
        tag="server",
        help="Memory as predicted, and as there is.",
        answer=memory,
    ),
    Get(
        path="/tokenizer_info",
        name="tokenizer_info",
        tag="vLLM",
        help="The tokenizer's special tokens and the chat template.",
        answer=tokenizer_info,
    ),
)
POSTS: tuple[Post[Any], ...] = (
    Post(
        path="/tokenize",
        name="tokenize",
        tag="llama-server",
        help="Text to token ids.",
        body_type=TokenizeBody,
        at_once=_tokens,
    ),
    Post(
        path="/detokenize",
        name="detokenize",
        tag="llama-server",
        help="Token ids to text.",
        body_type=DetokenizeBody,
        at_once=_text,
    ),
    Post(
        path=f"{openai_chat.PATH}/input_tokens",
        name="input_tokens",
        tag="llama-server",
        help="How many tokens the prompt of a chat has.",
        body_type=openai_chat.ChatBody,
        at_once=_input_tokens,
    ),
    Post(
        path="/apply-template",
        name="apply_template",
        tag="llama-server",
        help="The prompt that messages become.",
        body_type=TemplateBody,
        at_once=_prompt,
    ),
)
