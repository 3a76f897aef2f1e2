"""Rows and batches of training: a canvas after its prefix, some of it pinned or begun as another
text.

Knows no task, no noise, no loss and no network.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sfumato.train.vocabulary import END_OF_TURN, EOS, PAD, TOKENS

KINDS = ("sudoku", "questions", "fill", "json", "predicted", "chat")
COPYING = ("fill", "json")
"""Kinds whose texts repeat words of their prompts."""
WORD = re.compile(r"[A-Za-z0-9]+")
_POOL_BATCHES = 16


class CanvasRow(NamedTuple):
    """One canvas to denoise."""

    kind: str  # of KINDS
    prefix: list[int]
    target: list[int]  # the clean canvas
    open: list[bool] | None = None  # positions that are not pinned; None: all
    start: list[int] | None = None  # what it begins as where that is no noise; None: the target
    prompt: int | None = None  # how much of the prefix is no part of the text; None: all
    behind: list[int] | None = None  # of the context, behind the prefix; None: the target's text

    @property
    def text(self) -> list[int]:
        """What the context has behind the prefix: the target without its filler, an end token
        included."""
        if self.behind is not None:
            return self.behind
        end = self.target.index(END_OF_TURN) + 1 if END_OF_TURN in self.target else None
        return self.target[:end]


class CanvasBatch(NamedTuple):
    """Rows for one training step, integers int64.

    `context` [B, S]: each row's prefix and the text of its canvas, padded on the right; `lengths`
    [B]: of the prefixes; `replies` and `prompts` bool [B, S - 1]: where the context's next token is
    of a text or of a prompt; of the canvases, padded to the widest: `target` and `start` [B, C],
    `filled` and `open` bool [B, C]: positions that there are, and of these those that are not
    pinned; `kinds` [B]: index in KINDS; `copies` [N, 3]: row, place in its context of a token that
    repeats one of the prompt, and that one's place.
    """

    context: torch.Tensor
    lengths: torch.Tensor
    replies: torch.Tensor
    prompts: torch.Tensor
    target: torch.Tensor
    start: torch.Tensor
    filled: torch.Tensor
    open: torch.Tensor
    kinds: torch.Tensor
    copies: torch.Tensor

    def prefixes(self) -> CanvasBatch:
        """The same without the texts of the canvases in the contexts: all tokens there are of
        prompts."""
        width = int(self.lengths.max())
        real = torch.arange(width) < self.lengths[:, None]
        prompts, none = real[:, 1:], torch.zeros(len(real), width - 1, dtype=torch.bool)
        context = self.context[:, :width].where(real, PAD)
        return self._replace(context=context, replies=none, prompts=prompts)

    def to(self, device: torch.device) -> CanvasBatch:
        """The same on a device."""
        return CanvasBatch(*(each.to(device) for each in self))


class Reads(NamedTuple):
    """Reads for one training step, those of a state together, packed without pads.

    Integers are int64. Of G states and N questions with O options:
    """

    ids: torch.Tensor  # [tokens]: all states, then all questions
    states: torch.Tensor  # [G]: their lengths
    questions: torch.Tensor  # [N]: their lengths
    owner: torch.Tensor  # [N]: each question's state
    canvas: torch.Tensor  # [N, width]: the first position is the slot
    truth: torch.Tensor  # float32 [N, vocabulary]: what the slot should predict
    fits: torch.Tensor  # float32 [O]: the probability of each option
    looks: dict[str, torch.Tensor]
    """[n, 3] each: question, a place in it, and where it should look. "labels": where each option's
    line ends, and where in the question its label is; "words": where a word ends,
    and in the state, or 0; "evidence": where in the state what decides ends; "subjects": where yes
    or no ends, and in the question what is asked does; "numbers": state, where in it a word ends,
    and where its number does."""


def pooled(
    rng: np.random.Generator,
    batch_size: int,
    draw: Callable[[int], CanvasRow],
    length: Callable[[CanvasRow], int],
) -> Iterator[CanvasBatch]:
    """Training batches without end, of rows of similar length; the same ones for the same generator
    state. A pool of batches is sorted, cut, and given in random order. draw: a row, for the number
    of its pool's first batch."""
    for first in itertools.count(0, _POOL_BATCHES):
        rows = sorted((draw(first) for _ in range(batch_size * _POOL_BATCHES)), key=length)
        for i in rng.permutation(_POOL_BATCHES):
            yield collate(rows[i * batch_size : (i + 1) * batch_size])


def collate(rows: Sequence[CanvasRow]) -> CanvasBatch:
    """Stack rows, with contexts and canvases padded to the longest."""
    contexts = [row.prefix + row.text for row in rows]
    longest, widest = max(map(len, contexts)), max(len(row.target) for row in rows)
    lengths = torch.tensor([len(row.prefix) for row in rows])
    ends = torch.tensor(list(map(len, contexts)))
    replies = torch.tensor([len(row.prefix) if row.prompt is None else row.prompt for row in rows])
    places = torch.arange(1, longest)
    is_text = places < ends[:, None]
    is_reply = is_text & (places >= replies[:, None])
    return CanvasBatch(
        padded(contexts, longest, PAD),
        lengths,
        is_reply,
        is_text & ~is_reply,
        padded([row.target for row in rows], widest, EOS),
        padded([row.start or row.target for row in rows], widest, EOS),
        padded([[True] * len(row.target) for row in rows], widest, False),
        padded([row.open or [True] * len(row.target) for row in rows], widest, False),
        torch.tensor([KINDS.index(row.kind) for row in rows]),
        torch.tensor(
            [(i, *pair) for i, row in enumerate(rows) for pair in copies(row)], dtype=torch.int64
        ).view(-1, 3),
    )


def copies(row: CanvasRow) -> Iterator[tuple[int, int]]:
    """Where a row's context has the letters of a word that its prompt has once, and where the
    prompt has them."""
    if row.kind not in COPYING:
        return
    # One character for each token, so that places in the string are those of the tokens.
    context = "".join(TOKENS[i] if len(TOKENS[i]) == 1 else "\n" for i in row.prefix + row.text)
    end = len(row.prefix) if row.prompt is None else row.prompt
    sources = words_of(context[:end])
    for word in WORD.finditer(context, end):
        places = sources.get(word[0], ())
        if len(places) == 1:
            yield from zip(range(*word.span()), range(*places[0].span()), strict=True)


def words_of(text: str) -> dict[str, list[re.Match[str]]]:
    """Where each word of the text stands."""
    words: dict[str, list[re.Match[str]]] = {}
    for word in WORD.finditer(text):
        words.setdefault(word[0], []).append(word)
    return words


def padded(
    rows: Sequence[Sequence[int] | Sequence[bool]], width: int, pad: int | bool
) -> torch.Tensor:
    """[rows, width], filled up on the right."""
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
