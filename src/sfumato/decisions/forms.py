"""A type as a question: bool, Literal, Enum, YesNo, Choice, Score, each perhaps in Annotated.

A `Form` is the question and what its options stand for in Python, so that an answer's probabilities
become a typed answer. Knows no model, no tokens and no pydantic.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sfumato.decisions.kinds import Choice, Kind, Score, YesNo
from sfumato.diffusion.constraints.questions import (
    ChoiceQuestion,
    Option,
    Question,
    YesNoQuestion,
    check_question,
)

_WRITE = "write bool, Literal[…], an Enum, YesNo(…), Choice(…) or Score(…)"


@dataclass(frozen=True)
class Form:
    """A question, and what its answer becomes."""

    question: Question
    values: tuple[Any, ...]  # of the options, in the order of the question's
    expected: bool = False  # the value is the expected score, rather than one of `values`


def form_of(
    name: str,
    annotation: Any,
    notes: Sequence[Any] = (),
    instructions: str = "",
    where: str = "",
) -> Form:
    """The form of a question's type.

    name: read as the instructions where nothing else says what is asked; notes: as of Annotated;
    instructions: where the type has none; where: what messages call the question, if not
    questions.name. Raises ValueError for what is no question.
    """
    where = where or f"questions.{name:.80}"
    try:
        form = _annotated(annotation, notes)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    question = form.question
    asked_for = question.instructions or instructions or _readable(name)
    form = replace(form, question=replace(question, instructions=asked_for))
    check_question(form.question, where)
    return form


def _readable(name: str) -> str:
    """is_urgent → "Is urgent?" """
    words = " ".join(name.replace("_", " ").split())
    return f"{words[:1].upper()}{words[1:]}?" if words else name


def _form(annotation: Any) -> Form:
    if isinstance(annotation, YesNo | Choice | Score):
        return _form_of_kind(annotation)
    if annotation is bool:
        return Form(YesNoQuestion(), (True, False))
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *notes = get_args(annotation)
        return _annotated(inner, notes)
    if origin is Literal:
        return _choice(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        if not len(annotation):
            raise ValueError(f"{annotation.__name__} has no members")
        return _choice(tuple(annotation))
    if origin in (Union, types.UnionType):
        raise ValueError(
            f"{annotation} is no question, since a model always answers with an option; write "
            'an option of its own, as in Literal["a", "b", "none of these"]'
        )
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        raise ValueError("a model within a model is no question; give its fields to the outer one")
    raise ValueError(f"{_shown(annotation)} is no question; {_WRITE}{_hint(annotation)}")


def _annotated(inner: Any, notes: Sequence[Any]) -> Form:
    """The form of Annotated[inner, *notes]: a text among the notes is the instructions, and
    YesNo, Choice or Score the question, of which `inner` says the value's type."""
    kinds = [note for note in notes if isinstance(note, YesNo | Choice | Score)]
    texts = [note for note in notes if isinstance(note, str)]
    if len(kinds) > 1 or len(texts) > 1:
        raise ValueError("Annotated has two questions or two instructions; write one of each")
    form = _typed(inner, kinds[0]) if kinds else _form(inner)
    if texts and not form.question.instructions:
        form = replace(form, question=replace(form.question, instructions=texts[0]))
    return form


def _typed(inner: Any, kind: Kind) -> Form:
    form = _form_of_kind(kind)
    if isinstance(kind, Score) and inner is float:
        return replace(form, expected=True)
    if isinstance(kind, Score) and inner is int:
        return replace(form, values=tuple(range(len(form.values))))
    if inner in (Any, str) or (inner is bool and isinstance(kind, YesNo)):
        return form
    if not isinstance(kind, YesNo):
        # The type names the values, and the kind their descriptions: both must have the same.
        values = _form(inner).values
        if tuple(map(_name, values)) == tuple(option.name for option in form.question.options):
            return replace(form, values=values)
    raise ValueError(
        f"{type(kind).__name__} gives no {_shown(inner)}; write Annotated[bool, YesNo(…)], "
        "Annotated[str, Choice(…)], or Annotated with str, int or float and Score(…)"
    )


def _form_of_kind(kind: Kind) -> Form:
    question = kind.question()
    if isinstance(kind, YesNo):
        return Form(question, (True, False))
    return Form(question, tuple(option.name for option in question.options))


def _choice(values: Sequence[Any]) -> Form:
    names = tuple(map(_name, values))
    if not all(names):
        raise ValueError("an option is an empty text; give it a name")
    if len(set(values)) < len(values):  # as 1 and True, which would be one key
        raise ValueError(f"two of {', '.join(map(repr, values))[:200]} are equal; name each once")
    return Form(ChoiceQuestion("", tuple(Option(name) for name in names)), tuple(values))


def _name(value: Any) -> str:
    """What a model reads for a value of a Literal or an Enum."""
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) and value.value else value.name
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def _shown(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else f"{annotation!r:.80}"


def _hint(annotation: Any) -> str:
    if annotation in (int, float):
        return f"; or Annotated[{annotation.__name__}, Score(…)] for a number on a scale"
    if annotation is str:
        return "; a model answers with one of the options that are given"
    if annotation in (YesNo, Choice, Score):
        example = {YesNo: '("Is it urgent?")', Choice: '(["a", "b"])', Score: '("low", "high")'}
        return f"; the class needs its question: {annotation.__name__}{example[annotation]}"
    if isinstance(annotation, str):
        return f"; for a yes/no question write YesNo({annotation[:40]!r})"
    if isinstance(annotation, list | tuple | set | dict):
        return "; for one of several options write Choice([…])"
    return ""
