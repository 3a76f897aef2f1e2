"""`sfumato demo`: the embedded model at work, for a user who has just installed the package."""

from __future__ import annotations

import argparse

import numpy as np
from rich.console import Console
from rich.text import Text

import sfumato
from sfumato.cli import INTERRUPTED, embedded, generation
from sfumato.cli.notes import wrapped
from sfumato.cli.view import board, canvas
from sfumato.cli.view.display import is_visual
from sfumato.engine import Request
from sfumato.train import sudoku

BLANKS = 12  # as many as a puzzle with one solution can have
FIRST = 117  # of the first 150 puzzles, the one that takes the most steps (6, with seed 0)
QUESTIONS = (
    "Who are you?",
    "How do you work?",
    "What is the capital of Japan?",
    "What is the meaning of life?",
)
STATE = "A bag holds 2 red and 8 green balls. One is drawn."  # kept out of training
DECISIONS: dict[str, sfumato.YesNo | sfumato.Choice] = {
    "red": sfumato.YesNo("Is it red?"),
    "colour": sfumato.Choice(("green", "blue", "red"), "Which colour is it?"),
}
COLOURS = Text("; ").join(
    [
        Text.assemble(("cyan", board.GIVEN), ": a given digit"),
        Text.assemble(("yellow", canvas.GLOW[0]), ": changed in the last steps"),
        Text.assemble(("dim", canvas.HAZE), ": not accepted yet, drawn again in the next step"),
        Text("plain: accepted (it may still change until its canvas is done)"),
    ]
)


def main(args: argparse.Namespace) -> int:
    """Solve a puzzle that was kept out of training, answer questions, then decide."""
    model = sfumato.load()
    cells = _puzzle(args.seed)
    puzzle, first = sudoku.to_text(cells), _request(sudoku.prompt(cells), args.seed)
    engine = generation.engine(model, first)
    console = Console(highlight=False)
    print(wrapped(embedded.TOY) + "\n\nA hard Sudoku that was kept out of training:\n")
    console.print(*board.puzzle(puzzle), sep="\n")
    print()

    def ask(request: Request, view: canvas.CanvasDrawing | None = None) -> str | None:
        display = generation.display(args, model, slow=True, view=view)
        answer = generation.answer(engine, request, display)
        print()
        return None if answer.interrupted else answer.text

    visual = is_visual() and not args.no_visual
    if not visual:  # otherwise the solution appears in a grid of its own
        print("The model's solution, row by row:\n")
    solution = ask(first, board.BoardView(model.tokenizer.decode, puzzle))
    if solution is None:
        return INTERRUPTED
    right = sudoku.is_solution(puzzle, solution)
    print("Solved.\n" if right else "Not solved: this one was too hard for so small a model.\n")
    for question in QUESTIONS:
        print(f"› {question}\n")
        if ask(_request(question, args.seed)) is None:
            return INTERRUPTED
    _decide(model)
    if visual:
        console.print(Text("Colours: ") + COLOURS)
        print()
    print(wrapped('Your turn: sfumato run "…", sfumato chat, or -m PATH for a large model.'))
    return 0


def _decide(model: sfumato.Model) -> None:
    print("It decides too: the probability of each answer, read in one step without writing.\n")
    questions = " ".join(kind.instructions for kind in DECISIONS.values())
    print(f"› {STATE} {questions}\n\n{model.decide(STATE, DECISIONS)}\n")


def _request(text: str, seed: int) -> Request:
    return Request(messages=[{"role": "user", "content": text}], seed=seed, drafts=True)


def _puzzle(seed: int) -> sudoku.Cells:
    """One of the held-out grids with twelve cells blank."""
    rng = np.random.default_rng(FIRST + seed)
    _, held_out = sudoku.split()
    return sudoku.puzzle(int(rng.choice(held_out)), BLANKS, rng)
