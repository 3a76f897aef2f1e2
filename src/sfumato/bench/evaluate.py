"""How good the embedded model is: exact answers and steps on fixed sets by the product's own calls,
and what they rest on; how well it fills holes, writes JSON, mends predictions and decides.

Besides the model as it runs, hard grids are tried with a single step and without self-conditioning:
if those did as well, the refinement would be for show.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from sfumato.api import Model
from sfumato.diffusion.constraints.decision_plan import DecisionSettings
from sfumato.diffusion.constraints.grammar import schema_source
from sfumato.diffusion.constraints.hole import Hole
from sfumato.diffusion.constraints.questions import ScoreQuestion
from sfumato.diffusion.limits import Stats
from sfumato.diffusion.prediction import PredictedText
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine import Account, Engine, EngineConfig, Finished, Request
from sfumato.options.limits import MOST_STEPS
from sfumato.refused import Refused
from sfumato.train import canvas_data, pictures, sudoku
from sfumato.train.canvas_data import FillTask, JsonTask
from sfumato.train.decision_states import Case, in_order
from sfumato.train.decisions_data import held_out
from sfumato.train.embedded_data import Evaluation, ask, evaluation_sets, pick

_log = logging.getLogger(__name__)

Figures = dict[str, dict[str, Any]]
Answered = Callable[[], None]
_T = TypeVar("_T")

DECISIONS = "decisions"
CANVASES, JSON_CANVASES = 2, 3
"""Canvases that a reply may have; no answer of the sets and no object is longer."""
ROWS = 32  # requests at a time
FEWER = 4
"""Texts and objects are so many times fewer than other tasks: a model that was not trained for them
takes most of the steps that there are, and lengths are eight canvases each."""
MORE_LENGTHS = 4  # that a hole of an open length may have beyond its own, at most


@dataclass(frozen=True)
class Score:
    """What a set of tasks came to."""

    tasks: int
    exact: float  # share of right ones; of replies, those equal to the expected one
    steps: float  # denoising steps per canvas, mean
    most_steps: int
    converged: float  # share of canvases that ended before the step cap
    tokens_per_forward: float  # visible tokens over denoising steps, of all tasks


def _score(accounts: Sequence[Account | Stats], right: Sequence[bool]) -> Score:
    """The figures of tasks, of which these are right."""
    steps = [count for account in accounts for count in account.steps]
    ends = [end for account in accounts for end in account.convergence]
    return Score(
        tasks=len(right),
        exact=sum(right) / len(right),
        steps=sum(steps) / len(steps),
        most_steps=max(steps),
        converged=ends.count("converged") / len(ends),
        tokens_per_forward=sum(account.output_tokens for account in accounts) / sum(steps),
    )


def _noise(seed: int, number: int) -> int:
    """Another seed for every task: one unlucky canvas must not decide them all."""
    return seed * 1_000_003 + number


def evaluate(
    model: Model,
    tasks: Sequence[Evaluation],
    config: SamplerConfig | None = None,
    seed: int = 0,
    answered: Answered = lambda: None,
    canvases: int = CANVASES,
    is_right: Callable[[str, str], bool] = operator.eq,
    **each: Sequence[Any],
) -> Score:
    """Submits all tasks to an engine, each with its own noise. An empty answer counts as it is.

    answered: called after each; canvases: of a reply at most; is_right: called with a reply and the
    expected one; each: further fields of the requests, with a value for each task."""
    sampler = replace(config or SamplerConfig(), canvas_length=model.config.canvas_length)
    requests = [
        Request(
            messages=task.messages,
            max_tokens=canvases * model.config.canvas_length,
            seed=_noise(seed, number),
            sampler=sampler,
            retry_empty=False,
            endpoint="evaluate",
            **{name: values[number] for name, values in each.items()},
        )
        for number, task in enumerate(tasks)
    ]
    done = _replies(model, requests, canvases, answered)
    right = [is_right(text, task.expected) for (text, _), task in zip(done, tasks, strict=True)]
    return _score([account for _, account in done], right)


def _replies(
    model: Model, requests: Sequence[Request], canvases: int, answered: Answered
) -> list[tuple[str, Account]]:
    """The text and the account of each request, in their order; `ROWS` at a time."""
    longest = max(len(model.prompt_ids(messages=request.messages)) for request in requests)
    context = longest + (canvases - 1) * model.config.canvas_length
    limits = EngineConfig(
        slots=ROWS,
        context=context,
        queue=max(1, len(requests)),
        snapshot_bytes=0,
        max_steps=MOST_STEPS,
        request_timeout_s=None,
    )
    engine = Engine(model, limits)

    def watched(event: object) -> None:
        if isinstance(event, Finished):
            answered()

    handles = [engine.submit(request, watched) for request in requests]
    while engine.step():
        pass
    engine.close()
    ends = [(handle.result(), handle.terminal) for handle in handles]
    return [
        (model.tokenizer.decode(reply.token_ids), end.account)
        for reply, end in ends
        if isinstance(end, Finished)
    ]


def evaluate_fills(
    model: Model,
    tasks: Sequence[FillTask],
    config: SamplerConfig | None = None,
    seed: int = 0,
    answered: Answered = lambda: None,
    open_lengths: bool = False,
) -> Score:
    """Fills the holes of each task. Right is a text that equals the task's; or, with open lengths,
    a hole of the right length, where up to MORE_LENGTHS more were allowed."""
    rng, done, right = np.random.default_rng((seed, 5)), [], []
    for number, task in enumerate(tasks):
        parts = task.parts
        if open_lengths:
            hole = Hole(at_most=task.length + 1 + int(rng.random() * MORE_LENGTHS))
            parts = tuple(part if isinstance(part, str) else hole for part in parts)
        filled = model.fill(
            parts, messages=task.messages, seed=_noise(seed, number), sampler=config
        )
        done.append(filled.stats)
        length = len(filled.holes[0].token_ids)
        right.append(length == task.length if open_lengths else filled.text == task.text)
        answered()
    return _score(done, right)


def held_out_fills(seed: int, count: int) -> list[FillTask]:
    """Different texts with holes, never trained on; the same for the same arguments."""
    return _different(count, _draw_fill((seed, 1)), _fill_key)


def held_out_lengths(seed: int, count: int) -> list[FillTask]:
    """Texts as `held_out_fills`, with one hole and something after it: there its length can be
    found."""
    return _different(count, _draw_fill((seed, 2)), _fill_key, _has_one_length)


def held_out_json(seed: int, count: int) -> list[JsonTask]:
    """Different requests for objects, never trained on; the same for the same arguments."""
    draw = partial(canvas_data.draw_json, np.random.default_rng((seed, 3)), held_out=True)
    return _different(count, draw, lambda task: task.request)


def _draw_fill(seed: tuple[int, int]) -> Callable[[], FillTask]:
    return partial(canvas_data.draw_fill, np.random.default_rng(seed), held_out=True)


def _fill_key(task: FillTask) -> object:
    return task.key, task.parts


def _has_one_length(task: FillTask) -> bool:
    holes = sum(isinstance(part, Hole) for part in task.parts)
    return holes == 1 and (task.messages is not None or isinstance(task.parts[-1], str))


def _different(
    count: int,
    draw: Callable[[], _T],
    key: Callable[[_T], object],
    wanted: Callable[[_T], bool] = lambda task: True,
) -> list[_T]:
    tasks: dict[object, _T] = {}
    while len(tasks) < count:
        if wanted(task := draw()):
            tasks[key(task)] = task
    return list(tasks.values())


def wrong_solutions(tasks: Sequence[Evaluation], seed: int) -> list[str]:
    """For each Sudoku the solution of another one."""
    rng = np.random.default_rng((seed, 4))
    solved = [sudoku.to_text(grid) for grid in sudoku.all_grids()]
    return [pick([text for text in solved if text != task.expected], rng) for task in tasks]


def _grid_task(task: Evaluation) -> FillTask:
    return canvas_data.sudoku_task(_grid_cells(task), task.expected)


def _grid_cells(task: Evaluation) -> sudoku.Cells:
    cells = sudoku.from_text(task.messages[-1]["content"])
    assert cells is not None
    return cells


def is_same_object(text: str, expected: str) -> bool:
    """Whether the text is the same object, its names in the same order."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and json.dumps(value) == expected


