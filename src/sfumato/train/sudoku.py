"""4x4 Sudoku: every grid, every puzzle with one solution, as text for the embedded model.

There are 288 grids. A fixed split keeps 28 of them out of training, so that a right answer to one
of their puzzles is not a recalled grid. More than that "held out" does not mean: exchanging digits,
rows or bands turns every held-out grid into grids that are trained on, and its pattern of blanks
may have been seen with those. Knows no tokens.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

MIN_BLANKS, MAX_BLANKS = 4, 12
HARD_BLANKS = 10
"""From this number of blanks up a puzzle counts as hard; 12 is the most a 4x4 puzzle can have."""

HELD_OUT = 28
_SPLIT_SEED = 4
_CELLS = 16
_GIVEN_BIT = 1 << np.arange(_CELLS, dtype=np.uint32)

Cells = NDArray[np.uint8]


@cache
def all_grids() -> Cells:
    """Every 4x4 solution, uint8 [288, 16] of digits 1..4, row by row, in lexicographic order."""
    row, column = np.divmod(np.arange(_CELLS), 4)
    box = row // 2 * 2 + column // 2
    peers = (row == row[:, None]) | (column == column[:, None]) | (box == box[:, None])
    grids: list[list[int]] = [[]]
    for cell in range(_CELLS):
        earlier = np.flatnonzero(peers[cell, :cell])
        grids = [
            [*grid, digit]
            for grid in grids
            for digit in range(1, 5)
            if all(grid[peer] != digit for peer in earlier)
        ]
    return np.array(grids, dtype=np.uint8)


@cache
def split() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices into all_grids(): (260 for training, 28 held out), the same on every machine."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(all_grids())).tolist()
    return tuple(sorted(order[HELD_OUT:])), tuple(sorted(order[:HELD_OUT]))


@cache
def _patterns(shape: tuple[int, ...]) -> list[NDArray[np.uint32]]:
    """The patterns of given cells with one solution, by number of blanks 0..16, as bit sets (bit i:
    cell i is given); shape: the grid with its digits renamed so that its first row is 1234.

    A pattern has a second solution if it lies within the cells on which the grid agrees with
    another grid; those sets are marked and the mark is handed down to all their subsets.
    """
    agreement = ((all_grids() == shape) * _GIVEN_BIT).sum(1)
    ambiguous = np.zeros(1 << _CELLS, dtype=bool)
    ambiguous[agreement[agreement != _GIVEN_BIT.sum()]] = True
    for cell in range(_CELLS):
        halves = ambiguous.reshape(-1, 2, 1 << cell)
        halves[:, 0] |= halves[:, 1]
    blanks = _CELLS - np.bitwise_count(np.arange(1 << _CELLS, dtype=np.uint32))
    return [
        np.flatnonzero(~ambiguous & (blanks == count)).astype(np.uint32)
        for count in range(_CELLS + 1)
    ]


def puzzle(grid: int, blanks: int, rng: np.random.Generator) -> Cells:
    """A puzzle with that number of blanks whose only solution is all_grids()[grid].

    Returns uint8 [16], 0 where blank; drawn evenly from all such puzzles. Raises ValueError where
    no puzzle has one solution (more than 12 blanks) or the number is not one of 0..16.
    """
    cells = all_grids()[grid]
    known = _patterns(tuple((np.argsort(cells[:4])[cells - 1] + 1).tolist()))
    if not 0 <= blanks <= _CELLS or not len(known[blanks]):
        raise ValueError(f"no 4x4 Sudoku has {blanks} blanks and one solution: ask for 0 to 12")
    choices = known[blanks]
    pattern = choices[int(rng.random() * len(choices))]
    return np.where(pattern & _GIVEN_BIT, cells, 0).astype(np.uint8)


def to_text(cells: Cells) -> str:
    """Four rows of four characters, '.' where blank: 19 characters, without a final newline."""
    digits = "".join(".1234"[digit] for digit in cells)
    return "\n".join(digits[start : start + 4] for start in range(0, _CELLS, 4))


def prompt(cells: Cells) -> str:
    """The request to solve a puzzle, as evaluation words it."""
    return f"sudoku\n{to_text(cells)}"


def from_text(text: str) -> Cells | None:
    """The cells of the last four lines, uint8 [16]; None where they are not a Sudoku's rows."""
    rows = text.split("\n")[-4:]
    if [len(row) for row in rows] != [4] * 4 or set("".join(rows)) - set(".1234"):
        return None
    return np.array([".1234".index(character) for character in "".join(rows)], dtype=np.uint8)


def is_solution(puzzle_text: str, answer: str) -> bool:
    """Whether the answer is four rows of digits, a right grid, and keeps the puzzle's digits.

    The puzzle may have lines before its rows (a complete prompt); the answer may have none. Raises
    ValueError if the puzzle is not one.
    """
    given = from_text(puzzle_text)
    if given is None:
        raise ValueError(f"not four rows of '.1234': {puzzle_text!r}")
    solved = from_text(answer)
    if solved is None or answer.count("\n") != 3:
        return False
    keeps = bool(((given == 0) | (given == solved)).all())
    return keeps and bool((all_grids() == solved).all(1).any())
