"""What decisions cost: questions read from a state, against one question, a step, and chats.

    python benchmarks/decisions.py MODEL.gguf [--rounds 5] [--only read step]

MODEL may have random weights (random_checkpoint.py): answers do not matter here. Contenders of a
ratio run in turn, and figures are medians over rounds, but for the steps of chats, whose 95th
percentile counts. Parts: `questions` (ten against one, on a cached state and with a cold one of
2,048 tokens), `batch` (64 reads at once against one by one), `step` (the canvas of a read, width
32, against a whole step of width 256), `chats` (steps of 8 chats beside a client that asks 100
questions again and again), `fair` (one question behind 1,000). Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import sfumato
from sfumato import Engine, EngineConfig, Model, Request, SamplerConfig
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.constraints.decision_plan import DecisionSettings, NoiseKey, Read, Target
from sfumato.diffusion.constraints.questions import Question, YesNoQuestion
from sfumato.diffusion.constraints.read import (
    CanvasRow,
    OpenRead,
    next_chunk,
    read_canvases,
    run_chunks,
)
from sfumato.diffusion.constraints.read_template import BETWEEN, NOISE, ReadCanvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.step import Denoiser
from sfumato.engine import DecisionRequest
from sfumato.model.cache import Slot

WORDS = "the order was paid twice and no one has answered my third mail about it yet".split()  # noqa: SIM905
SLOTS, CONTEXT = 10, 4096
FULL, WIDTH, READS = 256, 32, 64

Figures = list[tuple[str, float, str]]
"""Check, ratio, goal."""


def by_words(model: Model) -> Callable[[str], list[int]]:
    """A tokenizer in which words are tokens: random models have one of characters, with which a
    question takes four times the tokens that it has in a real one."""
    first, size = 300, model.config.vocab_size - 300

    def encode(text: str) -> list[int]:
        pieces = re.findall(r"\w+|\n+|[^\w\s]", text)
        return [first + zlib.crc32(piece.encode()) % size for piece in pieces]

    return encode


def state_text(tokens: int, seed: int = 0) -> str:
    """A text of so many words, which no other seed's text begins with."""
    return f"{seed} " + " ".join(WORDS[i % len(WORDS)] for i in range(tokens - 1))


def questions(count: int) -> dict[str, Question]:
    return {f"q{i}": YesNoQuestion(f"Is number {i} true of this case?") for i in range(count)}


