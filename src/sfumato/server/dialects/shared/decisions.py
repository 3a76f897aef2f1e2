"""Typed decisions in any form: a body's questions and settings as a request to the engine.

Knows no form: what questions look like and how answers are rendered is the dialects'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from sfumato.diffusion.constraints.questions import (
    MOST_QUESTIONS,
    Question,
    check_question,
    check_reads,
)
from sfumato.engine import DecisionRequest
from sfumato.refused import Refused
from sfumato.server.http.errors import without_paths
from sfumato.server.http.request_body import refusal
from sfumato.server.schemas.body import UNKNOWN_FIELD
from sfumato.server.schemas.decision_schemas import LONGEST_NAME
from sfumato.server.schemas.decisions import LENIENT, DecisionBody
from sfumato.server.service import Service

Loc = tuple[int | str, ...]
Read = TypeVar("Read")

_PLAIN = {
    "extra_forbidden": UNKNOWN_FIELD,
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}
"""Pydantic's messages that speak of Python, in plain words."""
_NO_IMAGES = "images are not supported yet; describe the image in words"
_BOXES = "box questions are about images, which are not supported yet"


def no_images(field: str) -> Refused:
    """The answer to what would need a network that sees."""
    return Refused(field, _NO_IMAGES, code="unsupported")


def check_decides(service: Service) -> None:
    """Raises Refused where the model that is served cannot answer questions."""
    reason = service.model.undecided
    if reason is not None:
        raise Refused(
            None, f"{service.name!r} cannot decide: {without_paths(reason)}", code="unsupported"
        )


def text_of(value: Any, loc: Loc) -> str:
    """Text as it is, null as nothing, anything else as its JSON text. Raises Refused."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise refusal(loc, "holds a number that is too large", "finite_number") from None


def checked_map(questions: Any) -> Mapping[str, Any]:
    """Id → question, with its count and ids checked. Raises Refused."""
    if not isinstance(questions, dict):
        raise refusal(("questions",), "must be an object: id → question", "dict_type")
    check_count(len(questions))
    for name in questions:
        if not 1 <= len(name) <= LONGEST_NAME:
            raise refusal(
                ("questions", name),
                f"an id has 1 to {LONGEST_NAME} characters, and not {len(name):,}",
                "string_length",
                "questions",
            )
    return questions


def check_count(count: int) -> None:
    """Raises Refused for no questions, and for too many."""
    if not 1 <= count <= MOST_QUESTIONS:
        kind = "too_long" if count else "too_short"
        text = f"must be 1 to {MOST_QUESTIONS:,}, and there are {count:,}"
        raise refusal(("questions",), text, kind)


def read_question(
    read: Callable[..., Read], value: Any, loc: Loc, types: Sequence[str], lenient: bool
) -> Read:
    """One question of a body. loc: where it stands; types: those that there are. Raises
    Refused."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "box":
        raise Refused(named(loc), _BOXES, code="unsupported")
    try:
        return read(value, context={LENIENT: lenient})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    text, at = first["msg"], (*loc, *first["loc"])
    if first["type"].startswith("union_tag"):
        text = f"must have a type, one of {', '.join(types)}"
        text += f", and not {kind[:40]!r}" if isinstance(kind, str) else ""
    text = _PLAIN.get(first["type"], text)
    tagged = first["loc"] and first["loc"][0] in types
    name = named((*loc, *first["loc"][1:])) if tagged else named(at)
    raise refusal(at, text, first["type"], name)


def named(loc: Loc) -> str:
    """("questions", "a", "criteria", 1) → "questions.a.criteria[1]"."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:100]}" for part in loc]
    return "".join(parts).removeprefix(".")


def checked(question: Question, loc: Loc) -> Question:
    """The question. Raises Refused where it cannot be asked."""
    try:
        check_question(question, named(loc))
    except Refused as error:
        raise refusal(loc, error.reason, "value_error", named(loc)) from None
    return question


def request_of(
    body: DecisionBody, endpoint: str, state: str, questions: Mapping[str, Question]
) -> DecisionRequest:
    """The engine's request for a body. Raises Refused."""
    samples: int | Literal["auto"] = 1
    if isinstance(body.x_samples, int):
        samples = body.x_samples
    elif body.x_samples:
        samples = "auto"
    orders = body.x_orders or 1
    try:
        check_reads(len(questions), samples, orders)
    except ValueError as error:
        where = "questions, x_samples, x_orders"
        raise refusal(("x_samples",), str(error), "too_many", where) from None
    return DecisionRequest(
        state=state,
        questions=questions,
        seed=(body.x_seed or 0) % 2**64,
        samples=samples,
        orders=orders,
        steps=body.x_steps or 1,
        joint=body.x_joint is True,
        order=body.x_order or "state",
        label_mass=body.x_label_mass is not False,
        timeout_s=body.x_timeout,
        since=body.since,
        endpoint=endpoint,
    )
