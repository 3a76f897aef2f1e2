from __future__ import annotations

import numpy as np
import pytest
from benchmarks import sudoku9

from sfumato.train import sudoku


def solutions_of(cells: sudoku.Cells) -> np.ndarray:
    """Solutions by comparison with every grid: the slow twin of the table of patterns."""
    grids = sudoku.all_grids()
    return grids[((cells == 0) | (grids == cells)).all(1)]


def test_there_are_288_different_grids_and_all_are_right() -> None:
    grids = sudoku.all_grids()
    assert grids.shape == (288, 16)
    assert len(np.unique(grids, axis=0)) == 288
    square = grids.reshape(-1, 4, 4)
    boxes = grids.reshape(-1, 2, 2, 2, 2).swapaxes(2, 3).reshape(-1, 4, 4)
    for units in (square, square.swapaxes(1, 2), boxes):
        assert (np.sort(units, axis=2) == [1, 2, 3, 4]).all()


def test_split_is_disjoint_complete_and_fixed() -> None:
    training, held_out = sudoku.split()
    assert len(training) == 260 and len(held_out) == 28
    assert sorted(training + held_out) == list(range(288))
    assert held_out[:5] == (16, 24, 27, 37, 41), "the embedded model was trained on another split"


def test_every_grid_has_puzzles_of_every_difficulty_with_one_solution() -> None:
    rng = np.random.default_rng(0)
    for grid in range(288):
        for blanks in range(sudoku.MIN_BLANKS, sudoku.MAX_BLANKS + 1):
            cells = sudoku.puzzle(grid, blanks, rng)
            assert (cells == 0).sum() == blanks
            solved = solutions_of(cells)
            assert len(solved) == 1 and (solved[0] == sudoku.all_grids()[grid]).all()


def test_no_pattern_with_one_solution_is_missing() -> None:
    rng = np.random.default_rng(1)
    grid = 100
    drawn = {tuple(sudoku.puzzle(grid, 12, rng)) for _ in range(3000)}
    every = 0
    for pattern in range(1 << 16):
        if pattern.bit_count() == 4:
            given = (pattern >> np.arange(16)) & 1
            every += len(solutions_of((sudoku.all_grids()[grid] * given).astype(np.uint8))) == 1
    assert len(drawn) == every > 0


@pytest.mark.parametrize("blanks", [-1, 13, 16, 17])
def test_impossible_numbers_of_blanks_are_refused(blanks: int) -> None:
    with pytest.raises(ValueError, match="ask for 0 to 12"):
        sudoku.puzzle(0, blanks, np.random.default_rng(0))


def test_text_round_trip() -> None:
    cells = sudoku.puzzle(7, 9, np.random.default_rng(2))
    text = sudoku.to_text(cells)
    assert len(text) == 19 and text.count(".") == 9
    read = sudoku.from_text(sudoku.prompt(cells))
    assert read is not None and (read == cells).all()
    assert sudoku.from_text("sudoku\n1234\n12") is None
    assert sudoku.from_text("1234\n5678\n1234\n1234") is None


def test_is_solution_accepts_right_grids_that_keep_the_digits_and_nothing_else() -> None:
    puzzle = "sudoku\n1...\n..1.\n.1..\n...1"
    right = "1234\n3412\n4123\n2341"
    assert sudoku.is_solution(puzzle, right)
    assert sudoku.is_solution(puzzle.removeprefix("sudoku\n"), right)
    assert sudoku.is_solution(puzzle, "1432\n3214\n4123\n2341"), "this puzzle has many solutions"
    for wrong in (
        "2134\n3412\n1243\n4321",  # a right grid that changes the given digits
        "1234\n3412\n4123\n2342",  # not a grid
        "1234\n3412\n4123\n234.",
        "1234\n3412\n4123",
        "Here:\n" + right,
        right + "\n",
        "",
    ):
        assert not sudoku.is_solution(puzzle, wrong)


def test_is_solution_refuses_what_is_no_puzzle() -> None:
    with pytest.raises(ValueError, match="not 4 rows"):
        sudoku.is_solution("sudoku", "1234\n3412\n2143\n4321")


def test_boards_of_nine_have_one_solution_that_every_exchange_keeps() -> None:
    """What the recipe of 9x9 learns from, and its checker; solutions of 4x4 are the table above."""
    rng = np.random.default_rng(3)
    board = sudoku9.exchanged(sudoku9.new_board(50, rng), rng)
    assert (board.puzzle == 0).sum() == 50
    (solved,) = sudoku.solutions(board.puzzle)
    assert (solved == board.solution).all()
    eased = sudoku9.eased(board, 20, rng)
    assert (eased.puzzle == 0).sum() == 20
    request, answer = (line["content"] for line in sudoku9.chat(eased)["messages"])
    assert len(answer) == 89 and sudoku.is_solution(request, answer, 9)
    swapped = answer.translate(str.maketrans("12", "21"))
    assert not sudoku.is_solution(request, swapped, 9), "a right grid with other digits"
    assert not sudoku.is_solution(request, answer[:-1] + answer[0], 9)
    given = solved.copy()
    given[0] = given[1]
    assert not list(sudoku.solutions(given)), "two digits of a row are the same"
    figures = sudoku9.checked(eased.puzzle, swapped, answer)
    assert figures["form"] == 1 and not figures["solved"]
    assert figures["given"] == 61 and 40 < figures["kept"] < 61
    assert sudoku9.checked(eased.puzzle, answer, answer)["right"] == 20
