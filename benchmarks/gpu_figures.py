"""The figures of a release on a GPU: goals, what was measured, what the model of the step predicts.

For `gpu_first.py`.  Each says how many experts of a layer its tokens choose, and whether the soft
embedding is exact and the whole vocabulary is scored: a step that leaves some out is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu_step import (
    first_draft_ms,
    outside_ms,
    prefill_rate,
    read_ms,
    step_times,
    touched_in_prefill,
    touched_in_step,
)

from sfumato.bench.environment import PeakMemory
from sfumato.bench.measure import measure
from sfumato.bench.report import Case, Work
from sfumato.bench.step_cost import (
    DeviceLimits,
    StepShape,
    StepTime,
    experts_touched,
    network_costs,
    step_time,
)
from sfumato.bench.subject import Subject
from sfumato.diffusion.sampler_config import REFERENCE, fixed_steps

CANVASES, FAST_STEPS = 4, 16  # of the end-to-end figure
QUESTIONS, QUESTION_TOKENS, READ_WIDTH = 10, 24, 32
DRAFT_PROMPT, PREFILL, LONG_PREFIX = 500, 4096, 32768


@dataclass(frozen=True)
class Setting:
    """What figures are taken of. scale: divides the numbers of tokens, for networks that are small
    enough to be tested."""

    subject: Subject
    limits: DeviceLimits
    prefix: int
    steps: int
    scale: int = 1
    kernel_errors: Mapping[str, float] = field(default_factory=dict)
    """Of each kernel's case, the largest error of a result in units of torch's own."""

    def predicted(self, shape: StepShape) -> StepTime:
        return step_time(network_costs(self.subject.network, shape), self.limits)

    @property
    def width(self) -> int:
        return self.subject.network.config.canvas_length


@dataclass(frozen=True)
class Figure:
    """goal: at most, or at least where `rate`."""

    name: str
    unit: str
    goal: float
    rate: bool
    taken: Callable[[Setting], tuple[float | None, float | None]]
    """Gives what was measured and what is predicted; None: not known."""
    touched: Callable[[Setting], float] | None
    """How many experts of a layer its tokens choose, mean of all layers; None: no layers run."""


def figures(setting: Setting) -> Iterator[dict[str, Any]]:
    """Each figure once it is taken; one that fails says why, and the next is taken."""
    for figure in FIGURES:
        finding: dict[str, Any] = {
            "figure": figure.name, "unit": figure.unit, "goal": figure.goal,
            "goal_is": "at least" if figure.rate else "at most",
        }  # fmt: skip
        try:
            measured, predicted = figure.taken(setting)
            if isinstance(predicted, StepTime):
                finding["floor"], predicted = predicted.floor_ms, predicted.predicted_ms
            finding |= {"measured": measured, "predicted": predicted}
            finding |= _conditions(setting, figure)
            if measured is not None:
                better = measured >= figure.goal if figure.rate else measured <= figure.goal
                finding["reached"] = better
        except Exception as error:  # a figure may run out of memory, and others then do not
            finding["failed"] = f"{type(error).__name__}: {error}"[:500]
        yield finding


def _conditions(setting: Setting, figure: Figure) -> dict[str, Any]:
    """What of the network the figure's tokens run through."""
    if figure.touched is None:
        return {}
    network, config = setting.subject.network, fixed_steps(setting.steps).over(REFERENCE)
    is_exact = not config.soft_skip and config.soft_top_k is None
    return {
        "experts_touched": figure.touched(setting),
        "experts": network.config.num_experts,
        "soft_embedding": "exact" if is_exact else "approximate",
        "vocabulary": network.head.vocab_size,
    }


def _canvases(rows: int, width: int | None = None) -> Callable[[Setting], float]:
    def touched(setting: Setting) -> float:
        own = width and min(width, setting.width)
        return touched_in_step(setting.subject.network, rows, setting.prefix, own)

    return touched


def _step(rows: int) -> Callable[[Setting], tuple[float, float]]:
    def taken(setting: Setting) -> tuple[float, float]:
        network = setting.subject.network
        times = step_times(network, rows, setting.prefix, setting.steps)
        shape = StepShape(rows, setting.width, setting.prefix)
        return times["median_ms"], setting.predicted(shape)

    return taken


def _touched(setting: Setting) -> tuple[float, float]:
    network = setting.subject.network
    return _canvases(1)(setting), experts_touched(network.config, setting.width)


