"""9 x 9 Sudoku as a task to tune a model for: boards to learn, a base of the embedded
architecture, and a checker.

    .venv/bin/python -m benchmarks.sudoku9 make data
    .venv/bin/python -m benchmarks.sudoku9 base base9
    .venv/bin/sfumato tune -m base9 --full --dtype float32 --data data/train.jsonl --out run9 …
    .venv/bin/python -m benchmarks.sudoku9 measure run9/model --data data/held_out.jsonl
    .venv/bin/python -m benchmarks.sudoku9 draw run9 docs/sudoku9.svg

docs/tuning.md has all settings.  A training board is one of a pool of puzzles with one solution,
with its digits, rows, columns, bands and stacks exchanged: each puzzle of the pool has 1.2e12
looks.  The held-out boards come from other grids; that an exchange makes one of them of the pool's
is possible and unlikely, since there are 5.5e9 kinds of grid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sfumato import load
from sfumato.bench import evaluate
from sfumato.catalog import EMBEDDED
from sfumato.svg import Point, curves
from sfumato.train import recipe, sudoku
from sfumato.train.embedded_data import Evaluation, ask
from sfumato.train.run_folder import CURVES
from sfumato.train.sudoku import Cells

SIDE, BOX = 9, 3
CANVAS = 96  # nine rows of nine, eight newlines, the end of the turn
MEAN = 20  # steps of one point of the curve
MOST_BLANKS = 50
"""Of a board that digging reaches nearly always; the fewest digits that a board can have are 17."""
DIAGONAL = list(sudoku.units(SIDE)[-SIDE::4])


class Board(NamedTuple):
    """A puzzle, uint8 [81] with 0 where blank, and its only solution."""

    puzzle: Cells
    solution: Cells


def new_grid(rng: np.random.Generator) -> Cells:
    """A solution: three boxes that do not see each other at random, and what completes them."""
    cells = np.zeros(SIDE * SIDE, np.uint8)
    for box in DIAGONAL:
        cells[box] = rng.permutation(SIDE) + 1
    return next(sudoku.solutions(cells))


def new_board(blanks: int, rng: np.random.Generator) -> Board:
    """A board with one solution, and so many blanks or, where digging ends before, fewer."""
    solution = new_grid(rng)
    puzzle = solution.copy()
    for cell in rng.permutation(len(puzzle)):
        if (puzzle == 0).sum() == blanks:
            break
        puzzle[cell] = 0
        if len(list(islice(sudoku.solutions(puzzle), 2))) > 1:
            puzzle[cell] = solution[cell]
    return Board(puzzle, solution)


def exchanged(board: Board, rng: np.random.Generator) -> Board:
    """The board with digits, rows within bands, bands, columns within stacks, stacks, and now and
    then rows and columns exchanged."""
    digits = np.concatenate(([0], rng.permutation(SIDE) + 1)).astype(np.uint8)
    order = [
        np.concatenate([BOX * band + rng.permutation(BOX) for band in rng.permutation(BOX)])
        for _ in "rc"
    ]
    turned = rng.random() < 0.5

    def made(cells: Cells) -> Cells:
        square = digits[cells].reshape(SIDE, SIDE)[np.ix_(*order)]
        return np.ascontiguousarray(square.T if turned else square).ravel()

    return Board(made(board.puzzle), made(board.solution))


def eased(board: Board, blanks: int, rng: np.random.Generator) -> Board:
    """The board with digits of the solution given until so many blanks are left."""
    empty = np.flatnonzero(board.puzzle == 0)
    given = rng.permutation(empty)[: max(0, len(empty) - blanks)]
    puzzle = board.puzzle.copy()
    puzzle[given] = board.solution[given]
    return Board(puzzle, board.solution)


def boards(
    pool: Sequence[Board], fewest: int, most: int, rng: np.random.Generator
) -> Iterator[Board]:
    """Boards without end, with numbers of blanks drawn evenly."""
    while True:
        board = exchanged(pool[int(rng.integers(len(pool)))], rng)
        yield eased(board, int(rng.integers(fewest, most + 1)), rng)


def chat(board: Board) -> dict[str, list[dict[str, str]]]:
    """The board as a line of data."""
    answer = {"role": "assistant", "content": sudoku.to_text(board.solution)}
    return {"messages": [*ask(sudoku.prompt(board.puzzle)), answer]}


def make(args: argparse.Namespace) -> None:
    args.folder.mkdir(parents=True, exist_ok=True)
    for number, (name, count) in enumerate((("train", args.train), ("held_out", args.held_out))):
        rng = np.random.default_rng((args.seed, number))
        size = args.pool if name == "train" else count
        pool = [new_board(args.most, rng) for _ in range(size)]
        drawn = islice(boards(pool, args.fewest, args.most, rng), count)
        lines = "".join(json.dumps(chat(board)) + "\n" for board in drawn)
        (args.folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{args.folder / name}.jsonl: {count} boards of {size} grids")


def base(args: argparse.Namespace) -> None:
    """The packaged model's weights, with canvases that hold a whole board."""
    network = recipe.load_weights(EMBEDDED)
    network.config = replace(network.config, canvas_length=CANVAS)
    recipe.save_checkpoint(network, args.folder)


