"""Fewer forwards: right answers against denoising forwards, of ways to write a canvas, in pairs.

    .venv/bin/python -m benchmarks.forwards [--tasks 2000] [--ways default "patience 1"] [--caps 48]

The embedded model does held-out tasks: hard Sudokus, texts with holes, objects in JSON, and its
questions. Every way has the same tasks and the same noise, so that ways are compared task by task:
intervals are of a bootstrap over tasks. Prints a row for each way and cap, writes them as JSON with
--json, and draws the curves with --plot. What is not an option of the package is defined here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sfumato
from sfumato import Engine, EngineConfig, Request, SamplerConfig
from sfumato.bench.environment import commit, cpu_name
from sfumato.bench.evaluate import held_out_fills, held_out_json, is_same_object
from sfumato.diffusion.sampler import CanvasView, EntropyBound, StableAndConfident, StepView
from sfumato.options.limits import MOST_STEPS
from sfumato.svg import Point, curves
from sfumato.train.embedded_data import ask, evaluation_sets

SHARES = {"grids": 0.5, "fills": 0.2, "json": 0.2, "questions": 0.1}  # of the tasks
ROWS = 32  # requests at a time
DRAWS = 2_000  # of the bootstrap
CAP = 48  # steps at most, of the base


@dataclass(frozen=True)
class LeaveOneOut:
    """Takes the evidence of a position's own token out of its distribution (arXiv 2605.22765).

    Where a token is right with probability `alpha` and else any of V, it multiplies the odds of
    itself by 1 + alpha V / (1 - alpha). renoised: only where the step before has put noise, which a
    token other than the argmax shows."""

    alpha: float = 0.9
    renoised: bool = True
    vocabulary: int = 106

    def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Tensor:
        bias = -math.log1p(self.alpha * self.vocabulary / (1 - self.alpha))
        ids = torch.arange(first_id, first_id + scores.shape[-1], device=scores.device)
        own = view.tokens[:, None] == ids
        if self.renoised:
            own = own & (view.tokens != view.history[-1])[:, None]
        return scores + bias * own


@dataclass(frozen=True)
class StableBeginning:
    """Accepts what the entropy bound does, and the beginning of the canvas whose argmax is the same
    as in the last `steps` steps (arXiv 2603.04514 commits such a beginning early)."""

    steps: int = 1
    bound: float = 0.1  # nats

    @property
    def history(self) -> int:
        return self.steps

    def accept(self, view: StepView) -> Tensor:
        same = (view.history[..., -self.steps :, :] == view.stats.argmax).all(dim=-2)
        return EntropyBound(self.bound).accept(view) | (same.long().cumprod(dim=-1) > 0)


@dataclass(frozen=True)
class Corrector:
    """Every second step puts noise also on the `count` least sure positions that the entropy bound
    accepts, so that they are drawn again with all others known (after arXiv 2602.21185)."""

    count: int = 4
    bound: float = 0.1  # nats

    def accept(self, view: StepView) -> Tensor:
        accepted = EntropyBound(self.bound).accept(view)
        entropy = view.stats.entropy.masked_fill(~accepted | view.pinned, -1.0)
        ranks = entropy.argsort(dim=-1, descending=True, stable=True)
        places = torch.arange(entropy.shape[-1], device=entropy.device) < self.count
        dropped = torch.zeros_like(accepted).scatter(-1, ranks, places) & (entropy > 0)
        return accepted & ~(dropped & (view.step % 2 == 0))


def _stop(stability: int, confidence: float = 0.005) -> SamplerConfig:
    return SamplerConfig(stopping=StableAndConfident(stability, confidence))


WAYS: dict[str, SamplerConfig] = {
    "default": SamplerConfig(),
    "patience 1": SamplerConfig(patience=1),
    "patience 2": SamplerConfig(patience=2),
    "confidence 0.05": SamplerConfig(stopping=StableAndConfident(1, 0.05)),
    "stability 0": SamplerConfig(stopping=StableAndConfident(0)),
    "settle at end": SamplerConfig(settle_at_end=True),
    "entropy bound 1": SamplerConfig(sampler=EntropyBound(1.0)),
    "leave one out 0.9": SamplerConfig(processors=(LeaveOneOut(),)),
    "leave one out 0.5": SamplerConfig(processors=(LeaveOneOut(0.5),)),
    "leave one out 0.9, all": SamplerConfig(processors=(LeaveOneOut(renoised=False),)),
    "stable beginning": SamplerConfig(sampler=StableBeginning()),
    "careful": SamplerConfig(sampler=Corrector(), stopping=StableAndConfident(2)),
    "canvas 16": SamplerConfig(canvas_length=16),
}
"""How canvases are written, by name. What is no option of the package lost, and is defined here."""


@dataclass(frozen=True)
class Item:
    """A task: its request, without a sampler, and what is right."""

    kind: str
    request: Request
    is_right: Callable[[sfumato.Reply], bool]


def items(model: sfumato.Model, count: int, seed: int) -> list[Item]:
    """The tasks, which are the same for the same arguments. Fewer, where a kind has not so many."""
    sizes = {kind: round(count * share) for kind, share in SHARES.items()}
    length = model.config.canvas_length
    made = []
    sets = evaluation_sets(seed, sizes["grids"])
    for kind, name in (("grids", "sudoku_hard"), ("questions", "questions")):
        for task in sets[name][: sizes[kind]]:
            made.append(_reply(kind, task.messages, task.expected, 2 * length, str.__eq__))
    for fill in held_out_fills(seed, sizes["fills"]):
        ids = model.fills.no_prompt if fill.messages is None else None
        request = Request(messages=fill.messages, ids=ids, parts=fill.parts)
        right = lambda reply, text=fill.text: reply.filled.text == text  # noqa: E731
        made.append(Item("fills", request, right))
    for each in held_out_json(seed, sizes["json"]):
        made.append(_reply("json", ask(each.request), each.text, 3 * length, is_same_object))
    return [
        replace(item, request=replace(item.request, seed=seed * 1_000_003 + number))
        for number, item in enumerate(made)
    ]


def _reply(
    kind: str, messages: Any, expected: str, most: int, same: Callable[[str, str], bool]
) -> Item:
    request = Request(messages=messages, max_tokens=most, retry_empty=False)
    return Item(kind, request, lambda reply: same(reply.text, expected))


def measure(model: sfumato.Model, tasks: Sequence[Item], config: SamplerConfig) -> np.ndarray:
    """Of each task whether it is right, its forwards, its canvases, and positions that forwards
    had: float64 [tasks, 4]. A canvas as long as the holes say takes a fill's own length."""
    context = 256 + 4 * model.config.canvas_length
    limits = EngineConfig(
        slots=ROWS, context=context, queue=len(tasks), snapshot_bytes=0, max_steps=MOST_STEPS
    )
    rows, length = [], config.canvas_length or model.config.canvas_length
    engine = Engine(model, limits)
    handles = []
    for item in tasks:
        own = replace(config, canvas_length=None) if item.kind == "fills" else config
        handles.append(
            engine.submit(replace(item.request, sampler=own, id=sfumato.engine.new_id()))
        )
    while engine.step():
        pass
    engine.close()
    for item, handle in zip(tasks, handles, strict=True):
        reply, account = handle.result(), handle.terminal.account
        forwards = sum(account.steps)
        rows.append((item.is_right(reply), forwards, len(account.steps), forwards * length))
    return np.array(rows, dtype=np.float64)


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.nanpercentile(values, (2.5, 97.5)).tolist()
    return low, high


