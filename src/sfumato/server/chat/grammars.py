"""What a body asks its reply to match, as the engine takes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sfumato.diffusion.constraints.call_grammar import CallSource, CallTool, Source
from sfumato.diffusion.constraints.grammar import (
    GrammarSource,
    Kind,
    choice_source,
    schema_source,
)
from sfumato.engine import ServedModel
from sfumato.refused import Refused
from sfumato.server.schemas.generation import ResponseFormat, Sampling

_OBJECT = {"type": "object"}


def grammar_of(
    body: Sampling, more: Callable[[], Iterator[GrammarSource]] = lambda: iter(())
) -> GrammarSource | None:
    """The one grammar that a body asks for; None where it asks for none. more: what a dialect's
    own fields ask for, which may raise ValueError. Raises Refused."""
    sources = [*more(), *_sources(body)]
    if len(sources) > 1:
        raise Refused(tuple(source.field for source in sources), "give at most one of them")
    return sources[0] if sources else None


def _sources(body: Sampling) -> Iterator[GrammarSource]:
    """Raises ValueError."""
    if body.response_format is not None:
        yield from _of_format(body.response_format)
    outputs = body.structured_outputs
    if outputs is not None:
        at = "structured_outputs."
        if outputs.json_object:
            yield schema_source(_OBJECT, f"{at}json_object")
        given = (outputs.json_, outputs.regex, outputs.choice, outputs.grammar)
        yield from _of_vllm(at, *given)
    given = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    yield from _of_vllm("guided_", *given)
    if body.json_schema is not None:
        yield schema_source(body.json_schema, "json_schema")
    if body.grammar:
        yield GrammarSource("grammar", body.grammar, "grammar")


def _of_format(given: ResponseFormat) -> Iterator[GrammarSource]:
    if given.type == "json_object":
        own = _OBJECT if given.schema_ is None else given.schema_
        yield schema_source(own, "response_format.schema")
    elif given.type == "json_schema":
        named = given.json_schema
        if named is None and given.schema_ is None:
            raise Refused("response_format.json_schema", "is missing", "put the schema there")
        schema = given.schema_ if named is None else named.schema_
        at = "response_format.json_schema.schema"
        yield schema_source(_OBJECT if schema is None else schema, at)


def _of_vllm(
    at: str, schema: Any, regex: str | None, choice: Sequence[str] | None, grammar: str | None
) -> Iterator[GrammarSource]:
    if schema is not None:
        yield schema_source(_decoded(schema, f"{at}json"), f"{at}json")
    if choice is not None:
        yield choice_source(choice, f"{at}choice")
    texts: tuple[tuple[Kind, str | None], ...] = (("regex", regex), ("grammar", grammar))
    for kind, text in texts:
        if text is not None:
            yield GrammarSource(kind, text, f"{at}{kind}")


def _decoded(schema: Any, field: str) -> Any:
    """A schema that may have come as a text."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        raise Refused(field, "is no JSON schema, nor the text of one") from None


def call_grammar(
    tools: Sequence[Mapping[str, Any]] | None,
    model: ServedModel,
    choice: str | None,
    required: bool,
    single: bool,
    answer: GrammarSource | None,
    may_hold: bool = True,
) -> Source | None:
    """The grammar of a reply that may call tools: where one of them is strict or has to be called,
    or the answer has a grammar of its own. choice: the only tool that may be called; required:
    whether one has to be; single: whether one call is the most; answer: the grammar of a reply
    without calls; may_hold: whether tools that are not strict are held where one has to be called.
    None where calls are free. Raises Refused."""
    is_strict = any(_is_strict(tool) for tool in tools or ())
    markers, token_id = model.template.markers, model.tokenizer.token_id
    names = (markers.call_open, markers.call_close, markers.quote)
    ids = [token_id(name) if name else None for name in names]
    holds_all = required and may_hold and any(map(_names_arguments, tools or ()))
    if not tools or None in ids or not (is_strict or holds_all or answer):
        return answer
    if answer is not None and answer.kind != "schema":
        raise Refused(answer.field, "goes with no tools", "leave one of them out")
    opens, closes, quote = (token for token in ids if token is not None)
    made = [_tool(tool, number, holds_all) for number, tool in enumerate(tools)]
    return CallSource(
        tuple(tool for tool in made if choice in (None, tool.name)),
        opens,
        closes,
        quote,
        required,
        single,
        None if required else answer,
    )


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _names_arguments(tool: Mapping[str, Any]) -> bool:
    """Whether the schema of a tool's parameters says which there are."""
    parameters = tool["function"].get("parameters")
    return isinstance(parameters, Mapping) and "properties" in parameters


def _tool(tool: Mapping[str, Any], number: int, is_held: bool) -> CallTool:
    """is_held: whether its arguments match its schema though it is not strict. Raises ValueError
    for a strict tool."""
    name, parameters = tool["function"]["name"], tool["function"].get("parameters")
    field = f"tools[{number}].function.parameters"
    if _is_strict(tool):
        return CallTool(name, schema_source(parameters or {}, field).text, field)
    if not is_held or not _names_arguments(tool):
        return CallTool(name, None, field)
    return CallTool(name, json.dumps(parameters, ensure_ascii=False), field, is_strict=False)
