"""Whether the doubt of the causal mode tells right answers from wrong ones: areas under the ROC
curve with bootstrap intervals, on tasks of the embedded model.

    python benchmarks/doubt.py [--count N] [--redo] [--cost]

Tasks: hard Sudokus after capped steps, questions about countries of which a part is in no training
set, holes whose length is to be found, and decisions. Scores: of the causal mode the largest doubt
of a token and their sum (minus the log-likelihood of the whole text); of the canvas the largest
entropy of its last step and their mean, for fills minus the logarithm of the hole's probability;
and of both, as a sum of ranks and by a logistic regression with five folds. Decisions have another
table: errors where the two phases answer alike and where they do not. --redo: doubted tokens begin
again as noise. --cost: the time of verification in late steps.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict

import sfumato
from sfumato import Engine, EngineConfig, Hole, Model, Request, SamplerConfig
from sfumato.bench.answers import interval
from sfumato.bench.evaluate import held_out_lengths
from sfumato.diffusion.canvas import Canvas, CanvasPlan, GivenCanvas
from sfumato.diffusion.causal import row_scores
from sfumato.diffusion.constraints.decision_plan import DecisionSettings
from sfumato.diffusion.limits import Limits, plan_reply
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import Never
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.verification import DOUBT, CanvasVerification
from sfumato.embedded_questions import countries
from sfumato.engine import Draft, Finished, Settled
from sfumato.tasks.wants import Ranks
from sfumato.train.decision_states import Case, choice, yes_no
from sfumato.train.decisions_data import held_out
from sfumato.train.embedded_data import ask, evaluation_sets

UNSEEN = (
    *(("Armenia", "Yerevan"), ("Bahrain", "Manama"), ("Belize", "Belmopan"), ("Benin", "Porto")),
    *(("Bhutan", "Thimphu"), ("Botswana", "Gaborone"), ("Brunei", "Bandar"), ("Laos", "Vientiane")),
    *(("Burundi", "Gitega"), ("Cameroon", "Yaounde"), ("Chad", "Djamena"), ("Eritrea", "Asmara")),
    *(("Fiji", "Suva"), ("Gabon", "Libreville"), ("Georgia", "Tbilisi"), ("Guinea", "Conakry")),
    *(("Guyana", "Georgetown"), ("Haiti", "Prince"), ("Bulgaria", "Sofia"), ("Malta", "Valletta")),
    *(("Liberia", "Monrovia"), ("Libya", "Tripoli"), ("Malawi", "Lilongwe"), ("Mali", "Bamako")),
    *(("Moldova", "Chisinau"), ("Namibia", "Windhoek"), ("Niger", "Niamey"), ("Oman", "Muscat")),
    *(("Paraguay", "Asuncion"), ("Rwanda", "Kigali"), ("Samoa", "Apia"), ("Senegal", "Dakar")),
    *(("Sudan", "Khartoum"), ("Suriname", "Paramaribo"), ("Togo", "Lome"), ("Tonga", "Nuku")),
    *(("Uganda", "Kampala"), ("Vanuatu", "Port Vila"), ("Zambia", "Lusaka"), ("Nauru", "Yaren")),
)
"""Countries with a part of the name of each one's capital; those that were trained on are left
out."""
CAPS = 1, 2, 3  # steps of a canvas
ROUNDS = 1000  # of the bootstrap


@dataclass(frozen=True)
class Answered:
    """One answer: whether it is right, and its scores, of which more is more doubt."""

    right: bool
    causal_max: float
    causal_sum: float
    canvas_max: float
    canvas_mean: float


def scored(right: bool, verification: CanvasVerification) -> Answered:
    entropy = verification.canvas_entropy
    return Answered(
        right,
        max(-log for log in verification.log_probs),
        -verification.log_likelihood,
        max(entropy),
        statistics.fmean(entropy),
    )


def replies(model: Model, requests: Sequence[Request]) -> list[tuple[Finished, Draft, Settled]]:
    """The end of each request, with the last draft of its last canvas and that canvas."""
    engine = Engine(model, EngineConfig(slots=16, context=512, queue=len(requests) + 1))
    handles = [engine.submit(replace(request, drafts=True)) for request in requests]
    while engine.step():
        pass
    ends = []
    for handle in handles:
        *events, end = handle.events()
        assert isinstance(end, Finished)
        draft = [event for event in events if isinstance(event, Draft)][-1]
        ends.append((end, draft, [event for event in events if isinstance(event, Settled)][-1]))
    engine.close()
    return ends


def about_grids(model: Model, count: int, cap: int) -> tuple[list[Request], list[str]]:
    tasks = evaluation_sets(seed=7, count=count)["sudoku_hard"]
    sampler = SamplerConfig(max_steps=cap)
    requests = [
        Request(
            messages=task.messages,
            seed=1000 * cap + number,
            sampler=sampler,
            max_tokens=model.config.canvas_length,
            verify="report",
            retry_empty=False,
        )
        for number, task in enumerate(tasks)
    ]
    return requests, [task.expected for task in tasks]


def grids(model: Model, count: int, cap: int) -> list[Answered]:
    requests, expected = about_grids(model, count, cap)
    answers = zip(replies(model, requests), expected, strict=True)
    return [
        scored(end.reply.text == wanted, end.reply.verification.canvases[0])
        for (end, _, _), wanted in answers
    ]


def unseen_countries() -> dict[str, str]:
    """The capitals of the countries that are in no training set."""
    known = {country["name"] for country in countries()}
    return {name: capital for name, capital in UNSEEN if name not in known}


def capitals(model: Model, seeds: int) -> list[Answered]:
    """Capitals of all countries, known and unseen; right is an answer that names the capital."""
    known = {country["name"]: country["capital"] for country in countries()}
    requests, expected = [], []
    for name, capital in [*known.items(), *unseen_countries().items()]:
        for seed in range(seeds):
            text = f"What is the capital of {name}?"
            requests.append(Request(messages=ask(text), seed=seed, max_tokens=32, verify="report"))
            expected.append(capital)
    answers = zip(replies(model, requests), expected, strict=True)
    return [
        scored(capital in end.reply.text, end.reply.verification.canvases[0])
        for (end, _, _), capital in answers
        if end.reply.verification
    ]


def lengths(model: Model, count: int) -> list[Answered]:
    """Texts with a hole whose length is to be found; right is the task's own text."""
    chosen, answers = random.Random(5), []
    for number, task in enumerate(held_out_lengths(11, count)):
        hole = Hole(at_most=task.length + 1 + chosen.randrange(4))
        parts = [part if isinstance(part, str) else hole for part in task.parts]
        filled = model.fill(parts, messages=task.messages, seed=number)
        own = filled.holes[0]
        encode = model.tokenizer.encode
        if task.messages is None:
            prefix = list(model.fills.no_prompt)
        else:
            prefix = model.prompt_ids(messages=task.messages) + model.fills.empty_thought
        at = task.parts.index(next(part for part in task.parts if not isinstance(part, str)))
        for part in task.parts[:at]:
            prefix += encode(part, special=False)
        behind = [token for part in task.parts[at + 1 :] for token in encode(part, special=False)]
        ids = torch.tensor(prefix + own.token_ids + behind)
        slot = model.network.new_slot(1)
        (scores,) = row_scores(model.network, [slot], [ids], [None])
        logs = scores.log_probs[len(prefix) - 1 :].tolist()
        doubt = [-math.log(max(prob, 1e-9)) for prob in own.probabilities]
        right = filled.text == task.text
        summed = -math.fsum(logs)
        answers.append(Answered(right, -min(logs), summed, max(doubt), statistics.fmean(doubt)))
    return answers


