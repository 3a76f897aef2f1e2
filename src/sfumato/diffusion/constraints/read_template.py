"""From questions to ids: the wording of a question, the labels of its options and their orders, the
prompt of a read, and the canvas whose slots are read.

The state comes first and the question after it, so that one encoded state serves many questions;
with the schema first the question comes before its state.  Each part of a prompt is tokenized by
itself, so that the tokens of a state never depend on the question that follows it.

Labels are short texts that stand for options, each one token of its canvas.  Whether a text is one
token is found with the tokenizer in use, never from a list of ids.  The texts around a user's
message and the tokens of a canvas come from the model's text side and its family.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import product
from typing import Any

from sfumato.diffusion.constraints.questions import Question, ScoreQuestion, YesNoQuestion
from sfumato.diffusion.step.batch import WIDTHS
from sfumato.model.model_config import NO_BLOCKS, Blocks
from sfumato.refused import Refused

BETWEEN = "\n\n"
"""Between the state and the question, and in a user's turn that has the question first."""

_WORDING = 40
"""Characters of a question beside its own, about."""
_LABEL = 4
"""Characters of an option's line beside its own: "A: " and the line's end."""


def question_text(
    question: Question, labels: Sequence[str], order: Sequence[int] | None = None
) -> str:
    """The question with its options, each behind the label that stands for it on the canvas.

    labels: of the options, in their order; order: numbers of the options, in the order in which
    they are listed (None: their own).
    """
    listed = range(len(labels)) if order is None else order
    lines = [f"Question: {question.instructions or _default_instructions(question)}"]
    for label, option in [(labels[i], question.options[i]) for i in listed]:
        # Where the name is the label, as for yes and no, it is not said twice.
        name = "" if label == option.name else option.name
        described = (
            f" ({option.description})" if name and option.description else option.description
        )
        text = f"{name}{described}"
        lines.append(f"{label}: {text}" if text else label)
    lines.append(_request([labels[i] for i in listed]))
    return "\n".join(lines)


def characters(question: Question) -> int:
    """Characters that a question's caller has written."""
    options = sum(len(option.name) + len(option.description) for option in question.options)
    return len(question.instructions) + options


def question_length(question: Question) -> int:
    """Characters of `question_text`, about: what labels and wording have is counted at its least,
    before labels are known."""
    return characters(question) + _WORDING + _LABEL * len(question.options)


def joint_text(questions: Sequence[str]) -> str:
    """Several questions that are answered on one canvas, a line each; questions: their texts."""
    numbered = [f"{number}. {text}" for number, text in enumerate(questions, 1)]
    request = "Answer every question on a line of its own, as its number and its answer."
    return BETWEEN.join((*numbered, request))


def _default_instructions(question: Question) -> str:
    if isinstance(question, YesNoQuestion):
        return "Does this hold?"
    return "Which level fits?" if isinstance(question, ScoreQuestion) else "Which option fits?"


def _request(labels: Sequence[str]) -> str:
    if len(labels) == 2:
        return f"Answer {labels[0]} or {labels[1]}."
    if all(label.isdecimal() for label in labels):
        return "Answer with one number."
    return "Answer with one label."


Encode = Callable[[str], list[int]]
"""Plain text to token ids; special tokens in it stay text."""

_OTHER = "".join(sorted(set(map(chr, range(0x21, 0x7F))) - set(string.ascii_letters)))
_OTHER = string.digits + "".join(c for c in _OTHER if c not in string.digits)


@dataclass(frozen=True)
class Label:
    """A text that stands for an option: one token, or two that are read one after the other."""

    text: str
    ids: tuple[int, ...]


