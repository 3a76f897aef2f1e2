from __future__ import annotations

import json

import jsonschema_rs
import numpy as np

from sfumato.train import canvas_data
from sfumato.train.canvas_data import JsonTask
from sfumato.train.vocabulary import END_OF_TURN, TOKENS, encode_chat


def tasks(count, held_out=False, seed=0):
    rng = np.random.default_rng(seed)
    return [canvas_data.draw_json(rng, held_out) for _ in range(count)]


def shown(ids):
    return "".join(TOKENS[token] for token in ids)


def test_an_object_matches_its_schema_and_fits_two_canvases():
    for task in tasks(300):
        jsonschema_rs.validate(task.schema, task.value)
        assert list(task.value) == task.schema["required"] and 1 <= len(task.value) <= 3
        assert len(canvas_data.json_rows(task, 32)) <= 2


def test_what_is_held_out_is_not_trained_on():
    assert {t.request for t in tasks(500)}.isdisjoint({t.request for t in tasks(500, True)})


def test_the_rows_of_an_object_are_its_canvases():
    task = JsonTask("2 pears for Ann", {"name": "Ann", "item": "pears", "count": 2}, {})
    first, second = canvas_data.json_rows(task, 32)
    assert first.prefix == encode_chat([{"role": "user", "content": task.request}])
    assert second.prefix == first.prefix + first.target and second.prompt == len(first.prefix)
    written = first.target + second.target
    end = written.index(END_OF_TURN)
    assert json.loads(shown(written[:end])) == task.value


def test_values_become_holes():
    value = {"name": "Ann", "age": 34, "in": True}
    task = canvas_data.values_as_holes(JsonTask("x", value, {}), 64, np.random.default_rng(0))
    assert [part if isinstance(part, str) else part.tokens for part in task.parts] == [
        '{"name": "',
        3,
        '", "age": ',
        2,
        ', "in": ',
        4,
        "}",
    ]
    one = canvas_data.values_as_holes(JsonTask("x", value, {}), 32, np.random.default_rng(0))
    assert sum(not isinstance(part, str) for part in one.parts) == 1
