"""In which orders a question's options are listed: the caller's, and others to average over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sfumato.diffusion.constraints.labels import Label
from sfumato.diffusion.constraints.questions import Question, ScoreQuestion


@dataclass(frozen=True, eq=False)
class Listing:
    """One order. labels: of the options, in the caller's order; listed: numbers of the options as
    the prompt has them."""

    labels: tuple[Label, ...]
    listed: tuple[int, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(label.text for label in self.labels)


def listing_orders(question: Question, labels: Sequence[Label], wanted: int) -> list[Listing]:
    """Up to `wanted` different orders, the caller's own first.

    Letters stand at their places in the list, so that an option has another letter in each order.
    The words yes and no and the digits and letters of levels keep their meaning.
    """
    count = len(labels)
    lists = (
        _of_levels(count, wanted) if isinstance(question, ScoreQuestion) else _turned(count, wanted)
    )
    if isinstance(question, ScoreQuestion) or means_itself(question, labels):
        return [Listing(tuple(labels), listed) for listed in lists]
    return [Listing(_moved(labels, listed), listed) for listed in lists]


def most_orders(question: Question, wanted: int) -> int:
    """How many orders `listing_orders` gives at most, without labels."""
    reversed_too = isinstance(question, ScoreQuestion)
    return min(wanted, len(question.options) + reversed_too)


def means_itself(question: Question, labels: Sequence[Label]) -> bool:
    """Whether the labels are the options' own names, as the words yes and no are."""
    return all(
        label.text == option.name for label, option in zip(labels, question.options, strict=True)
    )


def _moved(labels: Sequence[Label], listed: Sequence[int]) -> tuple[Label, ...]:
    """The labels of the options where label i stands at place i of the list."""
    moved = dict(zip(listed, labels, strict=True))
    return tuple(moved[option] for option in range(len(labels)))


def _turned(count: int, wanted: int) -> list[tuple[int, ...]]:
    """The options from another one on, as far apart as can be: each stands at the head once where
    there are as many orders as options."""
    orders = min(wanted, count)
    starts = [number * count // orders for number in range(orders)]
    return [(*range(start, count), *range(start)) for start in starts]


def _of_levels(count: int, wanted: int) -> list[tuple[int, ...]]:
    """The levels from low to high, from high to low, and then from another one on."""
    own = tuple(range(count))
    others = [listed for listed in _turned(count, max(1, wanted - 1)) if listed != own]
    listings = [own, own[::-1], *others]
    return list(dict.fromkeys(listings))[:wanted]