def area_of(wrong: np.ndarray, score: np.ndarray) -> float:
    """The share of pairs of a wrong and a right answer in which the wrong one has more doubt, half
    of it where they have the same: `roc_auc_score`, at a tenth of the time."""
    right, doubts = np.sort(score[~wrong]), score[wrong]
    below = right.searchsorted(doubts, "left") + right.searchsorted(doubts, "right")
    return float(below.mean() / (2 * len(right)))


def area(wrong: np.ndarray, score: np.ndarray, rounds: int = ROUNDS) -> tuple[float, float, float]:
    """The area under the ROC curve, and the 95% interval of a bootstrap."""
    chosen, areas = np.random.default_rng(0), []
    while len(areas) < rounds:
        at = chosen.integers(0, len(wrong), len(wrong))
        if 0 < wrong[at].sum() < len(at):
            areas.append(area_of(wrong[at], score[at]))
    low, high = np.percentile(areas, [2.5, 97.5])
    return area_of(wrong, score), float(low), float(high)


def ranks(values: np.ndarray) -> np.ndarray:
    return values.argsort().argsort().astype(float)


def report(name: str, answers: Sequence[Answered]) -> None:
    wrong = np.array([not answer.right for answer in answers])
    print(f"\n{name}: {len(answers)} answers, {wrong.sum()} wrong")
    if wrong.all() or not wrong.any():
        return
    columns = {
        field: np.array([getattr(answer, field) for answer in answers])
        for field in ("causal_max", "causal_sum", "canvas_max", "canvas_mean")
    }
    both = ranks(columns["causal_max"]) + ranks(columns["canvas_max"])
    features = np.log(np.stack([*columns.values()], axis=1) + 1e-6)
    folds = min(5, int(wrong.sum()), int((~wrong).sum()))
    columns |= {"both, sum of ranks": both}
    if folds > 1:
        learnt = LogisticRegression(max_iter=1000)
        columns["both, logistic"] = cross_val_predict(
            learnt, features, wrong, cv=folds, method="predict_proba"
        )[:, 1]
    for field, column in columns.items():
        value, low, high = area(wrong, column)
        print(f"  {field:20} {value:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    for nats in (0.7, DOUBT, 4.6):
        doubted = columns["causal_max"] >= nats
        caught, false = doubted[wrong].mean(), doubted[~wrong].mean()
        print(f"  a token of {nats:.1f} nats or more: {caught:.1%} of wrong, {false:.1%} of right")


def about_unseen(rounds: int) -> list[Case]:
    """Questions of a trained kind, of which the answers are in no training set: which capital, and
    whether it is one, each with other words in every round."""
    drawn, cases = random.Random(7), list[Case]()
    unseen = unseen_countries()
    for name, capital in unseen.items():
        state = f"Anna lives in {name}."
        for number in range(rounds):
            others = drawn.sample([other for other in unseen.values() if other != capital], 3)
            options = drawn.sample([capital, *others], 4)
            cases.append(
                choice(state, "Which capital?", options, [float(o == capital) for o in options])
            )
            word = capital if number % 2 else others[0]
            cases.append(yes_no(state, f"Is the capital {word}?", float(word == capital)))
    return cases


def decisions(model: Model, name: str, cases: Sequence[Case]) -> None:
    """Errors of decisions that their state settles, where the causal mode answers the same and
    where it answers otherwise, by kind of question; and whether it is right then."""
    settings = DecisionSettings(seed=7, verify="abstain")
    rows: list[tuple[str, bool, bool, bool]] = []
    canvas, causal = list[float](), list[float]()
    for state, group in groupby(cases, lambda case: case.state):
        some = {str(number): case for number, case in enumerate(group)}
        questions = {key: case.question for key, case in some.items()}
        for key, answer in model.read_questions(state, questions, settings).items():
            right, best, other = int(np.argmax(some[key].truth)), answer.best, answer.other
            rows.append((some[key].kind, best != right, other is not None, other == right))
            assert answer.causal
            canvas.append(-math.log(max(answer.probabilities[best], 1e-30)))
            causal.append(-math.log(max(answer.causal[best], 1e-30)))
    print(f"\ndecisions, {name}: {len(rows)} settled questions")
    for kind in (None, *dict.fromkeys(row[0] for row in rows)):
        for is_other in (False, True):
            own = [row for row in rows if kind in (None, row[0]) and row[2] is is_other]
            if not own:
                continue
            wrong, mended = sum(row[1] for row in own), sum(row[3] for row in own)
            low, high = interval(wrong, len(own))
            print(
                f"  {kind or 'all':8} {'otherwise' if is_other else 'the same':9} {len(own):5} "
                f"{wrong:4} wrong, {wrong / len(own):.1%} [{low:.1%}, {high:.1%}]"
                + (f"; the causal mode right {mended}" if is_other else "")
            )
    errors = np.array([row[1] for row in rows])
    if 0 < errors.sum() < len(errors):
        for reader, column in (("causal", causal), ("canvas", canvas)):
            value, low, high = area(errors, np.array(column))
            print(f"  {reader:20} {value:.3f} [{low:.3f}, {high:.3f}]", flush=True)


def redo(model: Model, count: int, cap: int, times: int = 1) -> None:
    """Grids after `cap` steps, those whose doubted tokens have begun again as noise with all else
    pinned, of which the likelier is kept, and those after twice as many steps."""
    requests, expected = about_grids(model, count, cap)
    length, vocabulary = model.config.canvas_length, model.config.vocab_size
    ends = replies(model, requests)
    texts = [end.reply.text for end, _, _ in ends]
    kept = [end.reply.verification.canvases[0] for end, _, _ in ends]
    canvases = [draft.token_ids.tolist() for _, draft, _ in ends]
    steps = sum(sum(end.account.steps) for end, _, _ in ends)
    before, forwards = texts[:], 0
    for turn in range(times):
        again = [number for number, each in enumerate(kept) if any(each.doubted)]
        fresh = []
        for number in again:
            noise = Noise(77_000 + number, turn).tokens(0, length, vocabulary).tolist()
            doubted = [at for at, is_in in enumerate(kept[number].doubted) if is_in]
            given = list(canvases[number])
            for at in doubted:
                given[at] = noise[at]
            pinned = tuple(at for at in range(length) if at not in doubted)
            canvas = GivenCanvas(tuple(given), pinned)
            seed = 90_000 + 1000 * turn + number
            fresh.append(replace(requests[number], canvas=canvas, seed=seed))
        for number, (end, draft, _) in zip(again, replies(model, fresh), strict=True):
            forwards += sum(end.account.steps)
            again_read = end.reply.verification.canvases[0]
            if again_read.log_likelihood > kept[number].log_likelihood:
                kept[number], texts[number] = again_read, end.reply.text
                canvases[number] = draft.token_ids.tolist()
    more, _ = about_grids(model, count, 2 * cap)
    doubled = replies(model, more)
    share: Callable[[Sequence[str]], float] = lambda given: statistics.fmean(  # noqa: E731
        text == wanted for text, wanted in zip(given, expected, strict=True)
    )
    more_steps = sum(sum(end.account.steps) for end, _, _ in doubled)
    print(
        f"redo, cap {cap}, {times} times: exact {share(before):.3f} with {steps / count:.2f} "
        f"forwards; redone {share(texts):.3f} with {(steps + forwards) / count:.2f}; "
        f"cap {2 * cap} {share([end.reply.text for end, _, _ in doubled]):.3f} with "
        f"{more_steps / count:.2f}"
    )


def cost(model: Model, rounds: int, prefix: int = 128) -> None:
    """Medians of interleaved rounds, in seconds of the processor: a late step, and what
    verification adds to a commit and takes
    by itself."""
    network, length = model.network, model.config.canvas_length
    vocabulary = model.config.vocab_size
    config = SamplerConfig(max_steps=rounds + 8, stopping=Never()).over(model.sampler_defaults)
    plan = plan_reply(network, prefix, config, Limits(length, ()), 0)
    slot = network.new_slot(prefix + length)
    begin = torch.randint(vocabulary, (prefix,), generator=torch.Generator().manual_seed(0))
    network.encode([begin[:-1]], [slot])
    (state,) = network.encode_hidden([begin[-1:]], [slot])
    canvas = Canvas.of(CanvasPlan(plan.config, Noise(0, 0)), network)
    denoiser = Denoiser(network, 1)
    ids = Noise(5, 0).tokens(0, length, vocabulary)
    for _ in range(4):
        denoiser.step([canvas], [slot])

    def late_step() -> None:
        denoiser.step([canvas], [slot])

    def commit() -> None:
        network.encode([ids], [slot])
        slot.length = prefix

    def verified_commit() -> None:
        want = Ranks(ids.tolist(), state)
        want.begin(prefix + length)
        (hidden,) = network.encode_hidden([ids], [slot])
        want.add(network.head, prefix, hidden, length)
        want.result()
        slot.length = prefix

    def beside() -> None:
        row_scores(network, [slot], [ids], [state], ranks=True)

    works = {each.__name__: each for each in (late_step, commit, verified_commit, beside)}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            began = time.process_time()
            work()
            seconds[name].append(time.process_time() - began)
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    step = medians["late_step"]
    shown: dict[str, Any] = {name: round(1e3 * own, 3) for name, own in medians.items()}
    added = (medians["verified_commit"] - medians["commit"]) / step
    print(json.dumps(shown | {"unit": "ms", "rounds": rounds}))
    print(
        f"a commit's verification: {added:.2f} late steps; beside: {medians['beside'] / step:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--redo", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("-m", "--model")
    given = parser.parse_args()
    model = sfumato.load(given.model, device="cpu")
    print(f"{model!r}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    if given.cost:
        cost(model, rounds=given.count)
        return
    if given.redo:
        for cap in CAPS:
            for times in (1, 2):
                redo(model, given.count, cap, times)
        return
    for cap in CAPS:
        report(f"hard grids after {cap} steps", grids(model, given.count, cap))
    report("capitals, known and unseen", capitals(model, seeds=1))
    report("holes of unknown length", lengths(model, given.count))
    trained = [case for case in held_out(7, 2 * given.count) if not case.open]
    decisions(model, "of trained kinds", trained)
    decisions(model, "about unseen countries", about_unseen(rounds=3))


if __name__ == "__main__":
    main()
