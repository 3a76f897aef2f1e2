"""The floor under the embedded model: fixed tasks, fixed seeds, one thread's worth of work."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from tests.support.fixed_prompts import fixed_prompts

import sfumato
from sfumato.bench import evaluate
from sfumato.bench.evaluate import DecisionScore, ReadPair, decision_figures, read_cases
from sfumato.diffusion.constraints.decision_plan import DecisionSettings
from sfumato.train.decision_states import choice, yes_no
from sfumato.train.decision_states import score as score_case
from sfumato.train.decisions_data import held_out
from sfumato.train.embedded_data import evaluation_sets
from sfumato.train.recipe import EMBEDDED


@pytest.fixture(scope="module")
def model():
    return sfumato.load()


@pytest.fixture(scope="module")
def sets():
    return evaluation_sets(count=100)


@pytest.mark.parametrize(
    "count",
    [pytest.param(20, id="some"), pytest.param(100, id="all", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("name", "floor"), [("sudoku", 0.95), ("questions", 0.98), ("chat", 0.85)])
def test_held_out_tasks_are_solved_in_few_steps(model, sets, note, name, floor, count):
    score = evaluate.evaluate(model, sets[name][:count])
    note(f"embedded model, {name}: {score.exact:.1%} exact, {score.steps:.2f} steps a canvas")
    assert score.exact >= floor
    assert score.steps <= 5


@pytest.mark.parametrize(
    ("count", "floor"),
    [pytest.param(30, 0.95, id="some"), pytest.param(150, 0.97, id="all", marks=pytest.mark.slow)],
)
def test_held_out_decisions_are_right_and_their_known_probabilities_are_known(
    model, note, count, floor
):
    score = evaluate.evaluate_decisions(model, held_out(count=count))
    note(f"embedded model, decisions: {score}")
    assert score.known_error <= 0.05
    assert min(score.yes_no, score.choice) >= floor
    assert score.score_error <= 0.2
    assert score.moved <= 0.02


def test_hard_grids_need_the_refinement(model, sets):
    """With a single step most hard grids must fail, or the later steps would be for show."""
    tasks = sets["sudoku_hard"][:16]
    adaptive = evaluate.evaluate(model, tasks)
    one_step = evaluate.evaluate(model, tasks, sfumato.SamplerConfig(max_steps=1))
    assert one_step.exact < adaptive.exact - 0.4
    assert one_step.most_steps == 1 and one_step.converged == 0


def test_the_batched_evaluation_agrees_with_one_request_at_a_time(model, sets):
    tasks = sets["questions"][:8]
    together = evaluate.evaluate(model, tasks)
    exact = steps = 0
    for index, task in enumerate(tasks):
        reply = model.generate(messages=task.messages, seed=index, max_tokens=64)
        exact += reply.text == task.expected
        steps += sum(reply.stats.steps)
    canvases = steps / together.steps
    assert exact / len(tasks) == together.exact
    assert canvases == pytest.approx(round(canvases))


def test_min_tokens_are_honoured(model, sets):
    """No expected answer is so long, and so none is exact; every reply takes both canvases."""
    least = evaluate.CANVASES * model.config.canvas_length
    config = sfumato.SamplerConfig(min_tokens=least, max_steps=2)
    score = evaluate.evaluate(model, sets["questions"][:2], config)
    assert (score.exact, score.steps) == (0, 2)
    assert least / 4 <= score.tokens_per_forward <= model.config.canvas_length / 2


def test_a_greeting_gets_a_greeting_and_the_model_says_what_it_is(model):
    assert "Hello" in model.generate("Hello!").text
    assert "Sfumato" in model.generate("Who are you?").text


def test_the_seed_draws_the_tasks_and_the_noise(monkeypatch):
    calls, decided, filled, reported = [], [], [], []

    def score(model, tasks, config=None, seed=0, answered=lambda: None):
        calls.append((tasks, seed))
        for _ in tasks:
            answered()
        return evaluate.Score(len(tasks), 1.0, 2.0, 2, 1.0, 9.0)

    def decisions(model, cases, seed, answered):
        decided.append((cases, seed))
        for _ in cases:
            answered()
        return DecisionScore(len(cases), 0.01, 1.0, 1.0, 0.1, 0.01, 0.02, 1.0)

    def fills(model, hard, seed, count, config):
        filled.append((len(hard), seed, count))

        def of_two(answered):
            answered()
            answered()
            return evaluate.Score(2, 0.5, 2.0, 2, 1.0, 9.0)

        return {"fill": (2, of_two)}

    model = SimpleNamespace(reads_pictures=False, config=EMBEDDED)
    monkeypatch.setattr(evaluate, "canvas_runs", fills)
    monkeypatch.setattr(evaluate, "evaluate", score)
    monkeypatch.setattr(evaluate, "evaluate_decisions", decisions)
    for seed in (0, 5):
        del calls[:]
        del reported[:]
        figures = evaluate.run(model, 3, seed, progress=lambda *far: reported.append(far))
        assert figures["decisions"]["known_error"] == 0.01
        assert decided.pop() == (held_out(seed, 9), seed)
        assert filled.pop() == (3, seed, 3) and figures["fill"]["exact"] == 0.5
        total = sum(len(tasks) for tasks, _ in calls) + 9 + 2
        assert reported == [(done, total) for done in range(1, total + 1)]
        assert [tasks for tasks, _ in calls[:4]] == [
            tasks[:3] for tasks in evaluation_sets(seed, 3).values()
        ]
        assert {seed for _, seed in calls} == {seed}


def test_the_table_has_a_line_for_every_set():
    score = asdict(evaluate.Score(3, 1.0, 2.0, 4, 1.0, 9.0))
    lines = evaluate.table({"sudoku": score, "chat": score}).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["sudoku", "chat"]
    assert "100.0%" in lines[1]


def test_decisions_have_lines_of_their_own():
    score = asdict(DecisionScore(9, 0.0123, 0.97, 0.5, 0.1, 0.01, 0.02, 1.0))
    shown = evaluate.table({"decisions": score})
    assert "9 held-out questions" in shown and "0.012" in shown and "97.0%" in shown


def test_decisions_are_read_as_the_product_reads_them(model):
    """The figures of a few cases, against answers of `read_questions` decided one by one."""
    cases = held_out(0, 12)
    readings = read_cases(model, cases, seed=4)
    numbers = {}
    for case, reading in zip(cases, readings, strict=True):
        number = numbers.setdefault(case.state, len(numbers))
        settings = DecisionSettings(seed=4 * 1_000_003 + number)
        answer = model.read_questions(case.state, {"it": case.question}, settings)["it"]
        assert reading.given == pytest.approx(answer.probabilities, abs=1e-6)
        assert sum(reading.moved) == pytest.approx(1)
    score = decision_figures(cases, readings)
    assert score.tasks == 12 and 0 <= score.known_error <= 1 and 0 <= score.label_mass <= 1


def test_the_figures_of_decisions():
    cases = [
        yes_no("a", "Is it?", 0.25),
        yes_no("b", "Is it?", 1.0),
        choice("c", "Which?", "xyz", (0.0, 1.0, 0.0)),
        score_case("d", "How?", "012", 2),
    ]
    readings = [
        ReadPair((0.35, 0.65), (0.25, 0.75), 1.0),
        ReadPair((0.4, 0.6), (0.4, 0.6), 0.8),
        ReadPair((0.0, 1.0, 0.0), (0.3, 0.7, 0.0), 1.0),
        ReadPair((0.0, 0.5, 0.5), (0.0, 0.5, 0.5), 1.0),
    ]
    score = decision_figures(cases, readings)
    assert (score.yes_no, score.choice) == (0.0, 1.0)
    assert score.known_error == pytest.approx(0.1)
    assert score.score_error == pytest.approx(0.5)
    assert score.moved == pytest.approx((0.1 + 0 + 0.2) / 3)
    assert score.most_moved == pytest.approx((0.1 + 0 + 0.3) / 3)
    assert score.label_mass == pytest.approx(0.95)


@pytest.mark.parametrize("count", [16, pytest.param(80, marks=pytest.mark.slow)])
def test_transformers_answers_as_well_with_the_same_checkpoint(model, note, count):
    """Fixed prompts through `transformers`' own generate, one at a time; one may differ."""
    transformers = pytest.importorskip("transformers")
    oracle = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(
        model.path, dtype=torch.float32
    ).eval()
    tasks = fixed_prompts(count)
    torch.manual_seed(0)
    right = 0
    for task in tasks:
        ids = torch.tensor([model.prompt_ids(messages=task.messages)])
        out = oracle.generate(ids, max_new_tokens=64).sequences[0, ids.shape[1] :].tolist()
        end = next((i for i, token in enumerate(out) if token in model.end_ids), None)
        right += model.tokenizer.decode(out[:end]) == task.expected
    ours = evaluate.evaluate(model, tasks).exact
    figures = f"sfumato {ours:.1%}, transformers {right / count:.1%} exact"
    note(f"embedded model, {count} prompts: {figures}")
    assert abs(ours * count - right) < 1.5
