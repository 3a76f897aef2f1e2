"""Tokens per forward by the sampler's settings, with what they cost in quality; the time of a
forward by the width of the canvas.

    .venv/bin/python -m benchmarks.tokens_per_forward texts [--count 200] [--seeds 2]
    .venv/bin/python -m benchmarks.tokens_per_forward times [--presets qwen3-0.6b sdar-1.7b]

`texts` answers the held-out replies of `sfumato eval` with both packaged models, at several
settings each; the first is the checkpoint's own. `times` makes random Qwen3 networks of blocks, in
which only the block differs, and takes steps of a canvas and commits behind a prompt, widths in
turns; medians over all rounds. Each prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from benchmarks.turns import OtherWork

import sfumato
from sfumato import Engine, EngineConfig, Request, SamplerConfig, ops
from sfumato.bench.environment import commit, cpu_name
from sfumato.bench.evaluate import evaluate
from sfumato.bench.subject import random_subject
from sfumato.diffusion.sampler import EvenPace, LowConfidence
from sfumato.train.embedded_data import evaluation_sets

SETS = ("sudoku_hard", "questions", "chat")
_BOUNDS, _MOST = (1.0,), (4, 2, 1)
_THRESHOLDS, _PACES = (0.3, 0.7, 0.99), (4, 2, 1)
SETTINGS: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "embedded": {
        "as it is": {},
        **{f"entropy bound {bound}": {"entropy_bound": bound} for bound in _BOUNDS},
        **{f"steps: {n} at most": {"max_steps": n} for n in _MOST},
    },
    "embedded-masks": {
        "as it is": {},
        **{f"threshold {value}": {"threshold": value} for value in _THRESHOLDS},
        **{f"pace alone, steps: {n}": {"threshold": 1.0, "max_steps": n} for n in _PACES},
    },
}
"""Of each packaged model: options of a request, by their name in the table."""

STEPS = 4  # of a canvas: enough of them for a median, and few for a wide canvas
CANVASES = 2  # of a reply, of which the last is not encoded
PROMPT = 256  # tokens; whole blocks of any width


def texts(options: argparse.Namespace) -> dict[str, Any]:
    """Prints a row of each setting, and returns all."""
    torch.set_num_threads(1)  # figures, and not times
    print(f"| model | setting | {' | '.join(f'{s}: exact, steps, tok/forward' for s in SETS)} |")
    print(f"|---|---|{'---|' * len(SETS)}")
    sets = [evaluation_sets(seed, options.count) for seed in range(options.seeds)]
    rows = []
    for name in options.models:
        model = sfumato.load(None if name == "embedded" else name)
        for setting, flat in SETTINGS[name].items():
            config, cells, figures = model.sampler_defaults.options(**flat), [], {}
            for at in SETS:
                scores = [
                    evaluate(model, tasks[at][: options.count], config, seed)
                    for seed, tasks in enumerate(sets)
                ]
                exact, steps, tokens = (
                    statistics.fmean(getattr(score, figure) for score in scores)
                    for figure in ("exact", "steps", "tokens_per_forward")
                )
                cells.append(f"{exact:.1%}, {steps:.2f}, **{tokens:.1f}**")
                figures[at] = {"exact": exact, "steps": steps, "tokens_per_forward": tokens}
            print(f"| {name} | {setting} | {' | '.join(cells)} |", flush=True)
            rows.append({"model": name, "setting": setting, "options": dict(flat), **figures})
    return {"count": options.count, "seeds": options.seeds, "rows": rows}


def paced_reply(engine: Engine, ids: Sequence[int], tokens: int, steps: int) -> dict[str, Any]:
    """Seconds of a reply of so many tokens to a prompt of these, each block of it in so many steps
    whatever the tokens' confidence: encoding the prompt, each step, a commit, and what a token
    took in all."""
    sampler = SamplerConfig(
        max_steps=steps, sampler=LowConfidence(1.0), pace=EvenPace(), ignore_eos=True
    )
    request = Request(ids=ids, max_tokens=tokens, sampler=sampler, seed=0, retry_empty=False)
    handle = engine.submit(request)
    while engine.step():
        pass
    account = handle.terminal.account
    assert set(account.steps) == {steps} and account.output_tokens == tokens, account
    return {
        "prefill_s": account.prefill_s,
        "step_s": account.step_s,
        "commit_s": account.commit_s / (len(account.steps) - 1),  # the last is not encoded
        "token_s": (account.total_s - account.queue_s - account.prefill_s) / tokens,
    }


def times(options: argparse.Namespace) -> dict[str, Any]:
    """Prints a row of each network and width, and returns all."""
    torch.set_num_threads(options.threads)
    print(
        "| network | canvas | a step, ms | for a position | a commit, ms |\n|---|---|---|---|---|"
    )
    rows, work = [], OtherWork()
    for preset in options.presets:
        model = random_subject(preset, options.format).model
        network, own = model.network, model.network.config
        taken: dict[int, list[dict[str, Any]]] = {width: [] for width in options.widths}
        for number in range(options.rounds + 1):
            for width in options.widths if number % 2 else options.widths[::-1]:
                network.config = replace(own, canvas_length=width)
                context = PROMPT + CANVASES * width
                engine = Engine(model, EngineConfig(slots=1, context=context, snapshot_bytes=0))
                ids = [(7919 * i) % (own.vocab_size - 300) + 5 for i in range(PROMPT)]
                # A new engine has no prefix to reuse.
                reply = paced_reply(engine, ids, CANVASES * width, min(STEPS, width))
                engine.close()
                if number:  # the first round warms up
                    taken[width].append(reply)
        for width, replies in taken.items():
            step = 1e3 * statistics.median(s for each in replies for s in each["step_s"])
            encoded = 1e3 * statistics.median(each["commit_s"] for each in replies)
            cells = f"{step:.1f} | {step / width:.2f} | {encoded:.1f}"
            print(f"| {preset} | {width} | {cells} |", flush=True)
            figures = {"step_ms": step, "commit_ms": encoded}
            rows.append({"network": preset, "width": width, **figures})
        del model, network
    others = work.share()
    print(
        f"{cpu_name()}, {options.threads} threads; {ops.backend}; other programs took {others:.0%} "
        f"of the processors; load {os.getloadavg()[0]:.1f}."
    )
    about = {"format": options.format, "threads": options.threads, "rounds": options.rounds}
    return about | {"prompt": PROMPT, "backend": ops.backend, "other_work": others, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("texts", help="tokens per forward by settings")
    part.add_argument("--models", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    part.add_argument("--count", type=int, default=200, help="tasks of a set (%(default)s)")
    part.add_argument("--seeds", type=int, default=2, help="of tasks and noise (%(default)s)")
    part.set_defaults(run=texts)
    part = parts.add_parser("times", help="the time of a forward by widths")
    part.add_argument("--presets", nargs="+", default=["qwen3-0.6b", "sdar-1.7b"])
    part.add_argument("--widths", nargs="+", type=int, default=[4, 16, 32, 256])
    part.add_argument("--format", default="q8_0", help="(%(default)s)")
    part.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    part.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    part.set_defaults(run=times)
    options = parser.parse_args()
    about = {"benchmark": f"tokens_per_forward {options.part}", "commit": commit()}
    print(json.dumps(about | options.run(options)))


if __name__ == "__main__":
    main()
