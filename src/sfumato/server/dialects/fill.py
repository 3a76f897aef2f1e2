"""A text with holes: POST /v1/fill. The given texts come back unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from sfumato.diffusion.constraints.filling import FilledHole
from sfumato.diffusion.constraints.hole import Hole, check_parts
from sfumato.engine import Finished, Request
from sfumato.options import exclusions
from sfumato.refused import Refused
from sfumato.server.chat import objects
from sfumato.server.chat.call import ChatCall, requests_of
from sfumato.server.chat.sampling import given_in, grammar_of
from sfumato.server.dialects.openai_chat import conversation
from sfumato.server.http.inflight import CollectedReply
from sfumato.server.http.route import SSE, Dialect, Frame, Renderer
from sfumato.server.schemas import (
    MESSAGES,
    NULL,
    PARTS,
    PROMPT_IDS,
    TEXT,
    First,
    Ids,
    ModelName,
    Objects,
    Sampling,
    either,
)
from sfumato.server.service import Service

_Parts = Annotated[list[str | dict[str, Any]], First]


class FillBody(Sampling):
    """A text with holes, which are filled."""

    parts: Annotated[_Parts, WithJsonSchema(PARTS)] = Field(
        description='Texts and holes: {"tokens": 6}, {"at_most": 8} or {"choices": ["a", "b"]}.'
    )
    messages: Annotated[Objects | None, WithJsonSchema(either(MESSAGES, NULL))] = Field(
        None, min_length=1, description="A conversation that the text is the complete reply to."
    )
    prompt: Annotated[
        str | Annotated[Ids, Field(min_length=1)] | None,
        WithJsonSchema(either(TEXT, PROMPT_IDS, NULL)),
    ] = Field(None, description="What comes before the text, as it is; not with messages.")
    model: ModelName = None
    user: str | None = Field(None, max_length=512, description="Written to the audit log.")


PATH = "/v1/fill"
_HOLE = ("tokens", "at_most", "choices")


def parse(service: Service, body: FillBody) -> list[Request]:
    """Raises Refused."""
    if (refused := exclusions.refusal(exclusions.FILL, given_in(body))) is not None:
        grammar = grammar_of(body)
        raise refused if grammar is None else refused.renamed({"grammar": grammar.field})
    parts = check_parts(
        [
            part if isinstance(part, str) else _hole(part, f"parts[{place}]")
            for place, part in enumerate(body.parts)
        ]
    )
    messages, prompts = None, None
    if body.messages is not None:
        messages = conversation(body.messages, service.settings, body.envelope.unknown)
    else:
        # Without a token to begin with, the text that is filled begins by itself.
        is_bare = not body.prompt and service.model.tokenizer.bos_id is None
        prompts = [[] if is_bare else service.raw_prompt(body.prompt or "", PATH, body.user)]
    holes = {"parts": parts}
    call = ChatCall(PATH, body, messages, continues=False, holes=holes, user=body.user)
    return requests_of(service, call, prompts)


def _hole(given: Mapping[str, Any], where: str) -> Hole:
    fields = {name: value for name, value in given.items() if value is not None}
    unknown = [name for name in fields if name not in _HOLE]
    if unknown:
        name = f"{where}.{unknown[0][:100]}"
        raise Refused(name, "unknown", "a hole has tokens, at_most or choices")
    if len(fields) != 1:
        text = (
            f'a hole has exactly one of {", ".join(_HOLE)}, as {{"tokens": 6}}; got {len(fields)}'
        )
        raise Refused(where, text)
    for name, value in fields.items():
        if isinstance(value, float) and value.is_integer():
            text = f"whole numbers are written without a decimal point, and not as {value!r}"
            raise Refused(f"{where}.{name}", text)
    try:
        return Hole(**fields)
    except ValueError as error:
        raise Refused(where, str(error)) from None


class FillRenderer(Renderer):
    """The text, its holes and their figures."""

    def __init__(self, service: Service, body: FillBody, requests: Sequence[Request]) -> None:
        self._service, self._id = service, requests[0].id
        self._notes = objects.notes(body)

    def body(self, replies: Sequence[CollectedReply]) -> Mapping[str, Any]:
        (collected,) = replies
        return self._body(collected.finished)

    def extra(self, fields: Frame) -> Frame:
        return self._head() | fields

    def finished(self, number: int, end: Finished) -> Iterable[Frame]:
        yield self._body(end)

    def _head(self) -> Frame:
        return objects.head("fill", "fill", self._id, self._service.name)

    def _body(self, end: Finished) -> Frame:
        filled = end.reply.filled
        assert filled is not None
        return {
            **self._head(),
            "text": filled.text,
            "holes": [_filled_hole(hole) for hole in filled.holes],
            "usage": objects.usage([end.account]),
            **objects.figures([end], [*self._notes, *end.reply.warnings]),
        }


def _filled_hole(hole: FilledHole) -> dict[str, Any]:
    alternatives = [asdict(each) for each in hole.alternatives]
    return {
        "text": hole.text,
        "tokens": len(hole.token_ids),
        "token_ids": hole.token_ids,
        "probability": hole.probability,
        "probabilities": hole.probabilities,
        **({"alternatives": alternatives} if alternatives else {}),
    }


FILL = Dialect(
    name="fill",
    path=PATH,
    tag="Sfumato",
    help="A text with holes, filled; the given texts come back unchanged.",
    body_type=FillBody,
    parse=parse,
    renderer=FillRenderer,
    streams=lambda body: bool(body.stream),
    wire=replace(SSE, end="data: [DONE]\n\n"),
)
