"""Typed decisions in any form: `DecisionDialect`, what bodies, questions and answers share, and
the function of their routes: body → its form → one request → answers, all at once.

A form is one value: how its state and its questions are read, and how answers are written.
Questions are read one by one (`Part`), so that the first wrong one ends it; the bodies hold them as
they came. Unknown fields of a body are ignored, as System One has it, and those of a question are
refused: a condition that is not read must not look as if it were. Bodies that the JSON schemas
allow are accepted, but for the rules in openapi.py. Knows no form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.datastructures import Headers
from fastapi.responses import Response
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from sfumato.decisions import DecisionUsage, State
from sfumato.diffusion.constraints import questions as ask
from sfumato.diffusion.constraints.questions import MOST_QUESTIONS, Answer
from sfumato.engine import Decided, DecisionRequest
from sfumato.media.part import PictureSource
from sfumato.options import exclusions
from sfumato.options.limits import FIRST_SEED, LAST_SEED, MOST_READ_STEPS, MOST_READS, MOST_SECONDS
from sfumato.refused import Refused
from sfumato.server.chat import pictures
from sfumato.server.http import inflight, multipart, request_body
from sfumato.server.http.errors import (
    ERROR_FORM,
    OPENAI_ERRORS,
    ApiError,
    ErrorForm,
    WrongField,
    refusal,
    without_paths,
)
from sfumato.server.http.route import json_response, with_pictures
from sfumato.server.schemas import UNKNOWN_FIELD, Body, ModelName, Schema, closed, either
from sfumato.server.service import Service

B = TypeVar("B", bound="DecisionBody")
Loc = tuple[int | str, ...]
Typed = TypeVar("Typed")


_MARK = re.compile("\ud800([0-9]+)\udfff")


@dataclass
class Pictures:
    """The pictures of a state. In its text a mark stands for each, which no text of a body holds,
    since none has a lone surrogate."""

    service: Service
    sources: list[PictureSource] = field(default_factory=list)

    def mark(self, source: PictureSource) -> str:
        """The mark of one more picture. Raises Refused."""
        self.sources.append(source)
        pictures.check(self.service, self.sources)
        return f"\ud800{len(self.sources) - 1}\udfff"

    def state(self, text: str, body: Body) -> State:
        """The state whose text has the marks. Raises Unread."""
        if not self.sources:
            return text
        known = pictures.read(body, list({each.field: each for each in self.sources}.values()))
        parts = []
        for number, piece in enumerate(_MARK.split(text)):
            if number % 2:
                where = self.sources[int(piece)].field
                parts.append({"type": "image", "field": where, "patches": known[where]})
            elif piece:
                parts.append({"type": "text", "text": piece})
        return parts


@dataclass(frozen=True, kw_only=True)
class DecisionDialect(Generic[B, Typed]):
    """One form of a request for decisions, and of its answers and errors."""

    body_type: type[B]
    # The state as the model reads it, with marks where its pictures are; raises Refused.
    state_of: Callable[[B, Pictures], str]
    read: Callable[..., Typed]  # a question of a body; raises pydantic's ValidationError
    types: tuple[str, ...]  # of questions
    question_of: Callable[
        [Typed, Loc], ask.Question
    ]  # the question that stands there; raises Refused
    answered: Callable[[Typed, Answer], dict[str, Any]]
    usage: Callable[[DecisionUsage, int], dict[str, Any]]  # and how many questions there were
    check: Callable[[Service, str, B], None] = lambda service, endpoint, body: None
    errors: ErrorForm = OPENAI_ERRORS
    state: str = "state"  # the field that holds what the engine calls the state
    listed: bool = False  # questions are a list, and their ids are their numbers
    tagged: bool = False  # whether the place of what is wrong has the question's type
    names_model: bool = True  # whether answers do


@dataclass(frozen=True)
class DecisionRoute:
    """One POST route for decisions in one form or several."""

    name: str  # in the API description
    path: str
    help: str
    dialects: tuple[DecisionDialect[Any, Any], ...]
    # The form of an error before a body is read, and the body's own. The second raises Refused.
    by_headers: Callable[[Headers], DecisionDialect[Any, Any]]
    by_body: Callable[[Headers, Mapping[str, Any]], DecisionDialect[Any, Any]]


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

    _files: Mapping[str, bytes] = PrivateAttr(default_factory=dict)  # of a body of several parts

    model: ModelName = None
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
    x_verify: Literal["abstain"] | None = Field(
        None, description="Let the causal mode answer too, and say where it answers otherwise."
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


_PLAIN = {
    "extra_forbidden": UNKNOWN_FIELD,
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}
"""Pydantic's messages that speak of Python, in plain words."""
_BOXES = "box questions are about images, and the places of things in them are not read here"


