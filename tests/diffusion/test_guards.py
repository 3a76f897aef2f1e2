"""The repetition guard: what it reports, and the many repetitive things that it must not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfumato.tasks.reply import LEAST, LONGEST, REPEATS, repetition
from sfumato.train import sudoku


def ids(text: str) -> list[int]:
    return list(map(ord, text))


@given(
    start=st.lists(st.integers(0, 9), max_size=20),
    phrase=st.lists(st.integers(10, 99), min_size=1, max_size=LONGEST, unique=True),
    times=st.integers(REPEATS, 12),
    cut=st.integers(0, 15),
)
def test_a_repeated_phrase_is_reported(
    start: list[int], phrase: list[int], times: int, cut: int
) -> None:
    run = phrase * times + phrase[: cut % len(phrase)]
    repeated = repetition(start + run, None)
    if len(run) < LEAST:
        assert repeated is None
    else:
        assert repeated is not None and f"last {len(run)} positions" in repeated
        what = "one token" if len(phrase) == 1 else f"phrase of {len(phrase)} tokens"
        assert what in repeated


@given(st.lists(st.integers(0, 50), max_size=64, unique=True))
def test_text_without_repetition_is_not(tokens: list[int]) -> None:
    assert repetition(tokens, None) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "ha ha ha",  # too short to tell from style
        "1000000000",
        "----------- | the table goes on",  # a rule that is over
        "no no no no no no, said the child, and ran",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
        "0.3333333333",
    ],
)
def test_style_is_not_reported(text: str) -> None:
    assert repetition(ids(text), "max_tokens") is None


def test_a_canvas_that_ended_by_itself_is_never_reported() -> None:
    assert repetition([7] * 64, None) is not None
    assert repetition([7] * 64, "eos") is None


@pytest.mark.parametrize("spaced", [False, True], ids=["digits", "spaced"])
def test_no_false_alarm_on_a_sudoku(spaced: bool) -> None:
    """Digits of four kinds, wherever a canvas or a limit cuts them."""
    for grid in sudoku.all_grids():
        text = sudoku.to_text(grid)
        if spaced:
            text = "\n".join(" ".join(row) for row in text.split("\n"))
        for end in range(1, len(text) + 1):
            assert repetition(ids(text[:end]), None) is None


def test_no_false_alarm_on_a_large_sudoku() -> None:
    base = np.array([[(3 * (r % 3) + r // 3 + c) % 9 for c in range(9)] for r in range(9)])
    random = np.random.default_rng(0)
    for _ in range(20):
        grid = random.permutation(np.arange(1, 10))[base]
        text = "\n".join("".join(map(str, row)) for row in grid)
        assert not any(repetition(ids(text[:end]), None) for end in range(1, len(text) + 1))
