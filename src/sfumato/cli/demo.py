"""`sfumato demo`: the embedded model at work, for a user who has just installed the package."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.text import Text

import sfumato
from sfumato.cli import INTERRUPTED, generation, pictures
from sfumato.cli.display import GLOW, HAZE, SETTLED, CanvasDrawing, is_visual
from sfumato.cli.terminal import wrapped
from sfumato.engine import Request
from sfumato.media.part import data_of
from sfumato.media.picture import Limits, read_picture
from sfumato.server.examples import page_texts
from sfumato.train import sudoku

GIVEN, LINE = "bold cyan", "dim"
WIDTH, HEIGHT = 13, 7
_TOP, _MIDDLE, _BOTTOM = "┌─────┬─────┐", "├─────┼─────┤", "└─────┴─────┘"
_PLACES = [row * 5 + column for row in range(4) for column in range(4)]  # newlines between rows

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
        Text.assemble(("cyan", GIVEN), ": a given digit"),
        Text.assemble(("yellow", GLOW[0]), ": changed in the last steps"),
        Text.assemble(("dim", HAZE), ": not accepted yet, drawn again in the next step"),
        Text("plain: accepted (it may still change until its canvas is done)"),
    ]
)


def grid(cells: Sequence[tuple[str, str]]) -> list[Text]:
    """Sixteen characters with their styles, in lines."""
    lines = [Text(_TOP, LINE)]
    for row in range(4):
        line = Text("│ ", LINE)
        for column, (character, style) in enumerate(cells[4 * row : 4 * row + 4]):
            line.append(character, f"not dim {style}")
            line.append(" │ " if column in (1, 3) else " ", LINE)
        line.rstrip()
        lines += [line, Text(_MIDDLE, LINE)] if row == 1 else [line]
    return [*lines, Text(_BOTTOM, LINE)]


def puzzle_board(text: str) -> list[Text]:
    """A puzzle as the model reads it, in lines: its given digits distinct."""
    cells = text.replace("\n", "")
    return grid([("·", HAZE) if cell == "." else (cell, GIVEN) for cell in cells])


class BoardView(CanvasDrawing):
    """The canvas of a reply that solves a puzzle."""

    def __init__(self, decode: Callable[[list[int]], str], text: str) -> None:
        """text: the puzzle's four rows, with '.' where blank."""
        super().__init__(decode)
        self._text = text.replace("\n", "")

    def commit(
        self, text: str, width: int, thought: str = "", doubted: Sequence[range] = ()
    ) -> list[Text]:
        lines = super().commit(text, width, thought, doubted)
        rows = [line.plain for line in (*lines, self.carry)]
        if [len(row) for row in rows] != [4] * 4 or width < WIDTH:
            return lines
        self.carry = Text()
        cells = zip("".join(rows), self._text, strict=True)
        return grid([(c, GIVEN if c == given else SETTLED) for c, given in cells])

    def lines(self, width: int, height: int) -> list[Text]:
        if width < WIDTH or height < HEIGHT:
            return super().lines(width, height)
        if not self._ids:  # before the first draft
            return puzzle_board(self._text)
        cells = []
        pieces = self._pieces(self._ids)
        for given, place in zip(self._text, _PLACES, strict=True):
            piece = pieces[place]
            is_shown = len(piece) == 1 and piece.isprintable() and piece != " "
            style = GIVEN if piece == given else self._style(place)
            cells.append((piece if is_shown else "·", style))
        return grid(cells)


def main(args: argparse.Namespace) -> int:
    """Solve a puzzle that was kept out of training, answer questions, then decide."""
    model = sfumato.load()
    cells = _puzzle(args.seed)
    puzzle, first = sudoku.to_text(cells), _request(sudoku.prompt(cells), args.seed)
    engine = generation.engine(model, first)
    console = Console(highlight=False)
    _say(generation.TOYS["embedded"])
    _say("A hard Sudoku that was kept out of training:")
    console.print(*puzzle_board(puzzle), sep="\n")
    print()

    def ask(request: Request, view: CanvasDrawing | None = None) -> str | None:
        display = generation.display(args, model, slow=True, view=view)
        answer = generation.answer(engine, request, display)
        print()
        return None if answer.interrupted else answer.text

    visual = is_visual() and not args.no_visual
    if not visual:  # otherwise the solution appears in a grid of its own
        _say("The model's solution, row by row:")
    solution = ask(first, BoardView(model.tokenizer.decode, puzzle))
    if solution is None:
        return INTERRUPTED
    right = sudoku.is_solution(puzzle, solution)
    _say("Solved." if right else "Not solved: this one was too hard for so small a model.")
    for question in QUESTIONS:
        _say(f"› {question}")
        if ask(_request(question, args.seed)) is None:
            return INTERRUPTED
    _say("It reads pictures of digits and of Sudoku.")
    for words, image in _shown():
        _say(f"› {words}")
        pictures.show(image)
        about = pictures.content(words, [{"type": "image", "image": image}])
        if ask(_request(about, args.seed)) is None:
            return INTERRUPTED
    _say("It decides too: the probability of each answer, read in one step without writing.")
    wording = " ".join(kind.instructions for kind in DECISIONS.values())
    _say(f"› {STATE} {wording}")
    print(f"{model.decide(STATE, DECISIONS)}\n")
    if visual:
        console.print(Text("Colours: ") + COLOURS)
        print()
    print(wrapped('Your turn: sfumato run "…", sfumato chat, or -m PATH for a large model.'))
    return 0


def _say(text: str) -> None:
    """A paragraph, no word of which is broken."""
    print(wrapped(text) + "\n")


def _shown() -> Iterator[tuple[str, Image.Image]]:
    """Questions of the page's examples about a picture, and the picture."""
    for example in page_texts("embedded")["examples"]:
        match example["messages"][0]["content"]:
            case [{"image_url": {"url": url}}, {"text": words}]:
                yield words, read_picture(data_of(url, Limits().nbytes, "image"))


def _request(content: str | list[dict[str, Any]], seed: int) -> Request:
    return Request(messages=[{"role": "user", "content": content}], seed=seed, drafts=True)


def _puzzle(seed: int) -> sudoku.Cells:
    """One of the held-out grids with twelve cells blank."""
    rng = np.random.default_rng(FIRST + seed)
    _, held_out = sudoku.split()
    return sudoku.puzzle(int(rng.choice(held_out)), BLANKS, rng)
