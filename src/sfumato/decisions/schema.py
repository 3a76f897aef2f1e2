"""Questions as callers write them in Python, and as one value: a mapping of names to types, or a
pydantic model's fields.

A type is bool, Literal, Enum, `YesNo`, `Choice` or `Score`, each perhaps in Annotated. A `Form` is
its question and what the options stand for in Python, so that an answer's probabilities become a
typed answer; a `Decision` has one for each question. Knows no model and no tokens; pydantic is not
imported: a class with `model_fields` is taken for one of its models.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, overload

from sfumato.diffusion.constraints.questions import (
    MOST_QUESTIONS,
    Answer,
    ChoiceAnswer,
    ChoiceQuestion,
    Option,
    Question,
    ScoreAnswer,
    ScoreQuestion,
    YesNoQuestion,
    check_question,
)
from sfumato.refused import Refused

T = TypeVar("T")
BAR = 20  # cells
_LONGEST = 28  # cells of an option's name beside its bar


@dataclass(frozen=True)
class DecisionUsage:
    """Tokens and reads of a decision."""

    input_tokens: int  # of the state, and of each question as often as it was encoded
    cached_tokens: int  # of the state, reused from a slot and not encoded again
    reads: int  # canvases that were read


@dataclass(frozen=True)
class TypedAnswer:
    """The answer to one question."""

    value: Any  # of the most probable option; of a float on a scale, the expected score
    probabilities: dict[Any, float]  # by value, in the order of the question's options
    confidence: float  # 0..1 by System One's formulas; of a yes/no question, |2p − 1|
    score: float | None  # Σ i·pᵢ, of a score alone
    # None where not wanted, or where a question of one option needed no read:
    label_mass: float | None  # of the vocabulary's probability, how much the options have
    is_label: bool | None  # whether the vocabulary's most probable token stands for an option
    samples: int
    spread: float  # the largest difference between two samples in the probability of an option
    orders: int
    order_spread: float  # likewise between orders of the options
    undecided: bool = False  # whether the causal mode answers otherwise; only with `verify`
    other: Any = None  # its value then

    @property
    def probability(self) -> float:
        """The probability of the most probable option."""
        return max(self.probabilities.values())

    def __repr__(self) -> str:
        more = "" if self.score is None else f", score={self.score:.2f}"
        mass = "" if self.label_mass is None else f", label_mass={self.label_mass:.2f}"
        other = f", undecided, other={self.other!r}" if self.undecided else ""
        return (
            f"TypedAnswer({self.value!r}, probability={self.probability:.2f}, "
            f"confidence={self.confidence:.2f}{more}{mass}{other})"
        )


class Decision(dict[str, TypedAnswer], Generic[T]):
    """The typed answers by the names of their questions; `print` shows them with bars."""

    def __init__(
        self,
        answers: Mapping[str, TypedAnswer],
        usage: DecisionUsage,
        build: Callable[[dict[str, Any]], T],
    ) -> None:
        super().__init__(answers)
        self.usage, self._build = usage, build

    @property
    def value(self) -> T:
        """All values together: a dict by name, or an instance of the pydantic model that was
        asked. Raises what the model's own checks raise."""
        return self._build({name: answer.value for name, answer in self.items()})

    def __missing__(self, name: str) -> TypedAnswer:
        raise KeyError(f"{name!r} is none of the questions: {', '.join(self)[:200]}")

    def __repr__(self) -> str:
        values = (f"{n}={a.value!r} ({a.probability:.2f})" for n, a in self.items())
        return f"Decision({', '.join(values)})"

    def __str__(self) -> str:
        return "\n".join(line for name, answer in self.items() for line in bars(name, answer))


def bars(name: str, answer: TypedAnswer, width: int = BAR) -> list[str]:
    """Lines for one answer: a heading, and a bar of at most `width` cells for each option."""
    notes = [f"confidence {answer.confidence:.2f}"]
    if answer.score is not None:
        notes.insert(0, f"score {answer.score:.2f}")
    if answer.label_mass is not None:
        notes.append(f"label mass {answer.label_mass:.2f}")
    if answer.samples > 1:
        notes.append(f"spread {answer.spread:.2f} of {answer.samples} samples")
    if answer.orders > 1:
        notes.append(f"order spread {answer.order_spread:.2f} of {answer.orders}")
    if answer.undecided:
        notes.insert(0, f"undecided: the causal mode answers {shown(answer.other)}")
    lines = [f"{name}: {shown(answer.value)}  ({', '.join(notes)})"]
    labels = [shown(value) for value in answer.probabilities]
    column = min(_LONGEST, max(map(len, labels)))
    for label, share in zip(labels, answer.probabilities.values(), strict=True):
        short = label if len(label) <= column else f"{label[: column - 1]}…"
        lines.append(f"  {short:<{column}}  {share:4.0%} {'━' * round(share * width)}".rstrip())
    return lines