class Line:
    """A line of a canvas with one label in it: the texts before and after the label are fixed."""

    def __init__(self, encode: Encode, before: str, after: str) -> None:
        """Raises ValueError for a vocabulary in which A and B are no labels here."""
        self._encode, self._before, self._after = encode, before, after
        first, second = (encode(f"{before}{letter}{after}") for letter in "AB")
        differ = [i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
        if len(first) != len(second) or len(differ) != 1:
            raise Refused(
                "questions",
                "this model's tokenizer makes no single token of the labels A and B, so that "
                "no question can be read with it",
            )
        self.ids = tuple(first)  # with the label A
        self.position = differ[0]  # of the label's token
        self._ids, self._chosen = cache(self._encoded), cache(partial(choose_labels, self))

    def _encoded(self, text: str) -> tuple[int, ...]:
        """The line with a label."""
        return tuple(self._encode(f"{self._before}{text}{self._after}"))

    def tokens(self, text: str, count: int = 1) -> tuple[int, ...] | None:
        """The tokens of a label in this line, so many of them; None where there are more or fewer,
        or others of the line change."""
        ids, at, end = self._ids(text), self.position, self.position + count
        same = len(ids) == len(self.ids) - 1 + count
        same = same and ids[:at] + ids[end:] == self.ids[:at] + self.ids[at + 1 :]
        return ids[at:end] if same else None

    def labels(self, question: Question) -> tuple[Label, ...]:
        """A label for each of the question's options. They are chosen once for all questions of a
        kind and a number of options, since hundreds of texts may have to be tokenized for that;
        such questions get the same tuple."""
        kind: Any = type(question)
        return self._chosen(kind, len(question.options))


def choose_labels(line: Line, kind: type[Question], count: int) -> tuple[Label, ...]:
    """A label for each of so many options, in their order: words for yes and no and digits for up
    to ten levels, where these are one token each, else letters and what follows them.

    Where the vocabulary has too few labels of one token, as one of characters has for more than 94
    options, all labels have two.  Raises ValueError where it has too few of these as well.
    """
    words: Iterable[str] = ()
    if kind is YesNoQuestion:
        words = "yes", "no"
    elif kind is ScoreQuestion and count <= len(string.digits):
        words = string.digits[:count]
    pairs = ["".join(pair) for pair in product(string.ascii_uppercase, repeat=2)]
    letters = (*string.ascii_uppercase, *string.ascii_lowercase, *pairs, *_OTHER)
    most = 0
    for texts, tokens in ((words, 1), (letters, 1), (pairs, 2)):
        labels = _labels(line, texts, count, tokens)
        if len(labels) == count:
            return labels
        most = len(labels) if texts is letters else most
    raise ValueError(
        f"{count} options: this model's tokenizer has single tokens for {most} labels; ask "
        f"for at most {most} options"
    )


def _labels(line: Line, texts: Iterable[str], count: int, tokens: int) -> tuple[Label, ...]:
    """The first `count` of the texts that are labels of so many tokens, all different."""
    chosen: dict[tuple[int, ...], Label] = {}
    for text in texts:
        ids = line.tokens(text, tokens)
        if ids is not None and ids not in chosen:
            chosen[ids] = Label(text, ids)
            if len(chosen) == count:
                break
    return tuple(chosen.values())


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


NOISE = -1
"""Stands in a canvas where noise goes."""


@dataclass(frozen=True)
class ReadCanvas:
    """A pinned template: tokens, and the places that are open."""

    ids: tuple[int, ...]  # NOISE at the open places
    slots: tuple[int, ...]  # the open places that are read
    labels: tuple[tuple[int, ...], ...]  # of each slot

    def following(self, ids: Sequence[int]) -> ReadCanvas:
        """The canvas with these tokens before its own."""
        slots = tuple(len(ids) + slot for slot in self.slots)
        return replace(self, ids=(*ids, *self.ids), slots=slots)

    def cut(self, start: int, stop: int) -> ReadCanvas:
        """The positions from `start` to `stop`, where all slots are."""
        slots = tuple(slot - start for slot in self.slots)
        return replace(self, ids=self.ids[start:stop], slots=slots)

    @property
    def open(self) -> tuple[int, ...]:
        return tuple(place for place, token in enumerate(self.ids) if token == NOISE)


@dataclass(frozen=True, eq=False)
class ReadTemplate:
    """How a model reads questions."""

    head: tuple[int, ...]  # of the prompt, up to the user's text
    tail: tuple[int, ...]  # from the end of the user's text on
    encode: Encode
    end_id: int  # what an answer on the canvas ends with
    filler_id: int  # what fills the canvas behind it
    canvas_length: int  # of the checkpoint
    longest_token: int  # characters
    # The blocks of a prompt of so many tokens.
    blocks: Callable[[int], Blocks] = field(default=lambda prompt: NO_BLOCKS, repr=False)
    has_masks: bool = False  # whether open places are masks, which no seed changes

    @cached_property
    def line(self) -> Callable[[str, str], Line]:
        """A line with a label, by the texts before and after it; remembered, since its labels cost
        calls of the tokenizer."""
        return cache(partial(Line, self.encode))

    def canvas(
        self,
        body: Sequence[int],
        slots: Sequence[int],
        labels: Sequence[Sequence[int]],
    ) -> ReadCanvas | None:
        """The narrowest canvas that holds a body, its end and filler; None where no width does.

        At least one token of filler stands there: without it, a model puts less of its probability
        on labels."""
        width = narrowest(len(body) + 2, self.canvas_length)
        if width is None:
            return None
        filler = [self.filler_id] * (width - len(body) - 1)
        ids = (*body, self.end_id, *filler)
        return ReadCanvas(ids, tuple(slots), tuple(tuple(each) for each in labels))


def narrowest(tokens: int, most: int) -> int | None:
    """The width of the narrowest canvas of so many tokens; None where none has them. most: the
    canvas length of the checkpoint."""
    widths = (*(width for width in WIDTHS if width < most), most)
    return next((width for width in widths if width >= tokens), None)
