"""Sudoku as text: solutions of any size; of 4x4, every grid and every puzzle with one solution.

There are 288 grids of 4x4. A fixed split keeps 28 of them out of training, so that a right answer
to one of their puzzles is not a recalled grid. More than that "held out" does not mean: exchanging
digits, rows or bands turns every held-out grid into grids that are trained on, and its pattern of
blanks may have been seen with those. Knows no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
def units(side: int) -> NDArray[np.int64]:
    """The cells of each row, column and box, [3 · side, side], row by row; side: 4 or 9."""
    cells, box = np.arange(side * side).reshape(side, side), math.isqrt(side)
    boxes = cells.reshape(box, box, box, box).swapaxes(1, 2).reshape(side, side)
    return np.concatenate((cells, cells.T, boxes))


@cache
def _units_of(side: int) -> list[tuple[int, ...]]:
    """The three units of each cell."""
    return [tuple(np.flatnonzero((units(side) == cell).any(1))) for cell in range(side * side)]


def solutions(cells: Cells) -> Iterator[Cells]:
    """Every grid that has the digits of uint8 [side²], 0 where blank; in no particular order."""
    side = math.isqrt(len(cells))
    of_cell, free, filled = _units_of(side), [(2 << side) - 2] * (3 * side), cells.tolist()
    for cell, digit in enumerate(filled):
        for unit in of_cell[cell] if digit else ():
            if not free[unit] >> digit & 1:
                return
            free[unit] &= ~(1 << digit)

    def search(blanks: frozenset[int]) -> Iterator[Cells]:
        if not blanks:
            yield np.array(filled, dtype=np.uint8)
            return
        # The cell with the fewest digits: where it has one or none, nothing has to be tried.
        cell, fits = -1, -1
        for blank in blanks:
            a, b, c = of_cell[blank]
            possible = free[a] & free[b] & free[c]
            if cell < 0 or possible.bit_count() < fits.bit_count():
                cell, fits = blank, possible
        for digit in range(1, side + 1):
            if fits >> digit & 1:
                filled[cell] = digit
                for unit in of_cell[cell]:
                    free[unit] ^= 1 << digit
                yield from search(blanks - {cell})
                for unit in of_cell[cell]:
                    free[unit] ^= 1 << digit

    yield from search(frozenset(np.flatnonzero(cells == 0).tolist()))


@cache
def all_grids() -> Cells:
    """Every 4x4 solution, uint8 [288, 16] of digits 1..4, row by row, in lexicographic order."""
    return np.array(sorted(grid.tolist() for grid in solutions(np.zeros(_CELLS, np.uint8))), "u1")


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
    """Rows of characters, '.' where blank, without a final newline: 19 characters of 4x4."""
    side, digits = math.isqrt(len(cells)), "".join(".123456789"[digit] for digit in cells)
    return "\n".join(digits[start : start + side] for start in range(0, len(digits), side))


def prompt(cells: Cells) -> str:
    """The request to solve a puzzle, as evaluation words it."""
    return f"sudoku\n{to_text(cells)}"


def from_text(text: str, side: int = 4) -> Cells | None:
    """The cells of the last lines, uint8 [side²]; None where they are not a Sudoku's rows."""
    rows, known = text.split("\n")[-side:], ".123456789"[: side + 1]
    if [len(row) for row in rows] != [side] * side or set("".join(rows)) - set(known):
        return None
    return np.array([known.index(character) for character in "".join(rows)], dtype=np.uint8)


def is_solution(puzzle_text: str, answer: str, side: int = 4) -> bool:
    """Whether the answer is so many rows of digits, a right grid, and keeps the puzzle's digits.

    The puzzle may have lines before its rows (a complete prompt); the answer may have none. Raises
    ValueError if the puzzle is not one.
    """
    given = from_text(puzzle_text, side)
    if given is None:
        raise ValueError(f"not {side} rows of '.' and 1 to {side}: {puzzle_text!r}")
    solved = from_text(answer, side)
    if solved is None or answer.count("\n") != side - 1:
        return False
    keeps = bool(((given == 0) | (given == solved)).all())
    of_units = np.sort(solved[units(side)], axis=1)
    return keeps and bool((of_units == np.arange(1, side + 1)).all())
