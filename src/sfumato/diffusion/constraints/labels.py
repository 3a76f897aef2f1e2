"""Labels: the short texts that stand for a question's options, each one token of its canvas.

Whether a text is one token is found with the tokenizer in use, never from a list of ids: the line
of the canvas that holds the label is tokenized with every label in its place, and all must differ
in exactly one token at one position.  Knows no ids of any vocabulary.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product

from sfumato.diffusion.constraints.questions import Question, ScoreQuestion, YesNoQuestion
from sfumato.refused import Refused

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

    def __init__(self, encode: Encode, before: str = "", after: str = "") -> None:
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
        self._tokens: dict[str, int | None] = {}
        self._chosen: dict[tuple[type[Question], int], tuple[Label, ...]] = {}

    def token(self, text: str) -> int | None:
        """The token of a label in this line; None where the label changes more than that one."""
        if text not in self._tokens:
            ids = self._encode(f"{self._before}{text}{self._after}")
            at = self.position
            same = len(ids) == len(self.ids)
            same = same and (*ids[:at], *ids[at + 1 :]) == (*self.ids[:at], *self.ids[at + 1 :])
            self._tokens[text] = ids[at] if same else None
        return self._tokens[text]

    def labels(self, question: Question) -> tuple[Label, ...]:
        """A label for each of the question's options, as `choose_labels` has it. They are chosen
        once for all questions of a kind and a number of options, since hundreds of texts may have
        to be tokenized for that; such questions get the same tuple."""
        key = type(question), len(question.options)
        if key not in self._chosen:
            self._chosen[key] = choose_labels(question, self)
        return self._chosen[key]

    def pair(self, text: str) -> tuple[int, int] | None:
        """The tokens of a label of two characters; None where they are not those that the
        characters have by themselves."""
        ids = self._encode(f"{self._before}{text}{self._after}")
        at = self.position
        alone = tuple(self.token(character) for character in text)
        rest = (*self.ids[:at], *self.ids[at + 1 :])
        if tuple(ids[at : at + 2]) != alone or (*ids[:at], *ids[at + 2 :]) != rest:
            return None
        return ids[at], ids[at + 1]


def choose_labels(question: Question, line: Line) -> tuple[Label, ...]:
    """A label for each option, in their order: words for yes and no and digits for up to ten
    levels, where these are one token each, else letters and what follows them.

    Where the vocabulary has too few labels of one token, as one of characters has for more than 94
    options, all labels have two.  Raises ValueError where it has too few of these as well.
    """
    count = len(question.options)
    if isinstance(question, YesNoQuestion):
        words = _labels(line, iter(("yes", "no")), 2)
    elif isinstance(question, ScoreQuestion) and count <= len(string.digits):
        words = _labels(line, iter(string.digits[:count]), count)
    else:
        words = ()
    if len(words) == count:
        return words
    labels = _labels(line, _candidates(), count)
    if len(labels) == count:
        return labels
    pairs = _pairs(line, count)
    if len(pairs) == count:
        return pairs
    raise ValueError(
        f"{count} options: this model's tokenizer has single tokens for {len(labels)} labels; ask "
        f"for at most {len(labels)} options"
    )


def _candidates() -> Iterator[str]:
    yield from string.ascii_uppercase
    yield from string.ascii_lowercase
    yield from map("".join, product(string.ascii_uppercase, repeat=2))
    yield from _OTHER


def _labels(line: Line, texts: Iterator[str], count: int) -> tuple[Label, ...]:
    """The first `count` of the texts that are labels of one token, all different."""
    chosen: dict[int, Label] = {}
    for text in texts:
        token = line.token(text)
        if token is not None and token not in chosen:
            chosen[token] = Label(text, (token,))
            if len(chosen) == count:
                break
    return tuple(chosen.values())


def _pairs(line: Line, count: int) -> tuple[Label, ...]:
    texts = map("".join, product(string.ascii_uppercase, repeat=2))
    tokens = ((text, line.pair(text)) for text in texts)
    return tuple(islice((Label(text, ids) for text, ids in tokens if ids is not None), count))