def no_images(field: str) -> Refused:
    """The answer to a picture in a question."""
    return Refused(field, "only a state has pictures, and no question", code="unsupported")


def text_of(value: Any, loc: Loc) -> str:
    """Text as it is, null as nothing, anything else as its JSON text. Raises Refused."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise refusal(loc, "holds a number that is too large", "finite_number") from None


def _questions(
    dialect: DecisionDialect[Any, Typed], given: Any, lenient: bool
) -> tuple[dict[str, Typed], dict[str, ask.Question]]:
    """The questions of a body as they were read, and as the engine gets them, by their ids. Raises
    Refused."""
    if not isinstance(given, list if dialect.listed else dict):
        what, kind = (
            ("a list of questions", "list")
            if dialect.listed
            else ("an object: id → question", "dict")
        )
        raise refusal(("questions",), f"must be {what}", f"{kind}_type")
    if not 1 <= len(given) <= MOST_QUESTIONS:
        kind = "too_long" if given else "too_short"
        text = f"must be 1 to {MOST_QUESTIONS:,}, and there are {len(given):,}"
        raise refusal(("questions",), text, kind)
    typed: dict[str, Typed] = {}
    questions: dict[str, ask.Question] = {}
    for name, value in given.items() if isinstance(given, dict) else enumerate(given):
        loc: Loc = ("questions", name)
        if isinstance(name, str) and not 1 <= len(name) <= LONGEST_NAME:
            wrong = f"an id has 1 to {LONGEST_NAME} characters, and not {len(name):,}"
            raise refusal(loc, wrong, "string_length", "questions")
        one = _read(dialect, value, loc, lenient)
        loc = (*loc, value["type"]) if dialect.tagged else loc
        question = dialect.question_of(one, loc)
        try:
            ask.check_question(question, named(loc))
        except Refused as error:
            raise refusal(loc, error.reason, "value_error", named(loc)) from None
        typed[str(name)], questions[str(name)] = one, question
    return typed, questions


def _read(dialect: DecisionDialect[Any, Typed], value: Any, loc: Loc, lenient: bool) -> Typed:
    """One question of a body. loc: where it stands. Raises Refused."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "box":
        raise Refused(named(loc), _BOXES, code="unsupported")
    try:
        return dialect.read(value, context={LENIENT: lenient})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    text, at = first["msg"], (*loc, *first["loc"])
    if first["type"].startswith("union_tag"):
        text = f"must have a type, one of {', '.join(dialect.types)}"
        text += f", and not {kind[:40]!r}" if isinstance(kind, str) else ""
    text = _PLAIN.get(first["type"], text)
    tagged = first["loc"] and first["loc"][0] in dialect.types
    name = named((*loc, *first["loc"][1:])) if tagged else named(at)
    raise refusal(at, text, first["type"], name)