def medians(rounds: int, **contenders: Callable[[], Any]) -> dict[str, float]:
    """Seconds of each contender, which run in turn; the first round counts for nothing."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def decide(engine: Engine, state: str, count: int) -> None:
    handle = engine.decide(DecisionRequest(state, questions(count)))
    while handle.terminal is None:
        engine.step()
    handle.result()


def of_questions(model: Model, rounds: int) -> Figures:
    engine = Engine(model, EngineConfig(slots=2, context=CONTEXT))
    hot = state_text(256)
    seeds = iter(range(1, 10**6))

    def cold(count: int) -> Callable[[], None]:
        return lambda: decide(engine, state_text(2048, next(seeds)), count)

    warm = medians(rounds, one=lambda: decide(engine, hot, 1), ten=lambda: decide(engine, hot, 10))
    fresh = medians(max(1, rounds // 2), one=cold(1), ten=cold(10))
    return [
        ("ten questions / one, cached state", warm["ten"] / warm["one"], "≤ 4 (180M), ≤ 3 (26B)"),
        ("ten questions / one, cold state", fresh["ten"] / fresh["one"], "≤ 1.5"),
    ]


def of_batch(model: Model, rounds: int) -> Figures:
    plan = model.plan_decision(state_text(256), questions(READS))
    slot = encoded(model, plan.prefix)

    def opened() -> list[OpenRead]:
        return [OpenRead(read, slot) for read in plan.reads]

    def apart() -> None:
        for read in opened():
            run_chunks(model.network, [next_chunk(read, 1024)])

    def together() -> None:
        run_chunks(model.network, [next_chunk(read, 1024) for read in opened()])

    seconds = medians(rounds, apart=apart, together=together)
    ratio = seconds["apart"] / seconds["together"]
    return [(f"{READS} reads one by one / in a batch", ratio, "≥ 1 on a CPU, ≥ 4 on a GPU")]


def encoded(model: Model, ids: Sequence[int]) -> Slot:
    slot = model.network.new_slot(len(ids))
    model.network.encode([torch.tensor(ids)], [slot])
    return slot


def of_step(model: Model, rounds: int) -> Figures:
    """Steps of one canvas after another, the first of them not counted."""
    network = model.network
    reads = model.read_template
    ids = [*reads.head, *reads.encode(state_text(256))]
    slot, denoiser = encoded(model, ids), Denoiser(network, rows=1)
    width = min(FULL, model.config.canvas_length)
    sampler = SamplerConfig(max_steps=48, canvas_length=width).over(model.sampler_defaults)
    canvases: list[Canvas] = []
    labels = tuple(reads.encode("yes no"))
    template = (NOISE, reads.end_id, *[reads.filler_id] * (WIDTH - 2))
    text = f"{BETWEEN}Question: Is it true?\nyes\nno\nAnswer yes or no."
    question_ids = [*reads.encode(text), *reads.tail]
    pinned = ReadCanvas(template, (0,), (labels,))
    target = Target("q", 0, 0, ((0, None), (1, None)))
    key = NoiseKey(0, [*ids, *question_ids])
    read = Read(array("i", question_ids), (pinned,), (target,), key, DecisionSettings())

    def opened() -> OpenRead:
        return OpenRead(read, slot)

    ready = opened()
    network.encode_beside([ready.ids], [ready.suffix])

    def row(label_mass: bool) -> list[CanvasRow]:
        return [CanvasRow(ready.suffix, pinned, read.key, 0, label_mass)]

    def step() -> None:
        if not canvases or canvases[-1].done:
            noise = Noise(0, len(canvases))
            canvases.append(Canvas(sampler, noise, model.config.vocab_size, network.device))
        denoiser.step(canvases[-1:], [slot])

    seconds = medians(
        rounds,
        step=step,
        rows=lambda: read_canvases(network, row(False), 1).fetch(),
        mass=lambda: read_canvases(network, row(True), 1).fetch(),
        encode=lambda: network.encode_beside([ready.ids], [opened().suffix]),
    )
    of = f"/ a step of width {width}"
    return [
        (f"read of width {WIDTH}, label rows {of}", seconds["rows"] / seconds["step"], "≤ 0.08"),
        (f"read of width {WIDTH}, label mass {of}", seconds["mass"] / seconds["step"], "≤ 0.15"),
        (f"question of {len(question_ids)} tokens {of}", seconds["encode"] / seconds["step"], "—"),
    ]


def of_chats(model: Model, steps: int) -> Figures:
    alone, beside = (p95(chat_steps(model, steps, reading)) for reading in (False, True))
    return [("step p95 of 8 chats beside 100 questions / alone", beside / alone, "≤ 2")]


def chat_steps(model: Model, steps: int, reading: bool) -> Iterator[float]:
    """Seconds of so many steps."""
    engine = Engine(model, EngineConfig(slots=SLOTS, context=CONTEXT))
    settings = SamplerConfig(max_steps=48, ignore_eos=True)
    for seed in range(8):
        engine.submit(Request("Tell me all.", max_tokens=2048, seed=seed, sampler=settings))
    for _ in range(3):
        engine.step()
    hot, handle = state_text(256), None
    for _ in range(steps):
        if reading and (handle is None or handle.terminal is not None):
            handle = engine.decide(DecisionRequest(hot, questions(100)))
        began = time.perf_counter()
        engine.step()
        yield time.perf_counter() - began
    engine.close()


def p95(seconds: Iterator[float]) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def of_fairness(model: Model, rounds: int) -> Figures:
    engine = Engine(model, EngineConfig(slots=2, context=CONTEXT))
    seeds = iter(range(1, 10**6))

    def one() -> None:
        decide(engine, state_text(256, next(seeds)), 1)

    alone = medians(rounds, one=one)["one"]
    large = engine.decide(DecisionRequest(state_text(256), questions(1000)))
    for _ in range(3):
        engine.step()
    behind = medians(rounds, one=one)["one"]
    assert large.terminal is None, "more rounds than a thousand questions take"
    engine.close()
    return [("one question behind 1,000 / alone", behind / alone, "≤ 5")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="of chats (%(default)s)")
    parser.add_argument("--threads", type=int, help="of torch and the kernels")
    parts: dict[str, Callable[[Model], Figures]] = {
        "questions": lambda model: of_questions(model, args.rounds),
        "batch": lambda model: of_batch(model, args.rounds),
        "step": lambda model: of_step(model, args.rounds),
        "chats": lambda model: of_chats(model, args.steps),
        "fair": lambda model: of_fairness(model, args.rounds),
    }
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model = sfumato.load(args.model)
    template = replace(model.read_template, encode=by_words(model))
    model.__dict__["read_template"] = template  # where it is remembered
    figures: Figures = []
    for name in args.only:
        for figure in parts[name](model):
            figures.append(figure)
            print("{:52}  {:8.3f}  {}".format(*figure), flush=True)
    print(json.dumps({"model": args.model.name} | {check: ratio for check, ratio, _ in figures}))


if __name__ == "__main__":
    main()
