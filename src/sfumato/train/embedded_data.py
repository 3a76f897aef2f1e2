"""What the embedded model is trained and tested on: a stream of conversations as token ids.

Words questions as people may, mixes them with Sudoku into examples, and cuts responses into
canvases; gives the fixed sets that a trained model is measured with. Knows no noise, no loss and no
network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from sfumato.embedded_questions import (
    Question,
    all_questions,
    countries,
    first_asked,
    questions_file,
)
from sfumato.train import sudoku
from sfumato.train.canvas_rows import CanvasBatch, CanvasRow, pooled
from sfumato.train.vocabulary import END_OF_TURN, EOS, GEMMA, TextSide, encode_chat, encode_text

HISTORY_SHARE = 0.15
TWO_TURNS_SHARE = 0.2
"""Share of two earlier turns, instead of one, among the examples with a history."""
SYSTEM_SHARE = 0.04
MADE_UP_SHARE = 0.06
"""Share of questions about a made-up word."""
FIRST_ASKED = 0.1
"""Share of those that people ask first among the questions of conversations, in later stages."""

_FINAL_MARKS = "?!."
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
_Choice = TypeVar("_Choice")


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


class Evaluation(NamedTuple):
    """A conversation that ends with the user, and the one right reply."""

    messages: list[dict[str, Any]]
    expected: str


def pick(choices: Sequence[_Choice], rng: np.random.Generator) -> _Choice:
    """One of the choices, evenly; many times faster than Generator.choice."""
    return choices[int(rng.random() * len(choices))]


def ask(text: str) -> list[Message]:
    """A conversation of one user's message."""
    return [{"role": "user", "content": text}]


def wording(question: Question, rng: np.random.Generator) -> str:
    """The question as a user might type it: other words, case, politeness, end."""
    text = pick(question.also, rng) if question.also and rng.random() < 0.5 else question.text
    if rng.random() < 0.3:
        text = text.rstrip(_FINAL_MARKS)
    polite = rng.random()
    if polite < 0.1 and not question.text.endswith("!"):
        bare = text.rstrip(_FINAL_MARKS)
        last = f"{bare}, please{text[len(bare) :]}"
        text = last if polite < 0.05 else f"Please {text[0].lower()}{text[1:]}"
    case = rng.random()
    if case < 0.35:
        return text.lower()
    return text[0].upper() + text[1:] if case < 0.7 else text


def about_nothing(rng: np.random.Generator) -> Question:
    """A question about a made-up word, so that the model learns to say that it does not know."""
    known = {country["name"].lower() for country in countries()}
    name = ""
    while not name or name in known:
        syllables = 2 + int(rng.random() * 2)
        name = "".join(pick("bdfgklmnprstvz", rng) + pick("aeiou", rng) for _ in range(syllables))
        name += pick(("", "", "n", "s", "r"), rng)
    forms = [form["question"] for form in questions_file()["about_countries"]]
    form = pick([*forms, "What is {name}?", "Who is {name}?", "Where is {name}?", "{name}"], rng)
    return Question(form.format(name=name.capitalize()), questions_file()["unknown"])


def trained_sudoku(blanks: Sequence[int], rng: np.random.Generator) -> tuple[sudoku.Cells, str]:
    """A puzzle with one of these numbers of blanks, of a grid that is not held out, and its
    solution as a text."""
    grid = pick(sudoku.split()[0], rng)
    cells = sudoku.puzzle(grid, pick(blanks, rng), rng)
    return cells, sudoku.to_text(sudoku.all_grids()[grid])


def _exchange(rng: np.random.Generator, mixture: Mixture) -> tuple[str, str]:
    """A user's text and the answer, as training words them."""
    if rng.random() < mixture.sudoku:
        cells, solved = trained_sudoku(_TRAINING_BLANKS, rng)
        return pick(_SUDOKU_HEADINGS, rng) + sudoku.to_text(cells), solved
    if rng.random() < MADE_UP_SHARE:
        question = about_nothing(rng)
    elif rng.random() < mixture.first_asked:
        question = pick(first_asked(), rng)
    else:
        question = pick(all_questions(), rng)
    return wording(question, rng), question.answer


def conversation(rng: np.random.Generator, mixture: Mixture = EVEN) -> list[Message]:
    """One conversation, which ends with the answer; depends on the generator's state alone."""
    messages: list[Message] = []
    if rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": pick(_SYSTEM_PROMPTS, rng)})
    turns = 1
    if rng.random() < HISTORY_SHARE:
        turns = 3 if rng.random() < TWO_TURNS_SHARE else 2
    for _ in range(turns):
        text, answer = _exchange(rng, mixture)
        messages += [*ask(text), {"role": "assistant", "content": answer}]
    return messages


def sample(rng: np.random.Generator, mixture: Mixture = EVEN, side: TextSide = GEMMA) -> Example:
    """A conversation as a training example."""
    *messages, answer = conversation(rng, mixture)
    return Example(encode_chat(messages, side), [*encode_text(answer["content"]), END_OF_TURN])


def canvases(example: Example, canvas: int) -> list[tuple[list[int], list[int]]]:
    """(context, target) for each canvas of the response, the last one filled up with EOS."""
    prompt, response = example
    filled = response + [EOS] * (-len(response) % canvas)
    return [
        (prompt + filled[:start], filled[start : start + canvas])
        for start in range(0, len(filled), canvas)
    ]


def batches(
    rng: np.random.Generator,
    batch_size: int,
    canvas: int = 32,
    mixture: Callable[[int], Mixture] = lambda step: EVEN,
    side: TextSide = GEMMA,
) -> Iterator[CanvasBatch]:
    """Training batches without end: one canvas, drawn evenly, of each example makes a row.
    mixture: asked with the number of the first batch of a row's pool, from 0."""
    return pooled(
        rng,
        batch_size,
        lambda first: CanvasRow(
            "questions", *pick(canvases(sample(rng, mixture(first), side), canvas), rng)
        ),
        lambda row: len(row.prefix),
    )


def _held_out_puzzles(count: int, fewest: int, rng: np.random.Generator) -> list[Evaluation]:
    """Different puzzles of grids never trained on, with `fewest` to 12 blanks, evenly."""
    tasks: dict[str, Evaluation] = {}
    held_out = sudoku.split()[1]
    while len(tasks) < count:
        grid = pick(held_out, rng)
        blanks = int(rng.integers(fewest, sudoku.MAX_BLANKS + 1))
        text = sudoku.prompt(sudoku.puzzle(grid, blanks, rng))
        tasks[text] = Evaluation(ask(text), sudoku.to_text(sudoku.all_grids()[grid]))
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
    questions = [Evaluation(ask(q.text), q.answer) for q in all_questions()]
    chat = []
    for i in range(50):
        earlier = pick(questions if rng.random() < 0.5 else puzzles, rng)
        last = pick((puzzles, questions)[i % 2], rng)
        history: list[dict[str, Any]] = [
            *earlier.messages,
            {"role": "assistant", "content": earlier.expected},
        ]
        chat.append(Evaluation(history + last.messages, last.expected))
    return {"sudoku": puzzles, "sudoku_hard": hard, "questions": questions, "chat": chat}
