"""How well a model fills holes, writes JSON objects, and mends predictions: held-out tasks by the
product's own calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from sfumato.api import Model
from sfumato.diffusion.constraints.filled import Filled
from sfumato.diffusion.constraints.grammar_source import schema_source
from sfumato.diffusion.constraints.hole import Hole
from sfumato.diffusion.prediction import PredictedText
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine import Request
from sfumato.train import fill_data, json_data, sudoku
from sfumato.train.embedded_data import Evaluation
from sfumato.train.fill_data import FillTask
from sfumato.train.json_data import JsonTask
from sfumato.train.questions import pick
from sfumato.train.replies import Score, make_score, replies, score_of

JSON_CANVASES = 3
FEWER = 4
"""Texts and objects are so many times fewer than other tasks: a model that was not trained for them
takes most of the steps that there are, and lengths are eight canvases each."""
MORE_LENGTHS = 4  # that a hole of an open length may have beyond its own, at most

Answered = Callable[[], None]
Run = Callable[[Answered], Score]


def canvas_runs(
    model: Model, hard: Sequence[Evaluation], seed: int, count: int, config: SamplerConfig
) -> dict[str, tuple[int, Run]]:
    """What is measured, by name: the number of tasks, and what gives their score. hard: Sudokus,
    to be filled and begun as predictions."""
    smaller = -(-count // FEWER)
    fills, lengths = held_out_fills(seed, smaller), held_out_lengths(seed, smaller)
    objects = held_out_json(seed, smaller)
    grids = [_grid_task(task) for task in hard]
    right = [task.expected for task in hard]
    runs: dict[str, tuple[int, Run]] = {
        "fill": (len(fills), partial(filled_score, model, fills, seed, config)),
        "fill, length found": (len(lengths), partial(length_score, model, lengths, seed, config)),
        "fill, sudoku_hard": (len(grids), partial(filled_score, model, grids, seed, config)),
    }
    for name, held in (("json", False), ("json, held to its schema", True)):
        runs[name] = (len(objects), partial(json_score, model, objects, seed, config, held))
    for name, texts in (("right", right), ("wrong", wrong_solutions(hard, seed))):
        score = partial(predicted_score, model, hard, texts, seed, config)
        runs[f"sudoku_hard, {name} prediction"] = (len(hard), score)
    return runs


def held_out_fills(seed: int, count: int) -> list[FillTask]:
    """Different texts with holes, never trained on; the same for the same arguments."""
    return _different(np.random.default_rng((seed, 1)), count, lambda task: True)


def held_out_lengths(seed: int, count: int) -> list[FillTask]:
    """The same with one hole, and something after it: there its length can be found."""
    return _different(np.random.default_rng((seed, 2)), count, _has_one_length)


def _has_one_length(task: FillTask) -> bool:
    holes = sum(isinstance(part, Hole) for part in task.parts)
    return holes == 1 and (task.messages is not None or isinstance(task.parts[-1], str))


def _different(
    rng: np.random.Generator, count: int, wanted: Callable[[FillTask], bool]
) -> list[FillTask]:
    tasks: dict[object, FillTask] = {}
    while len(tasks) < count:
        task = fill_data.draw(rng, held_out=True)
        if wanted(task):
            tasks[task.key, task.parts] = task
    return list(tasks.values())


def held_out_json(seed: int, count: int) -> list[JsonTask]:
    """Different requests for objects, never trained on; the same for the same arguments."""
    rng, tasks = np.random.default_rng((seed, 3)), dict[str, JsonTask]()
    while len(tasks) < count:
        task = json_data.draw(rng, held_out=True)
        tasks[task.request] = task
    return list(tasks.values())


def wrong_solutions(tasks: Sequence[Evaluation], seed: int) -> list[str]:
    """For each Sudoku the solution of another one."""
    rng, grids = np.random.default_rng((seed, 4)), sudoku.all_grids()
    texts = []
    for task in tasks:
        others = [text for text in map(sudoku.to_text, grids) if text != task.expected]
        texts.append(pick(others, rng))
    return texts


def _grid_task(task: Evaluation) -> FillTask:
    cells = sudoku.from_text(task.messages[-1]["content"])
    assert cells is not None
    return fill_data.sudoku_task(cells, task.expected)


def _filled(
    model: Model, task: FillTask, parts: Sequence[str | Hole], seed: int, config: SamplerConfig
) -> Filled:
    return model.fill(parts, messages=task.messages, seed=seed, sampler=config)


def _score_of_fills(done: Sequence[Filled], right: Sequence[bool]) -> Score:
    steps = [count for filled in done for count in filled.stats.steps]
    ends = [end for filled in done for end in filled.stats.convergence]
    return make_score(right, steps, ends)


def filled_score(
    model: Model, tasks: Sequence[FillTask], seed: int, config: SamplerConfig, answered: Answered
) -> Score:
    """Right is a text that equals the task's."""
    done = []
    for number, task in enumerate(tasks):
        done.append(_filled(model, task, task.parts, seed * 1_000_003 + number, config))
        answered()
    return _score_of_fills(done, [a.text == b.text for a, b in zip(done, tasks, strict=True)])


def length_score(
    model: Model, tasks: Sequence[FillTask], seed: int, config: SamplerConfig, answered: Answered
) -> Score:
    """Right is a hole of the right length, where up to MORE_LENGTHS more were allowed."""
    rng, done = np.random.default_rng((seed, 5)), []
    for number, task in enumerate(tasks):
        most = task.length + 1 + int(rng.random() * MORE_LENGTHS)
        parts = [part if isinstance(part, str) else Hole(at_most=most) for part in task.parts]
        done.append(_filled(model, task, parts, seed * 1_000_003 + number, config))
        answered()
    right = [
        len(filled.holes[0].token_ids) == task.length
        for filled, task in zip(done, tasks, strict=True)
    ]
    return _score_of_fills(done, right)


def json_score(
    model: Model,
    tasks: Sequence[JsonTask],
    seed: int,
    config: SamplerConfig,
    held: bool,
    answered: Answered,
) -> Score:
    """Right is the same object, its names in the same order. held: whether to the task's schema."""
    requests = [
        Request(
            messages=[{"role": "user", "content": task.request}],
            max_tokens=JSON_CANVASES * model.config.canvas_length,
            seed=seed * 1_000_003 + number,
            sampler=config,
            retry_empty=False,
            grammar=schema_source(task.schema) if held else None,
            endpoint="evaluate",
        )
        for number, task in enumerate(tasks)
    ]
    done = replies(model, requests, JSON_CANVASES, answered)
    right = [_same_object(text, task) for (text, _), task in zip(done, tasks, strict=True)]
    return score_of([account for _, account in done], right)


def _same_object(text: str, task: JsonTask) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and json.dumps(value) == task.text


def predicted_score(
    model: Model,
    tasks: Sequence[Evaluation],
    texts: Sequence[str],
    seed: int,
    config: SamplerConfig,
    answered: Answered,
) -> Score:
    """Right are replies equal to the expected ones, with these predictions."""
    requests = [
        Request(
            messages=task.messages,
            max_tokens=model.config.canvas_length,
            seed=seed * 1_000_003 + number,
            sampler=config,
            retry_empty=False,
            prediction=PredictedText(text),
            endpoint="evaluate",
        )
        for number, (task, text) in enumerate(zip(tasks, texts, strict=True))
    ]
    done = replies(model, requests, 1, answered)
    right = [text == task.expected for (text, _), task in zip(done, tasks, strict=True)]
    return score_of([account for _, account in done], right)
