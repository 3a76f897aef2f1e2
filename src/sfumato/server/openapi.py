"""The API description: what FastAPI cannot see of routes that read their bodies themselves.

GET /docs shows it as a plain page, without scripts and outside requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from sfumato.server.http import errors

RULES = (
    "Prompt and reply fit the context.",
    "Whole numbers have no decimal point: 8, and not 8.0.",
    "Token ids are of the model's vocabulary.",
    "logit_bias names tokens by id or text, and leaves one.",
    "Where ids and texts are mixed, each part of a prompt is one of them, and no list.",
    "An empty prompt needs a model that has a token to begin with.",
    "The arguments of all calls together hold at most 131,072 JSON values.",
    "n times the prompts are at most 128 (`max_choices` in /props).",
    "n times the prompts times max_tokens times (1 + top_logprobs) is at most 1,048,576; "
    "tokens of prompts that are scored count as those of replies.",
    "A seed canvas has a token of the vocabulary for each position of the canvas; "
    "diffusion_pinned needs one, and names its positions; lengths and steps agree.",
    "logprob_token_ids needs logprobs, and goes neither with top_k, top_p nor logit_bias.",
    "A read (diffusion_read_only) is at temperature 1.",
    "The parts of a fill have 1 to 256 holes, at most 16 of them with an open length or with "
    "choices, which the vocabulary writes, and fit one canvas with the text between them; "
    "messages and prompt do not go together; what says where a reply ends is left out.",
    "With a suffix, the canvas has 3 positions or more, and is not given; what says where a "
    "reply ends is left out.",
    "A prediction goes with no thinking and with no canvas that the client gives.",
    "A body has one schema or grammar at most; it is one that can be compiled, in 262,144 "
    "characters, of keywords that are supported, and with texts that the vocabulary writes.",
    "stop, ignore_eos, the mode causal, a prediction, echo, a suffix, holes, a given canvas, "
    "named tokens and a message to be continued do not go together with a schema or grammar.",
    "An item_reference names an item of a response that is kept, and previous_response_id "
    "such a response; a function_call_output answers a function_call right before it; an "
    "input is not of thoughts alone.",
    "An input, with the items of the responses before and with what it refers to, has at "
    "most 1,024 items and as many characters as a body.",
    "dimensions is at most the network's hidden size, and one answer has at most 4,194,304 "
    "numbers.",
    "llama-server's embeddings have input or content.",
    "stream_options belongs to stream.",
    "top_logprobs belongs to logprobs.",
    "max_tokens agrees with max_completion_tokens and n_predict.",
    "content and prompt of /tokenize agree; one is there.",
    "count, threshold, margin and entropy_bound belong to their samplers.",
    "low-confidence, sequential and pace belong to models with a mask token.",
    "soft_skip and soft_top_k do not go together.",
    "t_min is at most t_max; of the two, what a body leaves out is the checkpoint's.",
    "The mode causal, which echo asks for, goes with no field of canvases and denoising steps.",
    "A max_tokens of 0 goes with echo or prompt_logprobs, which goes without stream.",
    "canvas_length is at most the checkpoint's.",
    "max_steps is at most the server's setting.",
    "tool_choice names one of the tools, and required has some; the vocabulary has tool calls.",
    "A tool's message answers a call of the assistant's message before it, by its id or name.",
    "Only an assistant's message is continued, one without calls, after another message, "
    "without thinking; add_generation_prompt is not true together with "
    "continue_final_message, and not false where nothing is continued.",
    "A result in Anthropic's messages answers a call of the assistant's turn before it.",
    "thinking.budget_tokens is less than max_tokens, and there where thinking is enabled.",
    "tool_choice of the type tool has a name.",
    "In Ollama's API, system goes neither with raw nor with suffix; format and logprobs go "
    "not with suffix; raw and suffix go without thinking; a model that is shown has a name.",
    "The chat template can render messages and tools.",
    "Arguments of calls and tools are nested at most 64 levels deep, and the body 100.",
    "Texts are valid Unicode.",
    "A body of /v1/decisions has state or input, and not both; Gemini's has x-goog-api-key.",
    "/v1/systemone has models of the names that it says.",
    "Pictures need a model that reads them (modalities in /props), of a known kind, within "
    "limits.images, whole, and no raw prompt beside them; a decision has each in its state.",
    "Questions times samples times orders are at most 4,096.",
    "Numbers in a state or a description are finite.",
    "State and question fit the context, and so do all of them.",
    "A question's options differ in what tells them apart.",
    "A yes/no question has instructions or a description.",
)
"""The rules for a body that a JSON schema cannot state. A body that the description allows is
refused with a 400 for one of these and for nothing else; the checks stand where fields are read."""

_BROKEN = "A field is wrong, unknown or not supported, or one of these rules is broken:\n"

_FAILS = {
    400: _BROKEN + "\n".join(f"- {rule}" for rule in RULES),
    401: "The API key is missing or wrong.",
    403: "A page of another origin, or another host name.",
    404: "There is no such model.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body has a Content-Encoding other than zstd.",
    422: "A field is wrong, unknown or not supported, or a rule is broken that 400 lists.",
    500: "A fault of the server.",
    503: "The queue is full, or the engine is shutting down, or has no memory.",
    504: "The deadline has passed.",
    529: "The server is overloaded.",
}


def fails(
    *statuses: int, forms: Iterable[errors.ErrorForm] = (errors.OPENAI_ERRORS,)
) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of the answers other than 200: these, and those of any route."""
    content = {"application/json": {"schema": _any_of(form.name for form in forms)}}
    return {
        status: {"description": _FAILS[status], "content": content}
        for status in sorted({401, 403, 413, 500, *statuses})
    }


