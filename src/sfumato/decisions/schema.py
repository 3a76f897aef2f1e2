"""Several questions as one value: a mapping of names to types, or a pydantic model's fields.

pydantic is not imported here: a class with `model_fields` is taken for one of its models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from sfumato.decisions.forms import Form, form_of
from sfumato.decisions.results import Decision, DecisionUsage, typed_answer
from sfumato.diffusion.constraints.questions import MOST_QUESTIONS, Answer, Question
from sfumato.refused import Refused

T = TypeVar("T")


@dataclass(frozen=True)
class Schema(Generic[T]):
    """The forms of questions by name, and what their values together become."""

    forms: Mapping[str, Form]
    build: Callable[[dict[str, Any]], T]

    @property
    def questions(self) -> dict[str, Question]:
        """What a model is asked."""
        return {name: form.question for name, form in self.forms.items()}

    def decision(self, answers: Mapping[str, Answer], usage: DecisionUsage) -> Decision[T]:
        """The typed answers, in the order of the questions; answers and usage: an engine's
        `Decided` has both."""
        typed = {name: typed_answer(form, answers[name]) for name, form in self.forms.items()}
        return Decision(typed, usage, self.build)


@overload
def schema_of(questions: type[T]) -> Schema[T]: ...


@overload
def schema_of(questions: Mapping[str, Any]) -> Schema[dict[str, Any]]: ...


def schema_of(questions: Any) -> Schema[Any]:
    """The schema of a mapping, or of a pydantic model. Raises ValueError, naming the question, for
    what cannot be asked."""
    if isinstance(questions, type) and isinstance(getattr(questions, "model_fields", None), dict):
        forms = _of_model(questions)
        build: Callable[[dict[str, Any]], Any] = _builder(questions)
    elif isinstance(questions, Mapping):
        _check_names(questions)
        forms = {name: form_of(name, annotation) for name, annotation in questions.items()}
        build = dict
    else:
        raise Refused(
            "questions",
            'must be a mapping of names to types, such as {"urgent": bool}, or a class '
            f"of pydantic, got {questions!r:.80}",
        )
    return Schema(forms, build)


def _check_names(names: Mapping[Any, Any]) -> None:
    if not 1 <= len(names) <= MOST_QUESTIONS:
        raise Refused("questions", f"must be 1 to {MOST_QUESTIONS}, got {len(names)}")
    for name in names:
        if not isinstance(name, str) or not name:
            raise Refused("questions", f"a name must be a text that is not empty, got {name!r:.80}")


def _of_model(model: Any) -> dict[str, Form]:
    _check_names(model.model_fields)
    return {
        name: form_of(
            name,
            field.annotation,
            field.metadata,
            field.description or "",
            f"{model.__name__}.{name}",
        )
        for name, field in model.model_fields.items()
    }


def _builder(model: Any) -> Callable[[dict[str, Any]], Any]:
    def build(values: dict[str, Any]) -> Any:
        # Values go in under the names that the model itself reads: an alias where it has one.
        fields = model.model_fields
        return model(
            **{
                (alias if isinstance(alias := fields[name].validation_alias, str) else name): value
                for name, value in values.items()
            }
        )

    return build