def named(loc: Loc) -> str:
    """("questions", "a", "criteria", 1) → "questions.a.criteria[1]"."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:100]}" for part in loc]
    return "".join(parts).removeprefix(".")


def parse(
    dialect: DecisionDialect[B, Typed], service: Service, endpoint: str, body: B
) -> tuple[DecisionRequest, dict[str, Typed]]:
    """The engine's request for a body, and its questions as they were read. Raises Refused, and
    Unread for pictures of the state."""
    dialect.check(service, endpoint, body)
    shown = Pictures(service)
    text = dialect.state_of(body, shown)
    given = {"order=schema": body.x_order == "schema", "pictures": shown.sources}
    given |= {"joint": body.x_joint, "verify": body.x_verify}
    if (refused := exclusions.refusal(exclusions.DECISION, given)) is not None:
        names = {name: f"x_{name}" for name in ("order", "joint", "verify")}
        if shown.sources:
            names["pictures"] = shown.sources[0].field
        raise refused.renamed(names)
    typed, questions = _questions(dialect, dict(body)["questions"], service.settings.lenient)
    samples, orders = body.x_samples or 1, body.x_orders or 1
    try:
        ask.check_reads(len(questions), samples, orders)
    except Refused as error:
        where = "questions, x_samples, x_orders"
        raise refusal(("x_samples",), error.reason, "too_many", where) from None
    request = DecisionRequest(
        state=shown.state(text, body),
        questions=questions,
        seed=(body.x_seed or 0) % 2**64,
        samples=samples,
        orders=orders,
        steps=body.x_steps or 1,
        joint=body.x_joint is True,
        order=body.x_order or "state",
        label_mass=body.x_label_mass is not False,
        verify=body.x_verify,
        timeout_s=body.x_timeout,
        since=body.envelope.since,
        endpoint=endpoint,
    )
    return request, typed


def figures(answer: Answer, values: Sequence[Any]) -> dict[str, Any]:
    """Fields that the forms do not have: all names begin with x_, as System One asks. values: those
    of the options, as the form writes them."""
    mass = {"x_label_mass": answer.label_mass, "x_is_label": answer.is_label}
    return {
        **{name: value for name, value in mass.items() if value is not None},
        "x_samples": answer.samples,
        "x_spread": answer.spread,
        "x_orders": answer.orders,
        "x_order_spread": answer.order_spread,
        **({} if answer.causal is None else {"x_undecided": answer.other is not None}),
        **({} if answer.other is None else {"x_other": values[answer.other]}),
    }


async def reply(route: DecisionRoute, service: Service, http: HttpRequest) -> Response:
    """Raises ApiError, and Refused."""
    boundary = multipart.boundary_of(http.headers.get("content-type", ""))
    dialect = route.by_headers(http.headers)

    def decode(data: bytearray) -> DecisionBody:
        nonlocal dialect
        files: Mapping[str, bytes] = {}
        if boundary is not None:
            data, files = multipart.split(data, boundary, "request")
        try:
            value = request_body.parse(data, service.settings.max_values, names_repeat=False)
        except Refused as error:
            answer = ApiError.of(error)
            answer.field = WrongField((), answer.message, answer.code or "json_invalid")
            raise answer from None
        http.scope[ERROR_FORM] = OPENAI_ERRORS  # of a body of no form, or of two
        dialect = route.by_body(http.headers, value)
        http.scope[ERROR_FORM] = dialect.errors
        body: DecisionBody = request_body.validated(value, dialect.body_type, lenient=True)
        body._files = files
        return body

    async with request_body.read_with(service, http, decode) as body:
        service = await service.enter(http, body)
        _check_decides(service)
        parsed = partial(parse, dialect, service, route.path, body)
        request, typed = await with_pictures(service, body, parsed)
        del body
        with _in_the_words_of(dialect):
            # Within, since the questions are tokenized there.
            requests = service.asking([request])
            running = await inflight.InFlight(service.engine, requests).begin(http)
    with _in_the_words_of(dialect):
        (collected,) = await inflight.collect(http, running)
    decided = collected.end
    assert isinstance(decided, Decided)
    headers = inflight.headers_of(running, dialect.errors.request_id)
    return await run_in_threadpool(
        lambda: json_response(_body(dialect, service.name, typed, decided), headers)
    )


def _body(
    dialect: DecisionDialect[Any, Typed], model: str, typed: Mapping[str, Typed], decided: Decided
) -> Mapping[str, Any]:
    answers = {name: dialect.answered(one, decided.answers[name]) for name, one in typed.items()}
    return {
        **({"model": model} if dialect.names_model else {}),
        "answers": list(answers.values()) if dialect.listed else answers,
        "usage": dialect.usage(decided.usage, len(typed)),
    }


def _check_decides(service: Service) -> None:
    """Raises Refused where the model that is served cannot answer questions."""
    reason = service.model.undecided
    if reason is not None:
        raise Refused(
            None, f"{service.name!r} cannot decide: {without_paths(reason)}", code="unsupported"
        )


@contextmanager
def _in_the_words_of(dialect: DecisionDialect[Any, Any]) -> Iterator[None]:
    """Gives a refusal of the engine the names that fields have in the body. Ids of listed
    questions are numbers."""
    try:
        yield
    except ApiError as error:
        field = None if error.refused is None else error.refused.field
        root, _, name = (field or "").partition(".")
        if root == "verify":
            error.rename({root: "x_verify"})
        if error.refused is not None and root in ("state", "questions"):
            names = {"state": dialect.state}
            if dialect.listed and name.isdecimal():
                names[f"{root}.{name}"] = f"questions[{name}]"
            error.rename(names)
            if root == "questions" and not name.isdecimal():
                error.param = root
            reason = error.refused.reason
            text = f"{name}: {reason}" if name and not name.isdecimal() else reason
            error.field = WrongField((root,), text, error.code or "value_error")
        raise
