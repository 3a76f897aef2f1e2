"""The decisions that the embedded model is trained and tested on, as rows of token ids.

A row is the product's own read: the prompt in the wording of
`diffusion/constraints/read_template.py`, and the pinned canvas of one question, whose slot holds a
random token.  Knows no loss and no network.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from sfumato.diffusion.constraints.questions import (
    Option,
    ScoreQuestion,
    YesNoQuestion,
)
from sfumato.diffusion.constraints.read_template import BETWEEN, question_text
from sfumato.train.canvas_rows import WORD, Reads, words_of
from sfumato.train.decision_states import (
    COLOURS,
    LEVELS_VOTED,
    MEANINGS,
    NAMES,
    OPEN,
    PRACTISED,
    PRACTISED_OPEN,
    SETTLED,
    STATUSES,
    Case,
    in_order,
)
from sfumato.train.embedded_data import ask, pick
from sfumato.train.vocabulary import END_OF_TURN, EOS, TOKENS, encode_chat, encode_text

PER_STATE = 3
"""Held-out questions about one state."""
WIDTH = 16
"""Positions of a canvas with one question: slot, end of turn, and EOS to the end."""

OPEN_SHARE = 0.5
HELD_OUT_IN = 8
"""One state in so many is kept out of training."""
BARE_SHARE = 0.1
"""Share of the choices that have no instructions."""
DESCRIBED_SHARE = 0.15
"""Share of the questions that say what their options mean, where these have a meaning."""

_SECOND = re.compile(r"(?:Were|Is) (\w+) (?:ordered|there)\?")
_LAST = re.compile(r"\b(?!hold\?)(\w+)\?")
_EVIDENCE = re.compile(
    r"the \w+ (?:was|is) (\w+)\.$|(?:lives in|is in|goes to) (.+)\.$|is (\d)(?:0 percent| in 10)"
    r"|with (\d) sides|(\d+) stars"
)
"""What decides in states where one word does."""
_OF_ONE = re.compile(r"many for (\w+)\?")
"""A question whose options do not name what it is about, as yes and no do not."""
_NUMBERS = re.compile(r" are for |One is")
"""Found in states that give each of several words a number, which stands before the word."""
_NUMBERED = {*NAMES, *COLOURS, *STATUSES, *LEVELS_VOTED[0], *LEVELS_VOTED[1]}
_TURN = encode_chat(ask("."))
_HEAD = _TURN[: _TURN.index(encode_text(".")[0])]
"""What comes before the state in a prompt."""


class Row(NamedTuple):
    """One read, and what training may tell about it."""

    state: list[int]  # ids of the prompt up to the state's end
    question: list[int]  # and after it; places below are places in it
    looks: dict[str, list[tuple[int, int]]]
    """"labels": where the options' lines end, and their labels are; and see _words, _evidence,
    _subjects and _numbers."""
    labels: list[int]  # ids that answer
    truth: list[float]  # the probability of each


def is_held_out(state: str) -> bool:
    """Whether no question about the state may be trained on."""
    return hashlib.sha256(state.encode()).digest()[0] % HELD_OUT_IN == 0


def draw(
    rng: np.random.Generator, count: int = 1, held_out: bool = False, open_share: float = OPEN_SHARE
) -> list[Case]:
    """`count` questions about one state of the one part or the other; where the state leaves them
    open, all probabilities lie between 0.1 and 0.9, but those of 0 in training."""
    open_families, settled = (OPEN, SETTLED) if held_out else (PRACTISED_OPEN, PRACTISED)
    families = open_families if rng.random() < open_share else settled
    while True:
        family, seed = pick(families, rng), int(rng.integers(2**32))
        cases = []
        for _ in range(count):
            case = family(np.random.default_rng(seed), rng)
            if is_held_out(case.state) != held_out:
                break
            given = case.truth if held_out else [p for p in case.truth if p]
            if all(0.1 < p < 0.9 for p in given) or not case.open:
                cases.append(_worded(case, rng))
        if len(cases) == count:
            return cases


def _worded(case: Case, rng: np.random.Generator) -> Case:
    """Sometimes with the meanings of its options, sometimes without instructions."""
    question = case.question
    if isinstance(question, ScoreQuestion):
        return case
    if isinstance(question, YesNoQuestion):
        # What an instruction asks can also stand as the meaning of "yes".
        if rng.random() < BARE_SHARE:
            question = YesNoQuestion(yes=question.instructions)
        return replace(case, question=question)
    if rng.random() < DESCRIBED_SHARE:
        options = tuple(Option(o.name, MEANINGS.get(o.name, "")) for o in question.options)
        question = replace(question, options=options)
    if not case.open and rng.random() < BARE_SHARE:
        question = replace(question, instructions="")
    return replace(case, question=question)


def shuffled(case: Case, rng: np.random.Generator) -> Case:
    """The same question with its options in any order, all as likely; levels keep theirs."""
    return in_order(case, [int(i) for i in rng.permutation(len(case.truth))])


def labels_of(case: Case) -> tuple[str, ...]:
    """Digits for up to ten levels, otherwise letters: what the product takes in this vocabulary."""
    count = len(case.truth)
    is_digits = isinstance(case.question, ScoreQuestion) and count <= len(string.digits)
    return tuple((string.digits if is_digits else string.ascii_uppercase)[:count])


def row(case: Case) -> Row:
    """The read of a case, its options in their order."""
    labels = labels_of(case)
    text = case.state + BETWEEN + question_text(case.question, labels)
    context = encode_chat(ask(text))
    end = len(_HEAD) + len(case.state)
    body = text[len(case.state) :]
    lines = body[len(BETWEEN) :].split("\n")
    ends = [*itertools.accumulate((len(line) + 1 for line in lines), initial=len(BETWEEN) - 1)]
    options = [end - 1 for end in ends[2 : 2 + len(labels)]]
    starts = [end + 1 for end in ends[1 : 1 + len(labels)]]
    names_none = case.kind == "yes_no" or _OF_ONE.search(body)
    looks = {
        "labels": list(zip(options, starts, strict=True)),
        "words": _words(case.state, body[: options[-1] + 1]),
        "evidence": _evidence(case, body, options),
        "subjects": _subjects(body, options) if names_none else [],
        "numbers": _numbers(case.state),
    }
    ids = encode_text("".join(labels))
    return Row(context[:end], context[end:], looks, ids, list(case.truth))


def _words(state: str, body: str) -> list[tuple[int, int]]:
    """Where each word of the question and its options ends in `body`, and where the word ends in
    the state's part of the prompt, or 0, the prompt's first token, where the state lacks it.
    Labels are left out, and words that the state has several times or in another case only."""
    places = words_of(state)
    other_case = {word.lower() for word in places}
    matches = []
    for match in WORD.finditer(body):
        word, is_label = match[0], body[match.end() : match.end() + 1] == ":"
        in_state = places.get(word, [])
        if is_label or len(in_state) > 1 or (not in_state and word.lower() in other_case):
            continue
        place = len(_HEAD) + in_state[0].end() - 1 if in_state else 0
        matches.append((match.end() - 1, place))
    return matches


def _evidence(case: Case, body: str, options: list[int]) -> list[tuple[int, int]]:
    """Where options' lines end, and for yes and no the word that the question is about, each with
    where in the state's part of the prompt the word ends that decides. Where the question says
    which word does: none."""
    evidence = _EVIDENCE.search(case.state)
    if evidence is None:
        return []
    place = len(_HEAD) + evidence.end(evidence.lastindex or 0) - 1
    ends = [*options, _subject(body).end(1) - 1] if case.kind == "yes_no" else options
    return [(end, place) for end in ends]


def _numbers(state: str) -> list[tuple[int, int]]:
    """Where, in the state's part of the prompt, each word ends that the state gives a number, and
    where the number ends."""
    if not _NUMBERS.search(state):
        return []
    words = [word for word in WORD.finditer(state) if word[0] in _NUMBERED]
    ends = {number.end() for number in re.finditer(r"\d", state)}
    return [
        (len(_HEAD) + word.end() - 1, len(_HEAD) + max(end for end in ends if end < word.end()) - 1)
        for word in words
    ]


def _subject(body: str) -> re.Match[str]:
    """The word that a yes/no question is about: its last one, or its second one in those of
    _SECOND."""
    word = _SECOND.search(body) or _LAST.search(body)
    assert word is not None, body
    return word


def _subjects(body: str, options: list[int]) -> list[tuple[int, int]]:
    """Where options' lines end, each with where the word ends that the question is about, if that
    is before."""
    word = _subject(body)
    return [(end, word.end(1) - 1) for end in options if end > word.end(1)]


def sample(rng: np.random.Generator, count: int) -> list[Row]:
    """The training rows of one state; they depend on the generator's state alone."""
    return [row(shuffled(case, rng)) for case in draw(rng, count)]


