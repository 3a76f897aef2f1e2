"""The bodies of typed decisions: System One's, OpenAI's and Gemini's, and what they share.

Questions are read one by one (`Part`), so that the first wrong one ends it; the bodies hold them as
they came. Unknown fields of a body are ignored, as System One has it, and those of a question are
refused: a condition that is not read must not look as if it were. Knows no answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from sfumato.diffusion.constraints.questions import MOST_LEVELS, MOST_OPTIONS
from sfumato.options.limits import (
    FIRST_SEED,
    LAST_SEED,
    MOST_READ_STEPS,
    MOST_READS,
    MOST_SECONDS,
)
from sfumato.server.schemas import decision_schemas, json_schemas
from sfumato.server.schemas.body import Body, First, at_most
from sfumato.server.schemas.neutral import Ignored

LENIENT = "lenient"  # key of the context of a validation: unknown fields of questions pass


def _kind(*kinds: type, name: str) -> AfterValidator:
    """Refuses values of other types in one sentence, without pydantic's branches of a union."""

    def check(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise PydanticCustomError("text_type", f"must be {name}")
        return value

    return AfterValidator(check)


Text = Annotated[
    Any,
    _kind(str, dict, list, name="text, an object or a list"),
    WithJsonSchema(decision_schemas.TEXT),
]
"""What a model reads: a string as it is, and anything else as its JSON text."""
Described = Annotated[Any, _kind(str, dict, list, type(None), name="text, an object or a list")]


class DecisionBody(Body):
    """What every form of a request for decisions has, and the fields of our own."""

    model_config = ConfigDict(json_schema_extra=decision_schemas.with_any_field)

    model: str | None = Field(None, description="Ignored: one model is loaded.")
    x_joint: bool | None = Field(None, description="Read all questions on one canvas (false).")
    x_samples: Annotated[
        Any,
        AfterValidator(decision_schemas.check_samples),
        WithJsonSchema(decision_schemas.SAMPLES),
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


class SystemOneBody(DecisionBody):
    model: str | None = Field(
        None, description="At /v1/systemone: jev-latest, any other jev- name, or the model's own."
    )
    state: Text = Field(description="What all questions are about.")
    questions: Annotated[Any, WithJsonSchema(decision_schemas.SYSTEM_ONE_QUESTIONS)] = Field(
        description="Id → question. Ids come back as they are, and never reach the model."
    )
    assets: Annotated[Any, WithJsonSchema(json_schemas.NULL)] = Field(
        None, description="Refused unless null: images are not supported yet."
    )


class OpenAIDecisionBody(DecisionBody):
    input: Annotated[Any, WithJsonSchema(decision_schemas.OPENAI_INPUT)] = Field(
        description="Text, or messages and calls of functions with their outputs."
    )
    questions: Annotated[Any, WithJsonSchema(decision_schemas.OPENAI_QUESTIONS)] = Field(
        description="predicate, choice and score questions; answers come in the same order."
    )
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    safety_identifier: Ignored = None


class GeminiDecisionBody(DecisionBody):
    input: Annotated[Any, WithJsonSchema(decision_schemas.GEMINI_INPUT)] = Field(
        description="Text, or parts of text."
    )
    questions: Annotated[Any, WithJsonSchema(decision_schemas.GEMINI_QUESTIONS)] = Field(
        description="Id → question."
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


Options = Annotated[dict[str, Described], at_most(MOST_OPTIONS), Field(min_length=1)]
Levels = Annotated[list[Text], First, Field(min_length=1, max_length=MOST_LEVELS)]


class NoulCriteria(Part):
    true: Described = None
    false: Described = None


class NoulQuestion(Part):
    type: Literal["noul"]
    instructions: Described = None
    criteria: NoulCriteria | None = None


class ChoiceQuestion(Part):
    type: Literal["choice"]
    instructions: Described = None
    criteria: Options


class ScoreQuestion(Part):
    type: Literal["score"]
    instructions: Described = None
    criteria: Levels


class GeminiCriteria(Part):
    true_description: str | None = None
    false_description: str | None = None


class GeminiNoulQuestion(NoulQuestion):
    criteria: GeminiCriteria | None = None  # type: ignore[assignment]


class OpenAIPredicate(Part):
    type: Literal["predicate"]
    name: str | None = Field(None, max_length=decision_schemas.LONGEST_NAME)
    instructions: Any


class OpenAIOption(Part):
    value: Annotated[Any, _kind(str, bool, name="text, true or false")]
    description: str | None = None


class OpenAIChoice(OpenAIPredicate):
    type: Literal["choice"]  # type: ignore[assignment]
    choices: Annotated[list[OpenAIOption], First, Field(min_length=1, max_length=MOST_OPTIONS)]


class OpenAILevel(Part):
    label: str
    description: str | None = None


class OpenAIScore(OpenAIPredicate):
    type: Literal["score"]  # type: ignore[assignment]
    levels: Annotated[list[OpenAILevel], First, Field(min_length=1, max_length=MOST_LEVELS)]


def _reader(kinds: Any) -> Callable[..., Any]:
    return TypeAdapter(Annotated[kinds, Field(discriminator="type")]).validate_python


read_system_one: Callable[..., NoulQuestion | ChoiceQuestion | ScoreQuestion] = _reader(
    NoulQuestion | ChoiceQuestion | ScoreQuestion
)
read_gemini: Callable[..., GeminiNoulQuestion | ChoiceQuestion | ScoreQuestion] = _reader(
    GeminiNoulQuestion | ChoiceQuestion | ScoreQuestion
)
read_openai: Callable[..., OpenAIPredicate | OpenAIChoice | OpenAIScore] = _reader(
    OpenAIPredicate | OpenAIChoice | OpenAIScore
)
"""Validate one question; raise pydantic's ValidationError."""
