"""Typed decisions in any form: `DecisionDialect`, and what bodies, questions and answers share.

A form turns a body into the engine's request, and the answers into a body. Questions are read one
by one (`Part`), so that the first wrong one ends it; the bodies hold them as they came. Unknown
fields of a body are ignored, as System One has it, and those of a question are refused: a condition
that is not read must not look as if it were. Bodies that the JSON schemas allow are accepted, but
for the rules in openapi.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from sfumato.diffusion.constraints import questions as ask
from sfumato.diffusion.constraints.questions import MOST_QUESTIONS, Answer
from sfumato.engine import Decided, DecisionRequest
from sfumato.options.limits import FIRST_SEED, LAST_SEED, MOST_READ_STEPS, MOST_READS, MOST_SECONDS
from sfumato.refused import Refused
from sfumato.server.http.errors import OPENAI_ERRORS, ErrorForm, refusal
from sfumato.server.schemas import UNKNOWN_FIELD, Body, Schema, closed, either
from sfumato.server.service import Service

B = TypeVar("B", bound="DecisionBody")


@dataclass(frozen=True)
class DecisionCall:
    """A request, and how its answers are rendered."""

    request: DecisionRequest
    answer: Callable[[Decided], Mapping[str, Any]]  # in a thread


@dataclass(frozen=True)
class DecisionDialect(Generic[B]):
    """One form of a request for decisions, and of its answers and errors."""

    body_type: type[B]
    parse: Callable[[Service, str, B], DecisionCall]  # endpoint; in a thread; raises Refused
    errors: ErrorForm = OPENAI_ERRORS
    state: str = "state"  # the field that holds what the engine calls the state
    listed: bool = False  # questions are a list, and their ids are their numbers


LONGEST_NAME = 1024  # characters of a question's id or name

STRING: Schema = {"type": "string"}

TEXT = either(STRING, {"type": "object"}, {"type": "array"})

SAMPLES = either({"type": "integer", "minimum": 1, "maximum": MOST_READS}, {"enum": ["auto", None]})


def check_samples(value: Any) -> int | str | None:
    """Raises PydanticCustomError, with no path of a union's branches."""
    if value is None or value == "auto":
        return value
    if isinstance(value, float) and value.is_integer():
        text = f"whole numbers are written without a decimal point, and not as {value!r}"
        raise PydanticCustomError("int_type", text)
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if not (is_count and 1 <= value <= MOST_READS):
        raise PydanticCustomError(
            "samples", f"must be a whole number from 1 to {MOST_READS}, or auto"
        )
    return value


def sized(schema: Schema, most: int) -> Schema:
    """An object or a list of 1 to `most` entries."""
    what = "Items" if schema["type"] == "array" else "Properties"
    return schema | {f"min{what}": 1, f"max{what}": most}


def typed_schema(name: str, required: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    return closed({"type": {"const": name}, **required}, optional)


WORDS: Schema = STRING | {"minLength": 1}


def describe(value: Any) -> str:
    """A value's JSON type, for a message."""
    names: dict[type, str] = {str: "text", bool: "true or false", dict: "an object", list: "a list"}
    return "null" if value is None else names.get(type(value), "a number")


LENIENT = "lenient"  # key of the context of a validation: unknown fields of questions pass


def of_kind(*kinds: type, name: str) -> AfterValidator:
    """Refuses values of other types in one sentence, without pydantic's branches of a union."""

    def check(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise PydanticCustomError("text_type", f"must be {name}")
        return value

    return AfterValidator(check)


Text = Annotated[
    Any,
    of_kind(str, dict, list, name="text, an object or a list"),
    WithJsonSchema(TEXT),
]
"""What a model reads: a string as it is, and anything else as its JSON text."""
Described = Annotated[Any, of_kind(str, dict, list, type(None), name="text, an object or a list")]


class DecisionBody(Body):
    """What every form of a request for decisions has, and the fields of our own."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    model: str | None = Field(None, description="Ignored: one model is loaded.")
    x_joint: bool | None = Field(None, description="Read all questions on one canvas (false).")
    x_samples: Annotated[
        Any,
        AfterValidator(check_samples),
        WithJsonSchema(SAMPLES),
    ] = Field(None, description="Reads of a question, each with noise of its own; or auto (1).")
    x_orders: int | None = Field(
        None, ge=1, le=MOST_READS, description="Orders of the options to average over (1)."
    )
    x_order: Literal["state", "schema"] | None = Field(
        None, description="What comes first in the prompt: the state, or the question (state)."
    )
    x_steps: int | None = Field(
        None, ge=1, le=MOST_READ_STEPS, description="Denoising steps of a read (1)."
    )
    x_seed: int | None = Field(
        None, ge=FIRST_SEED, le=LAST_SEED, description="Of the noise; same seed, same answer (0)."
    )
    x_label_mass: bool | None = Field(
        None, description="False: do not compute it, which saves most of the output head (true)."
    )
    x_timeout: float | None = Field(
        None, gt=0, le=MOST_SECONDS, description="Seconds until the request fails."
    )


class Part(BaseModel):
    """A question, or a part of it. Unknown fields are refused unless null or by leave."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        lenient = bool(info.context and info.context.get(LENIENT))
        names = cls.model_fields
        return {
            name: item
            for name, item in value.items()
            if name in names or not (lenient or item is None)
        }


def reader(kinds: Any) -> Callable[..., Any]:
    return TypeAdapter(Annotated[kinds, Field(discriminator="type")]).validate_python


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


def text_of(value: Any, loc: Loc) -> str:
    """Text as it is, null as nothing, anything else as its JSON text. Raises Refused."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise refusal(loc, "holds a number that is too large", "finite_number") from None


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


def checked(question: ask.Question, loc: Loc) -> ask.Question:
    """The question. Raises Refused where it cannot be asked."""
    try:
        ask.check_question(question, named(loc))
    except Refused as error:
        raise refusal(loc, error.reason, "value_error", named(loc)) from None
    return question


def request_of(
    body: DecisionBody, endpoint: str, state: str, questions: Mapping[str, ask.Question]
) -> DecisionRequest:
    """The engine's request for a body. Raises Refused."""
    samples: int | Literal["auto"] = 1
    if isinstance(body.x_samples, int):
        samples = body.x_samples
    elif body.x_samples:
        samples = "auto"
    orders = body.x_orders or 1
    try:
        ask.check_reads(len(questions), samples, orders)
    except Refused as error:
        where = "questions, x_samples, x_orders"
        raise refusal(("x_samples",), error.reason, "too_many", where) from None
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
        since=body.envelope.since,
        endpoint=endpoint,
    )


def figures(answer: Answer) -> dict[str, Any]:
    """What the forms do not have: all names begin with x_, as System One asks."""
    mass = {"x_label_mass": answer.label_mass, "x_is_label": answer.is_label}
    return {
        **{name: value for name, value in mass.items() if value is not None},
        "x_samples": answer.samples,
        "x_spread": answer.spread,
        "x_orders": answer.orders,
        "x_order_spread": answer.order_spread,
    }