def collate(groups: Sequence[Sequence[Row]], rng: np.random.Generator) -> Reads:
    """Pack groups of rows that share a state, with noise in the slots: any token of the vocabulary
    but the row's labels."""
    rows = [row for group in groups for row in group]
    truth = torch.zeros(len(rows), len(TOKENS))
    canvas = torch.full((len(rows), WIDTH), EOS)
    canvas[:, 1] = END_OF_TURN
    for i, one in enumerate(rows):
        truth[i, one.labels] = torch.tensor(one.truth)
        canvas[i, 0] = pick([token for token in range(len(TOKENS)) if token not in one.labels], rng)
    firsts = [group[0] for group in groups]
    states = [one.state for one in firsts]
    questions = [row.question for row in rows]
    return Reads(
        torch.tensor([*itertools.chain(*states, *questions)]),
        torch.tensor(list(map(len, states))),
        torch.tensor(list(map(len, questions))),
        torch.tensor([i for i, group in enumerate(groups) for _ in group]),
        canvas,
        truth,
        torch.tensor([p for row in rows for p in row.truth], dtype=torch.float32),
        {
            name: _triples([one.looks[name] for one in (firsts if name == "numbers" else rows)])
            for name in rows[0].looks
        },
    )


def _triples(pairs: Sequence[Sequence[tuple[int, int]]]) -> torch.Tensor:
    """int64 [n, 3]: the number of a row and one of its pairs."""
    triples = [(i, *pair) for i, some in enumerate(pairs) for pair in some]
    return torch.tensor(triples, dtype=torch.int64).view(-1, 3)


def batches(rng: np.random.Generator, states: int, questions: int) -> Iterator[Reads]:
    """Training batches without end, of so many states with so many questions each; the same ones
    for the same generator state."""
    while True:
        yield collate([sample(rng, questions) for _ in range(states)], rng)


def held_out(seed: int = 0, count: int = 600) -> list[Case]:
    """Fixed questions about states never trained on, a third of them left open by their state; the
    same for the same arguments. Those about one state, up to PER_STATE, stand together."""
    rng = np.random.default_rng(seed)
    cases: list[Case] = []
    for number in range(-(-count // PER_STATE)):
        drawn = draw(rng, PER_STATE, held_out=True, open_share=float(number % 3 == 0))
        # Yes comes before no, as the product has it.
        cases += [
            case if isinstance(case.question, YesNoQuestion) else shuffled(case, rng)
            for case in drawn
        ]
    return cases[:count]
