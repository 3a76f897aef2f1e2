from __future__ import annotations

import numpy as np

from sfumato.diffusion.constraints.hole import Hole
from sfumato.train import canvas_data, sudoku
from sfumato.train.decisions_data import is_held_out
from sfumato.train.vocabulary import BOS, END_OF_TURN, EOS, TOKENS

CANVAS = 32


def tasks(count, held_out=False, seed=0):
    rng = np.random.default_rng(seed)
    return [canvas_data.draw_fill(rng, held_out) for _ in range(count)]


def shown(ids):
    return "".join(TOKENS[token] for token in ids)


def test_the_text_of_a_task_is_its_parts_with_the_holes_filled():
    for task in tasks(300):
        at = 0
        for part in task.parts:
            if isinstance(part, Hole):
                at += part.tokens
            else:
                assert task.text[at : at + len(part)] == part
                at += len(part)
        assert at == len(task.text)


def test_tasks_are_held_out_by_their_key_and_by_a_sudokus_grid():
    train = {sudoku.to_text(sudoku.all_grids()[i]) for i in sudoku.split()[0]}
    for held in (False, True):
        for task in tasks(200, held):
            assert is_held_out(task.key) == held
            assert not is_solved(task.text) or task.text in train
    assert not any(is_solved(task.text) for task in tasks(100, True))


def is_solved(text):
    """Whether it is a grid without blanks: an answer that gives a puzzle has some."""
    return sudoku.from_text(text) is not None and "." not in text


def test_a_row_is_the_products_canvas():
    """The pinned positions are the given texts, and what is open is what fills them."""
    for task in tasks(300, seed=1):
        row = canvas_data.fill_row(task, CANVAS)
        if row is None:
            continue
        assert len(row.target) <= CANVAS and len(row.open) == len(row.target)
        read = shown([*row.prefix[row.prompt :], *row.target])
        if task.messages is None:
            assert row.prefix[: row.prompt] == [BOS] and read == task.text
        else:
            assert read.replace("<eos>", "").removesuffix("<turn|>") == task.text
        holes = sum(part.tokens for part in task.parts if isinstance(part, Hole))
        assert sum(row.open) == holes
        ends = [token for token in row.target if token in (END_OF_TURN, EOS)]
        assert row.text == row.target[: len(row.target) - max(0, len(ends) - 1)]


def test_a_text_behind_its_canvas_begins_in_the_prefix():
    text = "Monday, Tuesday, Wednesday, Thursday, Friday"
    parts = canvas_data.with_holes(text, [(17, 26)])
    row = canvas_data.fill_row(canvas_data.FillTask(None, parts, text, ""), CANVAS)
    assert shown(row.prefix) == "<bos>Monday, Tuesday, "
    assert shown(row.target) == "Wednesday, Thursday, Friday"
    assert row.open == [True] * 9 + [False] * 18


def test_a_fact_has_one_filling_of_any_length():
    rng = np.random.default_rng(0)
    for _ in range(200):
        task = canvas_data._of_facts(rng) if rng.random() < 0.5 else canvas_data._of_names(rng)
        if task is not None:
            start = len(task.parts[0]) if isinstance(task.parts[0], str) else 0
            span = start, start + task.length
            assert (
                sum(canvas_data.fits(text, task.text, span) for text, _ in canvas_data._facts())
                == 1
            )
    fact, both = "The capital of France is Paris.", (15, 30)
    assert sum(canvas_data.fits(text, fact, both) for text, _ in canvas_data._facts()) > 1