def measure(args: argparse.Namespace) -> None:
    """Answers held-out boards, and prints how many are right by number of blanks."""
    lines = args.data.read_text(encoding="utf-8").splitlines()[: args.count]
    tasks = [
        Evaluation(messages[:-1], messages[-1]["content"])
        for messages in (json.loads(line)["messages"] for line in lines)
    ]
    replies: list[tuple[str, str]] = []

    def right(reply: str, expected: str) -> bool:
        replies.append((reply, expected))
        return reply == expected

    score = evaluate.evaluate(load(args.model), tasks, canvases=1, is_right=right)
    by_blanks = defaultdict[int, Counter[str]](Counter)
    for task, (reply, expected) in zip(tasks, replies, strict=True):
        puzzle = sudoku.from_text(task.messages[-1]["content"], SIDE)
        assert puzzle is not None
        figures, group = checked(puzzle, reply, expected), int((puzzle == 0).sum()) // 10 * 10
        by_blanks[group] += figures
    print("blanks    boards   solved   in form   blanks right   given kept")
    for group, sums in sorted(by_blanks.items()):
        count = sums["boards"]
        print(
            f"{group:2} to {group + 9:2}{count:8}{sums['solved'] / count:9.1%}"
            f"{sums['form'] / count:10.1%}{sums['right'] / max(1, sums['blank']):15.1%}"
            f"{sums['kept'] / max(1, sums['given']):13.1%}"
        )
    total = sum(by_blanks.values(), Counter[str]())
    print(json.dumps({"steps": score.steps, **total}))


def checked(puzzle: Cells, reply: str, expected: str) -> Counter[str]:
    """What of a reply is right: the whole board ("solved"), its form ("form"), and of the cells
    those that were blank ("right" of "blank") and those that were given ("kept" of "given")."""
    blank, cells = puzzle == 0, sudoku.from_text(reply, SIDE)
    wanted = sudoku.from_text(expected, SIDE)
    assert wanted is not None
    sums = Counter(boards=1, blank=int(blank.sum()), given=int((~blank).sum()))
    if cells is not None and reply.count("\n") == SIDE - 1:
        same = cells == wanted
        sums += Counter(form=1, right=int(same[blank].sum()), kept=int(same[~blank].sum()))
        sums["solved"] = int(sudoku.is_solution(sudoku.to_text(puzzle), reply, SIDE))
    return sums


def draw(args: argparse.Namespace) -> None:
    """Writes and prints the loss of the canvases of a run, in means of MEAN steps. The first mean
    is printed alone: beside it the others would be a flat line."""
    with open(args.run_folder / CURVES, encoding="utf-8") as file:
        steps = [each for each in map(json.loads, file) if "losses" in each]
    points = [
        Point(part[-1]["step"], sum(each["losses"]["canvas"] for each in part) / len(part))
        for part in (steps[at : at + MEAN] for at in range(0, len(steps), MEAN))
    ]
    for point in points:
        print(f"{point.x:6,.0f}{point.y:8.3f}")
    axis = f"loss of the canvas, nats a token (means of {MEAN} steps)"
    args.picture.write_text(curves({f"from step {MEAN + 1} on": points[1:]}, "step", axis))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(required=True)
    making = parts.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("--train", type=int, default=20_000)
    making.add_argument("--held-out", type=int, default=200)
    making.add_argument("--pool", type=int, default=300)
    making.add_argument("--fewest", type=int, default=1)
    making.add_argument("--most", type=int, default=MOST_BLANKS)
    making.add_argument("--seed", type=int, default=0)
    making.set_defaults(run=make)
    basis = parts.add_parser("base")
    basis.add_argument("folder", type=Path)
    basis.set_defaults(run=base)
    measuring = parts.add_parser("measure")
    measuring.add_argument("model")
    measuring.add_argument("--data", type=Path, required=True)
    measuring.add_argument("--count", type=int, default=200)
    measuring.set_defaults(run=measure)
    drawing = parts.add_parser("draw")
    drawing.add_argument("run_folder", type=Path)
    drawing.add_argument("picture", type=Path)
    drawing.set_defaults(run=draw)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main(sys.argv[1:])
