"""Routes around adapters: vLLM's, by which clients load and unload them while the server runs, and
llama-server's list. What a client may load lies in one folder, which the operator names."""

from __future__ import annotations

from typing import Any

from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from sfumato.options.limits import name_fault
from sfumato.refused import Refused
from sfumato.server.http.errors import RETRY_LATER, ApiError
from sfumato.server.http.route import Get, Post
from sfumato.server.schemas import Body, without_effect
from sfumato.server.service import Service

_OFF = "clients may load no adapters here; start the server with --allow-adapters FOLDER"


@without_effect("load_inplace")
class LoadAdapterBody(Body):
    """vLLM's."""

    lora_name: str | None = Field(None, description="What clients call it from now on.")
    lora_path: str | None = Field(
        None, description="A folder of PEFT or a GGUF file, in the folder of --allow-adapters."
    )


@without_effect("lora_int_id")
class UnloadAdapterBody(Body):
    """vLLM's."""

    lora_name: str | None = None


def _load(service: Service, body: LoadAdapterBody) -> Response:
    """Raises ApiError and Refused."""
    name, path = body.lora_name, body.lora_path
    folder = _allowed(service).resolve()
    if not (name and path):
        raise Refused(("lora_name", "lora_path"), "both must be given", code="missing")
    if why := name_fault(name):
        raise Refused("lora_name", f"{name[:99]!r} {why}")
    if name in service.names:
        raise Refused("lora_name", f"{name!r} is the name of a model or adapter already")
    try:
        target = (folder / path).resolve()
        is_there = target.is_relative_to(folder) and target.exists()
    except (OSError, ValueError):  # too long, or with a zero byte
        is_there = False
    if not is_there:
        message = f"lora_path: no adapter {path[:200]!r} is in the folder of --allow-adapters"
        raise ApiError(404, message, "lora_path", "not_found")
    try:
        service.models.load_adapter(name, str(target))
    except TimeoutError:
        why = f"the adapter {name!r} is not loaded yet; /v1/models lists it when it is"
        raise ApiError(503, why, code="adapter_loading", headers=dict(RETRY_LATER)) from None
    except Refused as error:
        raise error.renamed({"name": "lora_name"}) from None
    except (ValueError, OSError) as error:
        raise Refused("lora_path", str(error)) from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


def _unload(service: Service, body: UnloadAdapterBody) -> Response:
    """Raises ApiError and Refused."""
    _allowed(service)
    if not (name := body.lora_name):
        raise Refused("lora_name", "is missing", code="missing")
    if name not in service.models.adapters:
        message = f"the lora adapter {name[:200]!r} cannot be found"
        raise ApiError(404, message, "lora_name", "not_found")
    service.models.unload_adapter(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _allowed(service: Service) -> Any:
    """The folder of adapters. Raises ApiError where there is none."""
    if (folder := service.settings.adapter_folder) is None:
        raise ApiError(404, _OFF, code="not_found")
    return folder


def _listed(service: Service) -> list[dict[str, Any]]:
    """By the numbers that the field `lora` of a body has. No adapter changes a request that names
    none: its scale is 0."""
    named = service.engine.adapters.values()
    return [{"id": each.number, "path": each.name, "scale": 0.0} for each in named]


POSTS: tuple[Post[Any], ...] = (
    Post(
        path="/v1/load_lora_adapter",
        name="load_lora_adapter",
        tag="vLLM",
        help="Loads an adapter into the model that is loaded; off without --allow-adapters.",
        body_type=LoadAdapterBody,
        at_once=_load,
        statuses=(404,),
        may_load=False,
    ),
    Post(
        path="/v1/unload_lora_adapter",
        name="unload_lora_adapter",
        tag="vLLM",
        help="Unloads an adapter. Requests that named it before are served to their ends.",
        body_type=UnloadAdapterBody,
        at_once=_unload,
        statuses=(404,),
        may_load=False,
    ),
)
GETS = (
    Get(
        path="/lora-adapters",
        name="lora_adapters",
        tag="llama-server",
        help="The adapters of the model that is loaded, by their numbers.",
        answer=_listed,
        shape=list[dict[str, Any]],
        statuses=(503,),
    ),
)
