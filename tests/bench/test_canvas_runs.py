"""The figures of fills, objects and predictions, on a model that answers what a test says."""

from __future__ import annotations

import pytest

import sfumato
from sfumato.bench import evaluate
from sfumato.train import sudoku
from sfumato.train.canvas_data import JsonTask
from sfumato.train.decisions_data import is_held_out
from sfumato.train.embedded_data import evaluation_sets


@pytest.fixture(scope="module")
def model():
    return sfumato.load()


def test_held_out_tasks_are_fixed_and_different():
    for make in (evaluate.held_out_fills, evaluate.held_out_lengths):
        tasks = make(0, 30)
        assert tasks == make(0, 30) and tasks != make(1, 30)
        assert all(is_held_out(task.key) for task in tasks)
    objects = evaluate.held_out_json(0, 30)
    assert objects == evaluate.held_out_json(0, 30)
    assert len({task.request for task in objects}) == 30


def test_where_a_length_is_asked_for_something_follows_the_hole():
    for task in evaluate.held_out_lengths(0, 50):
        assert task.messages is not None or isinstance(task.parts[-1], str)


def test_a_wrong_solution_is_another_grid():
    tasks = evaluation_sets(0, 20)["sudoku_hard"]
    for task, text in zip(tasks, evaluate.wrong_solutions(tasks, 0), strict=True):
        assert text != task.expected
        assert (sudoku.all_grids() == sudoku.from_text(text)).all(1).any()


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"name": "Ann", "count": 2}', True),
        ('{"name":"Ann",\n"count":2}', True),
        ('{"count": 2, "name": "Ann"}', False),
        ('{"name": "Ann", "count": 2.0}', False),
        ('{"name": "Ann"', False),
        ("2", False),
    ],
)
def test_an_object_is_right_whatever_its_white_space(text, right):
    task = JsonTask("", {"name": "Ann", "count": 2}, {})
    assert evaluate.is_same_object(text, task.text) == right