def _any_of(names: Iterable[str]) -> dict[str, Any]:
    schemas = [{"$ref": f"#/components/schemas/{name}"} for name in names]
    return {"anyOf": schemas} if len(schemas) > 1 else schemas[0]


def takes(
    *models: type[BaseModel],
    stream: str | None = None,
    statuses: Sequence[int] = (),
    forms: Sequence[errors.ErrorForm] = (errors.OPENAI_ERRORS,),
) -> dict[str, Any]:
    """The OpenAPI description of a POST route that reads its body itself: one of the models.
    stream: the media type of the stream that it may answer with; statuses, forms: of its errors."""
    schema = _any_of(model.__name__ for model in models)
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    others = {status for form in forms for status in form.statuses}
    answers = fails(400, 408, 415, 503, 504, *others, *statuses, forms=forms)
    if stream:
        answers[200] = {
            "description": "The reply, as one body or as a stream.",
            "content": {stream: {"schema": {}}},  # of events, whose data are objects
        }
    return {"openapi_extra": {"requestBody": body}, "responses": answers}


def add_reference(
    app: FastAPI, described: Iterable[tuple[type[BaseModel], errors.ErrorForm]]
) -> None:
    """/openapi.json with the schemas of the bodies, each with the form of its errors, and /docs."""
    without_bodies = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = without_bodies()
            parts = description.setdefault("components", {}).setdefault("schemas", {})
            for model, form in described:
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                parts |= schema.pop("$defs", {})
                parts[model.__name__] = schema
                parts[form.name] = dict(form.schema)
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's own manual has it

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """The API description as a page."""
        return HTMLResponse(_page(app.openapi()))


def _page(description: Mapping[str, Any]) -> str:
    """HTML of an OpenAPI description: every route, and the fields of its body."""
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    schemas = description.get("components", {}).get("schemas", {})
    routes = "".join(
        part
        for path, methods in description["paths"].items()
        for method, route in methods.items()
        for part in _route(path, method, route, schemas)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<h1>{title}</h1><p>{escape(description['info'].get('description', ''))}</p>"
        f'<p><a href="openapi.json">openapi.json</a> is this for programs.</p>{routes}</html>'
    )


def _route(
    path: str, method: str, route: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(route.get('description') or route.get('summary', ''))}</p>"
    content = route.get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    schema = schemas.get(reference.rpartition("/")[2])
    if schema:
        required = set(schema.get("required", ()))
        rows = "".join(
            f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}</td>"
            f"<td>{escape(_kind(field))}</td><td>{escape(field.get('description', ''))}</td></tr>"
            for name, field in schema["properties"].items()
        )
        yield f"<table><tr><th>Field<th>Type<th>Meaning</tr>{rows}</table>"


def _kind(field: Mapping[str, Any]) -> str:
    kinds = [field, *field.get("anyOf", ())]
    names = [kind["type"] for kind in kinds if kind.get("type") not in (None, "null")]
    return " or ".join(dict.fromkeys(names)) or "any"