def _end_to_end(setting: Setting) -> tuple[float | None, float]:
    """Visible tokens a second of one request; commits counted."""
    tokens, width = CANVASES * setting.width, setting.width
    with PeakMemory() as memory:
        report = measure(
            setting.subject,
            Work([setting.prefix], warmup=1, repeats=2),
            [Case(tokens)],
            fixed_steps(FAST_STEPS),
            memory,
        )
    speed = report.cases[0].summaries()["visible_tps"]
    step = setting.predicted(StepShape(1, width, setting.prefix + tokens // 2)).predicted_ms
    commit = setting.predicted(StepShape(1, width, setting.prefix, encodes=True)).predicted_ms
    prefill = setting.predicted(StepShape(1, setting.prefix, 0, encodes=True)).predicted_ms
    needed = CANVASES * FAST_STEPS * step + (CANVASES - 1) * commit + prefill
    return speed and speed["p50"], 1e3 * tokens / needed


def _outside(setting: Setting) -> tuple[float | None, float]:
    network = setting.subject.network
    step_ms = step_times(network, 1, setting.prefix, setting.steps)["median_ms"]
    predicted = setting.predicted(StepShape(1, setting.width, setting.prefix)).outside_ms
    return outside_ms(network, setting.prefix, setting.steps, step_ms), predicted


def _prefill(setting: Setting) -> tuple[float, float]:
    tokens = PREFILL // setting.scale
    predicted = setting.predicted(StepShape(1, tokens, 0, encodes=True)).predicted_ms
    return prefill_rate(setting.subject.network, tokens, tokens), 1e3 * tokens / predicted


def _prompt(setting: Setting) -> float:
    return touched_in_prefill(setting.subject.network, PREFILL // setting.scale)


def _long(setting: Setting) -> tuple[float, StepTime]:
    prefix = LONG_PREFIX // setting.scale
    times = step_times(setting.subject.network, 1, prefix, setting.steps)
    return times["median_ms"], setting.predicted(StepShape(1, setting.width, prefix))


def _read(questions: int, tokens: int) -> Callable[[Setting], tuple[float, float]]:
    def taken(setting: Setting) -> tuple[float, float]:
        width = min(READ_WIDTH, setting.width)
        measured = read_ms(setting.subject.network, questions, tokens, setting.prefix, width)
        shape = StepShape(questions, width, setting.prefix + tokens, reads=True)
        predicted = setting.predicted(shape).predicted_ms
        if tokens:
            texts = StepShape(questions, tokens, setting.prefix, encodes=True)
            predicted += setting.predicted(texts).predicted_ms
        return measured, predicted

    return taken


def _first_draft(setting: Setting) -> tuple[float, float]:
    tokens = DRAFT_PROMPT // setting.scale
    prompt = setting.predicted(StepShape(1, tokens, 0, encodes=True)).predicted_ms
    step = setting.predicted(StepShape(1, setting.width, tokens)).predicted_ms
    return first_draft_ms(setting.subject.network, tokens), prompt + step


def _kernel_error(setting: Setting) -> tuple[float | None, None]:
    """The largest of all kernels."""
    return max(setting.kernel_errors.values(), default=None), None


_CANVAS, _READS = _canvases(1), _canvases(QUESTIONS, READ_WIDTH)
FIGURES = (
    Figure("step, 1 row", "ms", 15, False, _step(1), _CANVAS),
    Figure("step, 4 rows", "ms", 27, False, _step(4), _canvases(4)),
    Figure("step, 16 rows", "ms", 85, False, _step(16), _canvases(16)),
    Figure("experts touched in a layer", "of all", 120, True, _touched, None),
    Figure(
        *("16 steps a canvas, four canvases, end to end", "tok/s", 950, True, _end_to_end, _CANVAS)
    ),
    Figure("outside the layers", "ms", 2.2, False, _outside, _CANVAS),
    Figure("prefill of 4,096 tokens", "tok/s", 40_000, True, _prefill, _prompt),
    Figure("step at a prefix of 32,768", "ms", 25, False, _long, _CANVAS),
    Figure(
        *("one read of width 32, prompt cached", "ms", 13, False, _read(1, 0)),
        _canvases(1, READ_WIDTH),
    ),
    Figure("ten questions read apart", "ms", 30, False, _read(QUESTIONS, QUESTION_TOKENS), _READS),
    Figure("first draft after 500 tokens", "ms", 50, False, _first_draft, _CANVAS),
    Figure("kernel error, of torch's own", "times", 1.2, False, _kernel_error, None),
)
