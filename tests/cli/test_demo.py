from __future__ import annotations

from typing import Any

import pytest

import sfumato
from sfumato.cli import demo
from sfumato.train import decisions_data, sudoku


@pytest.fixture
def solver(use: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The embedded model is one that answers everything with the solution of puzzle 0."""
    puzzle = demo._puzzle(0)
    grid = next(g for g in sudoku.all_grids() if ((puzzle == 0) | (puzzle == g)).all())
    model = use(sudoku.to_text(grid))
    model.decide = lambda state, questions: f"decided {state} {[*questions]}"
    monkeypatch.setattr("sfumato.load", lambda: model)
    return model


def test_without_a_terminal_it_prints_plain_lines(solver: Any, cli: Any) -> None:
    done = cli("demo")
    assert (done.code, done.err) == (0, "")
    assert "\nSolved.\n" in done.out
    assert done.out.startswith("The embedded model is a toy")
    assert "\n├─────┼─────┤\n" in done.out  # the puzzle, drawn
    assert "Colours" not in done.out
    assert "\x1b" not in done.out
    assert "\nThe model's solution, row by row:\n\n" + solver.canvases[0] in done.out
    decided = f"{demo.STATE} Is it red? Which colour is it? decided {demo.STATE} ["
    assert decided in " ".join(done.out.split())
    questions = [request["messages"][-1]["content"] for request in solver.requests]
    assert questions[:-2] == [sudoku.prompt(demo._puzzle(0)), *demo.QUESTIONS]
    assert [[part["type"] for part in about] for about in questions[-2:]] == [["image", "text"]] * 2
    assert "› Which digit is this?\n" in done.out and "› Solve this Sudoku.\n" in done.out


def test_in_a_terminal_it_is_slow_and_explains_its_colours(
    solver: Any, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    solver.config.canvas_length, solver.config.vocab_size = 19, 64
    monkeypatch.setattr("sfumato.cli.generation.is_visual", lambda: True)
    monkeypatch.setattr("sfumato.cli.demo.is_visual", lambda: True)
    monkeypatch.setattr("time.sleep", waits.append)
    done = cli("demo")
    assert done.code == 0
    assert "step  0/48" in done.out
    assert "The model's solution" not in done.out
    assert sum(0.35 < wait <= 0.4 for wait in waits) == 3 * 7  # noise, two steps; seven replies
    assert done.out.count("┌─────┬─────┐") >= 5  # the puzzle, and its canvas
    assert "Colours: cyan: a given digit; yellow" in " ".join(done.out.split())


def test_a_wrong_solution_is_called_wrong(solver: Any, cli: Any) -> None:
    solver.canvases = ("1234\n1234\n1234\n1234",)
    assert "Not solved" in cli("demo").out


def test_ctrl_c_ends_it(solver: Any, cli: Any) -> None:
    solver.interrupt_at = 0
    done = cli("demo")
    assert done.code == 130
    assert len(solver.requests) == 1


def test_the_puzzle_was_kept_out_of_training() -> None:
    _, held_out = sudoku.split()
    for seed in range(5):
        puzzle = demo._puzzle(seed)
        fits = [
            i for i, g in enumerate(sudoku.all_grids()) if ((puzzle == 0) | (puzzle == g)).all()
        ]
        assert len(fits) == 1
        assert fits[0] in held_out


def test_what_it_decides_was_kept_out_of_training_and_is_shown_with_bars() -> None:
    assert decisions_data.is_held_out(demo.STATE)
    decision = sfumato.load().decide(demo.STATE, demo.DECISIONS)
    assert decision["red"].value is False and decision["colour"].value == "green"
    assert "yes" in str(decision) and "━" in str(decision)
