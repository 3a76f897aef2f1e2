"""Replies whose canvas begins as a given text, right or wrong, as a prediction has it.

Knows no noise, no loss and no network.
"""

from __future__ import annotations

import string

import numpy as np

from sfumato.embedded_questions import all_questions
from sfumato.train import sudoku
from sfumato.train.canvas_rows import CanvasRow
from sfumato.train.questions import pick, wording
from sfumato.train.vocabulary import END_OF_TURN, EOS, encode_chat, encode_text

SUDOKU_SHARE = 0.8
RIGHT_SHARE = 0.25


def row(rng: np.random.Generator, canvas: int) -> CanvasRow:
    """The first canvas of a reply that begins as a prediction."""
    if rng.random() < SUDOKU_SHARE:
        trained = sudoku.split()[0]
        grid = pick(trained, rng)
        cells = sudoku.puzzle(grid, pick((8, 9, 10, *2 * (11, 12)), rng), rng)
        request, answer = sudoku.prompt(cells), sudoku.to_text(sudoku.all_grids()[grid])
        given = sudoku.to_text(sudoku.all_grids()[pick(trained, rng)])
    else:
        question = pick(all_questions(), rng)
        request, answer = wording(question, rng), question.answer
        other = pick(all_questions(), rng).answer
        given = other if rng.random() < 0.5 else changed(answer, rng)
    if rng.random() < RIGHT_SHARE:
        given = answer
    prompt = encode_chat([{"role": "user", "content": request}])
    return CanvasRow("predicted", prompt, _canvas(answer, canvas), start=_canvas(given, canvas))


def changed(text: str, rng: np.random.Generator) -> str:
    """The text with up to two of its letters left out, put in or exchanged at one place."""
    at, count = int(rng.random() * len(text)), 1 + int(rng.random() * 2)
    letters = "".join(pick(string.ascii_lowercase, rng) for _ in range(count))
    kind = int(rng.random() * 3)
    if kind == 0:
        return text[:at] + text[at + count :]
    return text[:at] + letters + text[at if kind == 1 else at + count :]


def _canvas(text: str, length: int) -> list[int]:
    ids = [*encode_text(text), END_OF_TURN]
    return [*ids, *[EOS] * (length - len(ids))][:length]