Run = Callable[[Answered], Score]


def picture_sets(tasks: Sequence[Evaluation], seed: int, count: int) -> dict[str, list[Evaluation]]:
    """Questions about pictures that were not trained on, by name: digits as they are stored, and
    Sudokus, drawn as those of the training are. tasks: the Sudokus; count: of digits. Raises
    Refused where a package that holds digits or fonts is missing."""
    rng, digits = np.random.default_rng((seed, 6)), pictures.digits()[1]
    shown = zip(digits.images[:count], digits.labels, strict=False)
    boards = [(_grid_cells(task), task.expected) for task in tasks]
    return {
        "picture of a digit": [
            _about("Which digit is this?", pictures.plain_digit(image), str(label))
            for image, label in shown
        ],
        "picture of a sudoku": [
            _about("Solve this Sudoku.", pictures.draw_board(cells, rng), solved)
            for cells, solved in boards
        ],
    }


def _about(question: str, picture: Image.Image, expected: str) -> Evaluation:
    content: list[dict[str, Any]] = [{"type": "image", "image": picture}]
    content.append({"type": "text", "text": question})
    return Evaluation([{"role": "user", "content": content}], expected)


def canvas_runs(
    model: Model, hard: Sequence[Evaluation], seed: int, count: int, config: SamplerConfig
) -> dict[str, tuple[int, Run]]:
    """What is measured of canvases of which some is given, by name: the number of tasks, and what
    gives their score. hard: Sudokus, to be filled and begun as predictions."""
    smaller = -(-count // FEWER)
    fills, lengths = held_out_fills(seed, smaller), held_out_lengths(seed, smaller)
    objects = held_out_json(seed, smaller)
    asked_for = [Evaluation(ask(task.request), task.text) for task in objects]
    schemas = [schema_source(task.schema) for task in objects]
    right, wrong = [task.expected for task in hard], wrong_solutions(hard, seed)

    def fill(tasks: Sequence[FillTask], open_lengths: bool = False) -> tuple[int, Run]:
        return len(tasks), lambda answered: evaluate_fills(
            model, tasks, config, seed, answered, open_lengths
        )

    def reply(tasks: Sequence[Evaluation], canvases: int, **each: Any) -> tuple[int, Run]:
        return len(tasks), lambda answered: evaluate(
            model, tasks, config, seed, answered, canvases, **each
        )

    return {
        "fill": fill(fills),
        "fill, length found": fill(lengths, open_lengths=True),
        "fill, sudoku_hard": fill([_grid_task(task) for task in hard]),
        "json": reply(asked_for, JSON_CANVASES, is_right=is_same_object),
        "json, held to its schema": reply(
            asked_for, JSON_CANVASES, is_right=is_same_object, grammar=schemas
        ),
        "sudoku_hard, right prediction": reply(
            hard, 1, prediction=[PredictedText(text) for text in right]
        ),
        "sudoku_hard, wrong prediction": reply(
            hard, 1, prediction=[PredictedText(text) for text in wrong]
        ),
    }


@dataclass(frozen=True)
class ReadPair:
    """The probabilities of a case's options in their order, read in that order and in another
    (the same one for scores), and the labels' share of the vocabulary in the first read."""

    given: tuple[float, ...]
    moved: tuple[float, ...]
    label_mass: float


@dataclass(frozen=True)
class DecisionScore:
    """Figures of held-out decisions; NaN where a set has no question of the kind."""

    tasks: int
    known_error: float
    """Mean over questions that their state leaves open of mean |p - known| over their options."""
    yes_no: float  # of settled yes/no questions: the right answer is the likelier one
    choice: float  # of settled choices: the right option has the highest probability
    score_error: float  # of settled scores: mean |Σ i·pᵢ - level|, in levels
    moved: float
    """Mean over yes/no questions and choices of the mean |p - p'| over their options, p' being
    read with the options in another order."""
    most_moved: float  # the same with the largest |p - p'| of each question
    label_mass: float


def decision_figures(cases: Sequence[Case], pairs: Sequence[ReadPair]) -> DecisionScore:
    """What the reads of these cases come to."""
    groups: dict[str, list[float]] = {
        name: [] for name in ("known", "yes_no", "choice", "score", "moved", "most", "mass")
    }
    for case, pair in zip(cases, pairs, strict=True):
        off = np.subtract(pair.given, case.truth)
        if case.open:
            groups["known"].append(float(np.abs(off).mean()))
        elif case.kind == "score":
            groups["score"].append(abs(float(np.arange(len(off)) @ off)))
        else:
            right = int(np.argmax(pair.given)) == int(np.argmax(case.truth))
            groups[case.kind].append(float(right))
        if case.kind != "score":
            moved = np.abs(np.subtract(pair.given, pair.moved))
            groups["moved"].append(float(moved.mean()))
            groups["most"].append(float(moved.max()))
        groups["mass"].append(pair.label_mass)
    means = (math.fsum(x) / len(x) if x else math.nan for x in groups.values())
    return DecisionScore(len(cases), *means)


def read_cases(
    model: Model, cases: Sequence[Case], seed: int = 0, answered: Answered = lambda: None
) -> list[ReadPair]:
    """Each case by the product's own read, in the case's order and in another; seed: of the orders
    and of the slots' noise. answered: called for each. Neighbours about one state share it."""
    rng = np.random.default_rng(seed)
    pairs = []
    for number, (state, group) in enumerate(itertools.groupby(cases, lambda case: case.state)):
        some = list(group)
        orders = [_another(len(case.truth), rng) for case in some]
        questions = {f"given {i}": case.question for i, case in enumerate(some)}
        for i, (case, order) in enumerate(zip(some, orders, strict=True)):
            questions[f"moved {i}"] = in_order(case, order).question
        settings = DecisionSettings(seed=_noise(seed, number))
        answers = model.read_questions(state, questions, settings)
        for i, (case, order) in enumerate(zip(some, orders, strict=True)):
            given, moved = answers[f"given {i}"], answers[f"moved {i}"].probabilities
            if not isinstance(case.question, ScoreQuestion):
                moved = tuple(moved[order.index(option)] for option in range(len(order)))
            pairs.append(ReadPair(given.probabilities, moved, given.label_mass or 0.0))
            answered()
    return pairs


def _another(count: int, rng: np.random.Generator) -> list[int]:
    """An order other than 0, 1, 2 …, where there is one."""
    order = usual = list(range(count))
    while count > 1 and order == usual:
        order = rng.permutation(count).tolist()
    return order


def evaluate_decisions(
    model: Model, cases: Sequence[Case], seed: int = 0, answered: Answered = lambda: None
) -> DecisionScore:
    """The figures of these cases, read with this model."""
    return decision_figures(cases, read_cases(model, cases, seed, answered))


def run(
    model: Model,
    count: int = 200,
    seed: int = 0,
    config: SamplerConfig | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Figures:
    """The scores of every set, and of the hard grids under two handicaps, by name; and under
    DECISIONS those of held-out decisions (`DecisionScore`). Sets of pictures are left out where the
    model reads none, and, with a line in the log, where what they are made of is not installed. A
    model of masks has the sets of replies alone: its recipe trains nothing else.

    model: of the recipe's vocabulary; count: of tasks in each set, at most, and a third of the
    decisions; seed: draws the held-out tasks, and the noise that they are answered with; config:
    how, in all sets but the decisions; progress: called with the tasks answered, and all of them.
    """
    config = config or SamplerConfig()
    sets = {name: tasks[:count] for name, tasks in evaluation_sets(seed, count).items()}
    hard = sets["sudoku_hard"]
    if model.reads_pictures:
        try:
            sets |= picture_sets(sets["sudoku"], seed, count)
        except Refused as error:
            _log.warning("pictures are left out: %s", error)
    trials = {name: (tasks, config) for name, tasks in sets.items()} | {
        "sudoku_hard, one step": (hard, replace(config, max_steps=1)),
    }
    has_masks = model.config.mask_id is not None
    if not has_masks:
        unaided = replace(config, self_conditioning=False)
        trials["sudoku_hard, no self-conditioning"] = (hard, unaided)
    runs: dict[str, tuple[int, Callable[[Answered], Score | DecisionScore]]] = {
        name: (len(tasks), partial(evaluate, model, tasks, how, seed))
        for name, (tasks, how) in trials.items()
    }
    if not has_masks:
        runs |= canvas_runs(model, hard, seed, count, config)
        cases = held_out(seed, 3 * count)
        runs[DECISIONS] = len(cases), partial(evaluate_decisions, model, cases, seed)
    total, done = sum(tasks for tasks, _ in runs.values()), itertools.count(1)

    def answered() -> None:
        progress(next(done), total)

    return {name: asdict(score(answered)) for name, (_, score) in runs.items()}


def table(figures: Figures) -> str:
    """The figures as lines for people."""
    lines = [f"{'':34}{'tasks':>6}{'exact':>8}{'steps':>7}{'most':>6}{'converged':>11}"]
    for name, score in figures.items():
        if name == DECISIONS:
            lines += ["", *_decision_lines(DecisionScore(**score))]
            continue
        lines.append(
            f"{name:34}{score['tasks']:6}{score['exact']:8.1%}{score['steps']:7.2f}"
            f"{score['most_steps']:6}{score['converged']:11.1%}"
        )
    return "\n".join(lines)


def _decision_lines(score: DecisionScore) -> list[str]:
    lines = [
        f"decisions: {score.tasks} held-out questions, one read each",
        f"  known probabilities: mean error       {score.known_error:.3f}",
        f"  yes or no, right                      {score.yes_no:.1%}",
        f"  choice, right                         {score.choice:.1%}",
        f"  score, mean error in levels           {score.score_error:.3f}",
        f"  moved by another order: mean, most    {score.moved:.3f}, {score.most_moved:.3f}",
        f"  mean probability of all labels        {score.label_mass:.3f}",
    ]
    # Of few tasks none may be of a kind.
    return [line.replace("nan%", "none").replace("nan", "none") for line in lines]
