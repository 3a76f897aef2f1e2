from __future__ import annotations

import numpy as np

from sfumato.train import canvas_data, sudoku
from sfumato.train.vocabulary import END_OF_TURN, TOKENS


def shown(ids):
    return "".join(TOKENS[token] for token in ids[: ids.index(END_OF_TURN)])


def test_a_predicted_sudoku_begins_as_a_right_grid_or_as_another_ones():
    rng, right = np.random.default_rng(0), 0
    for _ in range(100):
        row = canvas_data.predicted_row(rng, 32)
        assert len(row.start) == len(row.target) == 32 and row.open is None
        if END_OF_TURN not in row.target or sudoku.from_text(shown(row.target)) is None:
            continue
        given = sudoku.from_text(shown(row.start))
        assert (sudoku.all_grids() == given).all(1).any()
        right += row.start == row.target
    assert 5 <= right <= 45


def test_a_changed_text_differs_at_one_place_by_two_letters_at_most():
    rng = np.random.default_rng(1)
    lengths = {len(canvas_data.changed("It works.", rng)) for _ in range(100)}
    assert lengths == {7, 8, 9, 10, 11}