def compare(base: np.ndarray, other: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Figures of a way, and of its difference from the base over the same tasks, with intervals of
    95 %. "above two" is what forwards are over two a canvas of the base."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(base), (DRAWS, len(base)))
    right, forwards = other[:, 0], other[:, 1]
    floor = 2 * base[:, 2]
    above, ours = (base[:, 1] - floor)[picks].sum(1), (forwards - floor)[picks].sum(1)
    return {
        "right": right.mean(),
        "right_interval": _interval(right[picks].mean(1)),
        "forwards": forwards.mean(),
        "forwards_interval": _interval(forwards[picks].mean(1)),
        "canvases": other[:, 2].mean(),
        "positions": other[:, 3].mean(),
        "right_more": (right - base[:, 0]).mean(),
        "right_more_interval": _interval((right - base[:, 0])[picks].mean(1)),
        "forwards_ratio": forwards.sum() / base[:, 1].sum(),
        "above_two_ratio": (forwards - floor).sum() / (base[:, 1] - floor).sum(),
        "above_two_interval": _interval(ours / np.where(above == 0, np.nan, above)),
    }


def cells(figures: dict[str, Any]) -> str:
    """Right, forwards, right ones more than the base has, and forwards above two, as cells."""
    low, high = (100 * each for each in figures["right_more_interval"])
    least, most = figures["above_two_interval"]
    return (
        f"{figures['right']:.1%} | {figures['forwards']:.2f} | {100 * figures['right_more']:+.1f} "
        f"({low:+.1f} to {high:+.1f}) | {figures['above_two_ratio']:.2f} ({least:.2f} to "
        f"{most:.2f}) | {figures['canvases']:.2f} | {figures['positions']:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--tasks", type=int, default=2000, help="of all kinds (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and noise (%(default)s)")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--caps", nargs="+", type=int, default=[CAP], help="steps at most")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--plot", help="SVG of right answers against forwards")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = sfumato.load()
    tasks = items(model, options.tasks, options.seed)
    kinds = {"all": np.ones(len(tasks), bool)}
    kinds |= {kind: np.array([task.kind == kind for task in tasks]) for kind in SHARES}
    print({kind: int(rows.sum()) for kind, rows in kinds.items()}, cpu_name(), commit())
    print(
        "| way | steps | tasks | right | forwards | more right | above two | canvases | positions |"
    )
    base = measure(model, tasks, WAYS["default"])
    reports, lines = list[dict[str, Any]](), dict[str, list[Point]]()
    # Those without a cap first, and files after each: a run that is broken off has them.
    for cap, way in itertools.product(sorted(options.caps, reverse=True), options.ways):
        is_base = way == "default" and cap == CAP
        rows = base if is_base else measure(model, tasks, replace(WAYS[way], max_steps=cap))
        for kind, at in kinds.items():
            figures = compare(base[at], rows[at])
            reports.append({"way": way, "cap": cap, "kind": kind, **figures})
            print(f"| {way} | {cap} | {kind} | {cells(figures)} |", flush=True)
            if kind == "all":
                point = Point(figures["forwards"], figures["right"], *figures["right_interval"])
                lines.setdefault(way, []).append(point)
        if options.json:
            Path(options.json).write_text(json.dumps(reports))
        if options.plot:
            Path(options.plot).write_text(drawn(lines))


def drawn(lines: dict[str, list[Point]]) -> str:
    """The curves as an SVG, from a multiple of 5 % on."""
    ordered = {way: sorted(points) for way, points in lines.items()}
    lowest = min(point.low or 0.0 for points in lines.values() for point in points)
    axes = "denoising forwards of a task", "share of right answers"
    return curves(ordered, *axes, bottom=math.floor(20 * lowest) / 20, top=1.0)


if __name__ == "__main__":
    main()