def shown(value: Any) -> str:
    """A value for people: yes, no, the name of an option, a number with two decimals."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    return str(getattr(value, "name", value))


@dataclass(frozen=True)
class YesNo:
    """Whether something holds; its value is a bool.

    instructions: the question; yes, no: what each answer means.
    """

    instructions: str = ""
    yes: str = ""
    no: str = ""

    def question(self) -> YesNoQuestion:
        return YesNoQuestion(*(_text(self, name) for name in ("instructions", "yes", "no")))


@dataclass(frozen=True, init=False)
class Choice:
    """Which option applies; its value is the name of one.

    options: names, or a mapping of names to descriptions, "" or None where the name says it all.
    """

    options: tuple[Option, ...]
    instructions: str

    def __init__(
        self, options: Mapping[str, str | None] | Iterable[str], instructions: str = ""
    ) -> None:
        object.__setattr__(self, "options", _options(options))
        object.__setattr__(self, "instructions", instructions)

    def question(self) -> ChoiceQuestion:
        return ChoiceQuestion(_text(self, "instructions"), self.options)


@dataclass(frozen=True, init=False)
class Score:
    """Which level applies, of levels that are listed from low to high; its value is the name of
    the most probable level, and its `score` is Σ i·pᵢ, from 0 to the number of levels less one."""

    levels: tuple[str, ...]
    instructions: str

    def __init__(self, *levels: str, instructions: str = "") -> None:
        for level in levels:
            if not isinstance(level, str) or not level:
                raise ValueError(
                    f"Score: a level must be a text that is not empty, got {level!r}; write "
                    'Score("calm", "annoyed", "furious")'
                )
        if len(set(levels)) < len(levels):
            raise ValueError("Score: two levels have the same name; name each level once")
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "instructions", instructions)

    def question(self) -> ScoreQuestion:
        return ScoreQuestion(_text(self, "instructions"), self.levels)


Kind = YesNo | Choice | Score


def _text(kind: Kind, name: str) -> str:
    value = getattr(kind, name)
    if not isinstance(value, str):
        raise ValueError(f"{type(kind).__name__}: {name} must be a text, got {value!r:.80}")
    return value


def _options(options: Mapping[str, str | None] | Iterable[str]) -> tuple[Option, ...]:
    if isinstance(options, str):
        raise ValueError(f"Choice: options must be several names, got the text {options!r:.80}")
    pairs = options.items() if isinstance(options, Mapping) else ((name, "") for name in options)
    made = []
    for name, description in pairs:
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"Choice: the name of an option must be a text that is not empty, got {name!r:.80}"
            )
        if not isinstance(description, str | None):
            raise ValueError(
                f"Choice: the description of {name!r:.80} must be a text or None, got "
                f"{description!r:.80}"
            )
        made.append(Option(name, description or ""))
    return tuple(made)


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


def typed_answer(form: Form, answer: Answer) -> TypedAnswer:
    """What a read's answer becomes for the caller."""
    scored = answer if isinstance(answer, ScoreAnswer) else None
    other = None if answer.other is None else form.values[answer.other]
    if other is not None and form.expected:
        other = ScoreAnswer(answer.causal or ()).score
    return TypedAnswer(
        scored.score if scored and form.expected else form.values[answer.best],
        dict(zip(form.values, answer.probabilities, strict=True)),
        _confidence(answer),
        scored.score if scored else None,
        answer.label_mass,
        answer.is_label,
        answer.samples,
        answer.spread,
        answer.orders,
        answer.order_spread,
        answer.other is not None,
        other,
    )


def _confidence(answer: Answer) -> float:
    if isinstance(answer, ChoiceAnswer | ScoreAnswer):
        return answer.confidence
    return abs(2 * answer.probabilities[0] - 1)  # that of a choice with two options


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
