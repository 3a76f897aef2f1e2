"""Typed answers: a `Decision` has one for each question. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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

    @property
    def probability(self) -> float:
        """The probability of the most probable option."""
        return max(self.probabilities.values())

    def __repr__(self) -> str:
        more = "" if self.score is None else f", score={self.score:.2f}"
        mass = "" if self.label_mass is None else f", label_mass={self.label_mass:.2f}"
        return (
            f"TypedAnswer({self.value!r}, probability={self.probability:.2f}, "
            f"confidence={self.confidence:.2f}{more}{mass})"
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
