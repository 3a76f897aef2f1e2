from __future__ import annotations

import pytest

from sfumato.cli.demo import GIVEN, BoardView, puzzle_board
from sfumato.cli.display import GLOW, HAZE

TEXT = "1.3.\n....\n2..1\n...."
SOLVED = "1234\n3412\n2341\n4123"
DRAWN = [
    "┌─────┬─────┐",
    "│ 1 2 │ 3 4 │",
    "│ 3 4 │ 1 2 │",
    "├─────┼─────┤",
    "│ 2 3 │ 4 1 │",
    "│ 4 1 │ 2 3 │",
    "└─────┴─────┘",
]


def view() -> BoardView:
    return BoardView(lambda ids: "".join(chr(i) for i in ids if i), TEXT)


def ids(text: str) -> list[int]:
    return [ord(c) for c in text.ljust(32, "\0")]


def test_a_puzzle_is_drawn_with_its_given_digits_distinct() -> None:
    lines = puzzle_board(TEXT)
    assert [line.plain for line in lines[:3]] == [DRAWN[0], "│ 1 · │ 3 · │", "│ · · │ · · │"]
    styles = {lines[1].plain[span.start : span.end]: span.style for span in lines[1].spans}
    assert styles["1"] == f"not dim {GIVEN}" and styles["·"] == f"not dim {HAZE}"
    assert [line.plain for line in view().lines(40, 20)] == [line.plain for line in lines]


def test_drafts_fill_the_grid_in_place() -> None:
    board = view()
    board.draft(0, ids("1\n34\n3x12"), [False] * 32)
    first = board.lines(40, 20)
    assert first[1].plain == "│ 1 · │ 3 4 │"
    board.draft(0, ids(SOLVED), [True] * 32)
    board.draft(0, ids(SOLVED.replace("3412", "3142")), [True] * 31 + [False])
    assert [line.plain for line in board.lines(40, 20)][2] == "│ 3 1 │ 4 2 │"
    styles = [span.style for span in board.lines(40, 20)[2].spans]
    assert f"not dim {GLOW[0]}" in styles
    assert len(board.lines(40, 20)) == len(first)


def test_what_is_committed_stays_as_a_grid() -> None:
    board = view()
    board.draft(0, ids(SOLVED), [True] * 32)
    assert [line.plain for line in board.commit(SOLVED, 40)] == DRAWN
    assert (board.commit("", 40), board.finish()) == ([], [])


@pytest.mark.parametrize("text", ["I do not know.", "1234\n3412", "12345\n" * 4])
def test_another_answer_is_text(text: str) -> None:
    board = view()
    lines = [line.plain for line in [*board.commit(text, 40), *board.finish()]]
    assert lines == text.removesuffix("\n").split("\n")


def test_a_tiny_terminal_gets_text() -> None:
    board = view()
    board.draft(0, ids(SOLVED), [True] * 32)
    assert not any("│" in line.plain for line in board.lines(10, 20) + board.lines(40, 6))
