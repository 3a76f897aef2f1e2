"""What the embedded model is trained and tested on: a stream of conversations as token ids.

Mixes Sudoku and questions into examples, cuts responses into canvases and collates batches; gives
the fixed sets that a trained model is measured with. Knows no noise, no loss and no network.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sfumato.embedded_questions import all_questions, first_asked
from sfumato.train import sudoku
from sfumato.train.questions import about_nothing, pick, wording
from sfumato.train.vocabulary import END_OF_TURN, EOS, PAD, encode_chat, encode_text

HISTORY_SHARE = 0.15
TWO_TURNS_SHARE = 0.2
"""Of the examples with a history, those with two earlier turns instead of one."""
SYSTEM_SHARE = 0.04
MADE_UP_SHARE = 0.06
"""Of the questions, those about a made-up word."""

_POOL_BATCHES = 16
_TRAINING_BLANKS = (4, 5, 6, 7, *2 * (8, 9, 10, 11, 12))
_SUDOKU_HEADINGS = (
    *17 * ("sudoku\n",),
    "Sudoku\n",
    "solve this sudoku\n",
    "Solve this Sudoku:\n",
    "",
)
_SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You are Sfumato's demo.")

Message = dict[str, str]


class Mixture(NamedTuple):
    """`sudoku`: share of Sudoku among the exchanges, the others being questions; `first_asked`:
    share of the questions that come from those which people ask first."""

    sudoku: float = 0.55
    first_asked: float = 0.0


EVEN = Mixture()


class Example(NamedTuple):
    """One conversation: everything up to the model's turn, and the turn with its `<turn|>`."""

    prompt_ids: list[int]
    response_ids: list[int]


class Batch(NamedTuple):
    """Rows for one training step, all int64.

    `context` [B, S]: the prompt and the earlier canvases of the response, padded on the right;
    `lengths` [B]: how much of each row of the context counts; `target` [B, canvas]: the canvas to
    denoise, filled with EOS after the end of the response.
    """

    context: torch.Tensor
    lengths: torch.Tensor
    target: torch.Tensor


class Evaluation(NamedTuple):
    """A conversation that ends with the user, and the one right reply."""

    messages: list[Message]
    expected: str


def _ask(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _exchange(rng: np.random.Generator, mixture: Mixture) -> tuple[str, str]:
    """A user's text and the answer, as training words them."""
    if rng.random() < mixture.sudoku:
        grid = pick(sudoku.split()[0], rng)
        cells = sudoku.puzzle(grid, pick(_TRAINING_BLANKS, rng), rng)
        text = pick(_SUDOKU_HEADINGS, rng) + sudoku.to_text(cells)
        return text, sudoku.to_text(sudoku.all_grids()[grid])
    if rng.random() < MADE_UP_SHARE:
        question = about_nothing(rng)
    elif rng.random() < mixture.first_asked:
        question = pick(first_asked(), rng)
    else:
        question = pick(all_questions(), rng)
    return wording(question, rng), question.answer


def sample(rng: np.random.Generator, mixture: Mixture = EVEN) -> Example:
    """One training example; depends on the generator's state alone."""
    messages: list[Message] = []
    if rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": pick(_SYSTEM_PROMPTS, rng)})
    if rng.random() < HISTORY_SHARE:
        for _ in range(2 if rng.random() < TWO_TURNS_SHARE else 1):
            text, answer = _exchange(rng, mixture)
            messages += [*_ask(text), {"role": "assistant", "content": answer}]
    text, answer = _exchange(rng, mixture)
    return Example(encode_chat(messages + _ask(text)), [*encode_text(answer), END_OF_TURN])


def canvas_rows(example: Example, canvas: int) -> list[tuple[list[int], list[int]]]:
    """(context, target) for each canvas of the response, the last one filled up with EOS."""
    prompt, response = example
    filled = response + [EOS] * (-len(response) % canvas)
    return [
        (prompt + filled[:start], filled[start : start + canvas])
        for start in range(0, len(filled), canvas)
    ]


def collate(rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """Stack (context, target) rows, with contexts padded to the longest."""
    lengths = [len(context) for context, _ in rows]
    context = [row + [PAD] * (max(lengths) - len(row)) for row, _ in rows]
    targets = [target for _, target in rows]
    return Batch(torch.tensor(context), torch.tensor(lengths), torch.tensor(targets))


def batches(
    rng: np.random.Generator,
    batch_size: int,
    canvas: int = 32,
    mixture: Callable[[int], Mixture] = lambda step: EVEN,
) -> Iterator[Batch]:
    """Training batches without end; the same ones for the same generator state.

    `mixture` is asked once for every pool, with the number of its first batch, from 0.

    Of each example one canvas, drawn evenly, makes a row. Rows of similar context length share a
    batch: a pool of 16 batches is sorted, cut, and given in random order.
    """
    for start in itertools.count(0, _POOL_BATCHES):
        mixed = mixture(start)
        examples = (sample(rng, mixed) for _ in range(batch_size * _POOL_BATCHES))
        rows = [pick(canvas_rows(example, canvas), rng) for example in examples]
        rows.sort(key=lambda row: len(row[0]))
        for i in rng.permutation(_POOL_BATCHES):
            yield collate(rows[i * batch_size : (i + 1) * batch_size])


def _held_out_puzzles(count: int, fewest: int, rng: np.random.Generator) -> list[Evaluation]:
    """Different puzzles of grids never trained on, with `fewest` to 12 blanks, evenly."""
    tasks: dict[str, Evaluation] = {}
    held_out = sudoku.split()[1]
    while len(tasks) < count:
        grid = pick(held_out, rng)
        blanks = int(rng.integers(fewest, sudoku.MAX_BLANKS + 1))
        text = sudoku.prompt(sudoku.puzzle(grid, blanks, rng))
        tasks[text] = Evaluation(_ask(text), sudoku.to_text(sudoku.all_grids()[grid]))
    return list(tasks.values())


def evaluation_sets(seed: int = 0, count: int = 200) -> dict[str, list[Evaluation]]:
    """Fixed tasks by name; the same for the same arguments.

    "sudoku": `count` puzzles of held-out grids with 4 to 12 blanks; "sudoku_hard": `count` with 10
    to 12; "questions": each one as written; "chat": 50 of those, half of them puzzles, after one
    earlier exchange.
    """
    rng = np.random.default_rng(seed)
    puzzles = _held_out_puzzles(count, sudoku.MIN_BLANKS, rng)
    hard = _held_out_puzzles(count, sudoku.HARD_BLANKS, rng)
    questions = [Evaluation(_ask(q.text), q.answer) for q in all_questions()]
    chat = []
    for i in range(50):
        earlier = pick(questions if rng.random() < 0.5 else puzzles, rng)
        last = pick((puzzles, questions)[i % 2], rng)
        history = [*earlier.messages, {"role": "assistant", "content": earlier.expected}]
        chat.append(Evaluation(history + last.messages, last.expected))
    return {"sudoku": puzzles, "sudoku_hard": hard, "questions": questions, "chat": chat}


def fixed_prompts(count: int = 200) -> list[Evaluation]:
    """A fixed mixture for measuring speed and quality: of each set in turn, in a fixed order."""
    rng = np.random.default_rng(count)
    sets = [[tasks[i] for i in rng.permutation(len(tasks))] for tasks in evaluation_sets().values()]
    return [sets[i % 4][i // 4 % len(sets[i % 4])] for i in range(count)]
