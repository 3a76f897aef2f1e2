"""`sfumato demo`: the embedded model at work, for somebody who has just installed it."""

from __future__ import annotations

import argparse

import numpy as np

import sfumato
from sfumato.cli import INTERRUPTED, generation
from sfumato.engine import Request
from sfumato.train import sudoku

BLANKS = 10
PAUSE_S = 0.15  # a draft of so small a model is gone before the eye has seen it
QUESTIONS = (
    "Who are you?",
    "How do you work?",
    "What is the capital of Japan?",
    "What is the meaning of life?",
)


def main(args: argparse.Namespace) -> int:
    """Solve a puzzle that was kept out of training, then answer questions."""
    model = sfumato.load()
    generation.spare_threads(model)
    puzzle = _puzzle(args.seed)
    first = _request(sudoku.prompt(puzzle), args.seed)
    engine = generation.engine(model, first)
    print("A Sudoku that was kept out of training:\n")
    print(sudoku.to_text(puzzle) + "\n")

    def ask(request: Request) -> str | None:
        answer = generation.answer(engine, request, generation.display(args, model, PAUSE_S))
        print()
        return None if answer.interrupted else answer.text

    solution = ask(first)
    if solution is None:
        return INTERRUPTED
    right = sudoku.is_solution(sudoku.to_text(puzzle), solution)
    print("Solved.\n" if right else "Not solved: this one was too hard for so small a model.\n")
    for question in QUESTIONS:
        print(f"› {question}\n")
        if ask(_request(question, args.seed)) is None:
            return INTERRUPTED
    print('Your turn: sfumato run "…", sfumato chat, or -m PATH for a large model.')
    return 0


def _request(text: str, seed: int) -> Request:
    return Request(messages=[{"role": "user", "content": text}], seed=seed, drafts=True)


def _puzzle(seed: int) -> sudoku.Cells:
    """One of the held-out grids with ten cells blank."""
    rng = np.random.default_rng(seed)
    _, held_out = sudoku.split()
    return sudoku.puzzle(int(rng.choice(held_out)), BLANKS, rng)
