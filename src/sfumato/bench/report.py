"""A benchmark: its requests and settings, its figures, each with its one definition, and reports.

A report is a table for people, JSON for programs, CSV for spreadsheets, or a picture. A
measurement is a mapping from a metric's key to the values found: one for each request, step or
canvas, as the definition says. What was not found has no key, and is never guessed. Knows no
model, no server, and not how figures are taken.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from sfumato.refused import Refused
from sfumato.text.messages import check_messages
from sfumato.weights.errors import quoted

ABSENT = "—"
_COLUMNS = ("p50", "p95", "min", "max")
_SUFFIXES = (".png", ".svg")  # of pictures


Messages = list[dict[str, Any]]
Prompt = Messages | int
"""A conversation, or a number of synthetic tokens."""

Job = tuple[Prompt, int]
"""A request: its prompt and its seed."""

QUESTIONS = (
    "What is the capital of France?",
    "Name the planets of the solar system.",
    "Why is the sky blue?",
)
"""The prompts where the user names none and the model reads text."""


@dataclass(frozen=True)
class Work:
    """The requests of a case: every prompt `repeats` times, after `warmup` uncounted requests.
    Repeat r draws with `seed` + r."""

    prompts: Sequence[Prompt]
    warmup: int = 1
    repeats: int = 3
    seed: int = 0

    def warmups(self) -> list[Job]:
        """The requests that do not count."""
        return [(self.prompts[i % len(self.prompts)], self.seed) for i in range(self.warmup)]

    def requests(self) -> list[Job]:
        """The requests that do."""
        return [(p, self.seed + r) for r in range(self.repeats) for p in self.prompts]


@dataclass(frozen=True)
class Case:
    """One setting of what a benchmark varies; None leaves it as it is."""

    max_tokens: int
    threads: int | None = None
    context: int | None = None  # tokens that every prompt is filled up to
    concurrency: int | None = None  # requests at a time


def cases(
    max_tokens: Iterable[int],
    threads: Iterable[int] | None = None,
    context: Iterable[int] | None = None,
    concurrency: Iterable[int] | None = None,
) -> list[Case]:
    """Every combination, the last named varying fastest."""
    absent = (None,)
    every = product(max_tokens, threads or absent, context or absent, concurrency or absent)
    return [Case(*values) for values in every]


def conversation(text: str) -> Messages:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def read_prompts(text: str, name: str) -> list[Prompt]:
    """Prompts of a file's text: one a line, or JSON objects, one a line, with `messages` or a
    `text`.

    Empty lines do not count; a file whose first line begins with { is read as JSON. Raises
    ValueError naming the file and the line.
    """
    # Not splitlines(): other separators, as U+2028, may be part of a prompt.
    lines = text.removeprefix("\ufeff").split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"{name}: has no prompts; write one a line")
    if not numbered[0][1].lstrip().startswith("{"):
        return [conversation(line.strip()) for _, line in numbered]
    return [_from_json(line, f"{name}:{number}") for number, line in numbered]


def _from_json(line: str, where: str) -> Messages:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refused(where, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused(where, "must be an object with messages or a text")
    if isinstance(value.get("text"), str):
        return conversation(value["text"])
    if "messages" not in value:
        raise Refused(where, f"has {quoted(sorted(value))}, but no messages and no text")
    messages: Messages = value["messages"]
    try:
        check_messages(messages)
    except ValueError as error:
        raise Refused(where, str(error)) from None
    return messages


Group = Literal["waiting", "steps", "where", "speed", "size", "memory"]
Values = dict[str, list[float]]


@dataclass(frozen=True)
class Metric:
    """One figure: its key in JSON and CSV, its name for people, its unit and what it means."""

    key: str
    label: str
    unit: str
    group: Group
    definition: str


METRICS = (
    Metric(
        "load_s", "load", "s", "waiting",
        "Opening the checkpoint and bringing its weights into memory, ready to run. Random "
        "weights are made in memory and have no such time.",
    ),
    Metric(
        "setup_s", "set-up", "s", "waiting",
        "From the request to the start of its prefill: the prompt rendered and tokenized, the "
        "settings checked, the cache slot made.",
    ),
    Metric(
        "prefill_tps", "prefill", "tok/s", "waiting",
        "Prompt tokens over the seconds that encoding them took.",
    ),
    Metric(
        "first_draft_s", "first draft", "s", "waiting",
        "From the request to the first draft: the canvas after one denoising step.",
    ),
    Metric(
        "first_commit_s", "first commit", "s", "waiting",
        "From the request to the first settled canvas.",
    ),
    Metric(
        "first_token_s", "first token", "s", "waiting",
        "From the request to the first visible text, thoughts included. Here that is the first "
        "settled canvas that has any.",
    ),
    Metric(
        "last_token_s", "last token", "s", "waiting",
        "From the request to the last visible text.",
    ),
    Metric(
        "total_s", "whole request", "s", "waiting",
        "From the request to the end of its reply.",
    ),
    Metric(
        "steps_per_canvas", "steps per canvas", "", "steps",
        "Denoising steps of a canvas. Of a server that reports only sums: the mean of each reply.",
    ),
    Metric(
        "step_ms", "a step", "ms", "steps",
        "One denoising step: the forward, the pass over the vocabulary and the sampler. Of a "
        "server: the mean of each reply.",
    ),
    Metric(
        "step_floor_ms", "a step, floor", "ms", "steps",
        "What no program can do a step in on this device: of each kernel the larger of its bytes "
        "over the bandwidth and its products over their rate, for the case's requests at a time. "
        "Only where the device is known (docs/hardware.md).",
    ),
    Metric(
        "step_predicted_ms", "a step, predicted", "ms", "steps",
        "The floor with what kernels are taken to reach of it, and the launches.",
    ),
    Metric(
        "commit_ms", "a commit", "ms", "steps",
        "Encoding a settled canvas into the prefix, mean of each reply that has more than one "
        "canvas; the last is never encoded.",
    ),
    Metric(
        "tokens_per_forward", "tokens per forward", "", "steps",
        "Visible tokens of a reply over its denoising steps. Commits are not counted.",
    ),
    Metric(
        "where_step_ms", "a step, timed apart", "ms", "where",
        "One denoising step of the pass with timers (--where): the sum of the parts below.",
    ),
    Metric(
        "attention_ms", "attention", "ms", "where",
        "Attention of all layers in a step: projections, head norms, rotary embedding, and "
        "attention itself.",
    ),
    Metric(
        "dense_ms", "dense", "ms", "where",
        "The dense MLPs of all layers in a step, and that of self-conditioning.",
    ),
    Metric(
        "experts_ms", "experts", "ms", "where",
        "Routers and experts of all layers in a step.",
    ),
    Metric(
        "head_ms", "head", "ms", "where",
        "The pass over the vocabulary in a step, with the search for the cutoffs of top-k and "
        "top-p.",
    ),
    Metric(
        "sampler_ms", "sampler", "ms", "where",
        "Acceptance, stop test and fresh noise of a step.",
    ),
    Metric(
        "rest_ms", "rest", "ms", "where",
        "What is left of a step's forward: embedding, rotary tables, norms and residuals.",
    ),
    Metric(
        "visible_tps", "visible", "tok/s", "speed",
        "Visible tokens of a reply over its whole request. Visible are the reply's tokens, "
        "thoughts included; an end token and what follows it in its canvas are not.",
    ),
    Metric(
        "canvas_tps", "canvas", "tok/s", "speed",
        "Positions of a reply's settled canvases over the seconds of denoising, those after the "
        "end of the reply included; without prefill and commits.",
    ),
    Metric(
        "blocks_per_s", "blocks", "1/s", "speed",
        "Settled canvases of a reply over the seconds of denoising and committing.",
    ),
    Metric(
        "throughput_tps", "all requests", "tok/s", "speed",
        "Visible tokens of all measured requests over the wall time from the first one's start "
        "to the last one's end.",
    ),
    Metric(
        "prompt_tokens", "prompt", "tok", "size",
        "Tokens of a request's prompt, the chat template's and the filling of --context included.",
    ),
    Metric(
        "output_tokens", "reply", "tok", "size",
        "Visible tokens of a reply.",
    ),
    Metric(
        "peak_anonymous", "anonymous", "B", "memory",
        "The largest private memory of the process until then, loading included: anonymous and "
        "shared pages (RssAnon and RssShmem), sampled 20 times a second.",
    ),
    Metric(
        "peak_mapped", "mapped", "B", "memory",
        "The most resident pages of mapped files (RssFile), sampled as often. These pages belong "
        "to the page cache and can be dropped.",
    ),
    Metric(
        "peak_resident", "resident", "B", "memory",
        "The largest sum of both at one time, by the kernel's own count (VmHWM).",
    ),
    Metric(
        "peak_device", "device", "B", "memory",
        "The most memory that torch's allocator held on a CUDA device, its unused blocks too.",
    ),
    Metric(
        "peak_device_used", "in use", "B", "memory",
        "The most memory of the CUDA device that was in use, sampled as often: also the driver's, "
        "the code of kernels, and what other processes have.",
    ),
)  # fmt: skip
"""In the order in which a report shows them."""

PARTS = ("attention_ms", "dense_ms", "experts_ms", "head_ms", "sampler_ms", "rest_ms")
"""The metrics that a timed step divides into."""


Summary = dict[str, float]
"""How many values there are, the extremes, the middle and the tail: count, min, p50, p95, max."""


def summarize(values: Sequence[float]) -> Summary | None:
    """The summary of some values, or None where there are none."""
    if not values:
        return None
    middle, tail = np.percentile(values, (50, 95)).tolist()
    extremes = {"min": min(values), "p50": middle, "p95": tail, "max": max(values)}
    return {"count": len(values), **extremes}


@dataclass
class CaseReport:
    """What was measured under one setting."""

    case: Case
    values: Values = field(default_factory=dict)
    requests: int = 0  # that are measured
    failures: list[str] = field(default_factory=list)  # why others are not

    def add(self, values: Values) -> None:
        """Takes in more values."""
        for key, more in values.items():
            self.values.setdefault(key, []).extend(more)

    def finished(self, wall_s: float) -> None:
        """One more request is measured, `wall_s` after the first began."""
        self.requests += 1
        if tokens := self.values.get("output_tokens"):
            self.values["throughput_tps"] = [sum(tokens) / wall_s]

    def summaries(self) -> dict[str, Summary | None]:
        """Every metric in order; None where nothing was measured."""
        return {metric.key: summarize(self.values.get(metric.key, [])) for metric in METRICS}


@dataclass
class Report:
    """All cases, and what they were measured with."""

    subject: dict[str, Any]
    cases: list[CaseReport] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    work: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False


def take(
    report: Report,
    work: Work,
    cases: Sequence[Case],
    measure: Callable[[CaseReport, Callable[[], None]], None],
    progress: Callable[[int, int], None],
) -> Report:
    """Measures every case, one after another; KeyboardInterrupt ends it with what there is so far.

    measure: adds the figures of a case, and calls what it gets beside it for each request; progress
    then takes the request's number and the number of all. Raises ValueError where requests were
    measured and all have failed; single failures are part of the report.
    """
    count = len(cases) * (work.warmup + len(work.requests()))
    numbers = iter(range(1, count + 1))
    try:
        for case in cases:
            report.cases.append(CaseReport(case))
            measure(report.cases[-1], lambda: progress(next(numbers), count))
    except KeyboardInterrupt:
        report.interrupted = True
    failures = [failure for result in report.cases for failure in result.failures]
    if failures and not any(result.requests for result in report.cases):
        raise ValueError(f"all {len(failures)} requests failed, the first: {failures[0]}")
    return report


def to_json(report: Report) -> str:
    """One line."""
    cases = [
        {
            "settings": asdict(result.case),
            "requests": result.requests,
            "failures": result.failures,
            "metrics": result.summaries(),
        }
        for result in report.cases
    ]
    document = {
        "benchmark": "sfumato bench",
        "subject": report.subject,
        "environment": report.environment,
        "work": report.work,
        "interrupted": report.interrupted,
        "cases": cases,
    }
    return json.dumps(document, ensure_ascii=False, allow_nan=False)


def to_csv(report: Report) -> str:
    """A header and a row for each case; of each metric the 50th and the 95th percentile."""
    rows = []
    for result in report.cases:
        row: dict[str, Any] = {"model": report.subject.get("model")}
        row |= {"commit": report.environment.get("commit")}
        row |= asdict(result.case)
        row |= {"requests": result.requests, "failures": len(result.failures)}
        for key, summary in result.summaries().items():
            row |= {f"{key}_{name}": summary and summary[name] for name in ("p50", "p95")}
        rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_tables(report: Report) -> Iterator[Table]:
    """A table of what was measured and with what, and then one of figures for each case: what was
    asked for stands last, where a terminal shows it. Texts in them are a server's: print them with
    a console that takes no markup."""
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in (report.subject | report.environment | report.work).items():
        facts.add_row(name.removesuffix("_bytes").replace("_", " "), _fact(name, value))
    yield facts
    for result in report.cases:
        yield _figures(result)


def _figures(result: CaseReport) -> Table:
    case = {name: value for name, value in asdict(result.case).items() if value is not None}
    title = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in case.items())
    table = Table(title=f"{title}: {result.requests} requests measured", title_justify="left")
    if failures := result.failures:
        table.caption = f"{len(failures)} failed, the first: {failures[0]}"
    table.add_column("")
    for name in (*_COLUMNS, "n"):
        table.add_column(name, justify="right")
    summaries = result.summaries()
    shown = [m for m in METRICS if m.group != "where" or summaries["where_step_ms"]]
    for metric, following in zip(shown, [*shown[1:], None], strict=True):
        last = following is None or following.group != metric.group
        table.add_row(_name(metric), *_cells(metric, summaries[metric.key]), end_section=last)
    return table


def _name(metric: Metric) -> str:
    indent = "  " if metric.group == "where" and metric.key != "where_step_ms" else ""
    unit = "GB" if metric.unit == "B" else metric.unit
    return f"{indent}{metric.label}" + (f", {unit}" if unit else "")


def _cells(metric: Metric, summary: Summary | None) -> list[str]:
    if summary is None:
        return [ABSENT] * len(_COLUMNS) + [""]
    scale = 1e9 if metric.unit == "B" else 1.0
    return [*(number(summary[name] / scale) for name in _COLUMNS), str(summary["count"])]


def number(value: float) -> str:
    """Three significant digits, no exponent, at most six decimals; a whole number as it is."""
    if float(value).is_integer():
        return f"{value:,.0f}"
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(6, max(0, 2 - magnitude))}f}"


def _fact(name: str, value: Any) -> str:
    if value is None or value == "":
        return ABSENT
    if name == "formats":
        return ", ".join(f"{k} {v / max(1, sum(value.values())):.0%}" for k, v in value.items())
    if name.endswith("_bytes"):
        return f"{number(value / 1e9)} GB"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value) if isinstance(value, str | bool) or name == "seed" else number(value)


_SPREAD = ("step_ms", "total_s")  # what the curves show: the first that was measured
_RANKS = range(101)
_METRICS = {metric.key: metric for metric in METRICS}


def check_plot(path: Path) -> None:
    """Raises ValueError if nothing can be drawn to `path`: better before hours of measuring."""
    if path.suffix.lower() not in _SUFFIXES:
        raise Refused("plot", f"{path} ends in neither {' nor '.join(_SUFFIXES)}")
    _figure_class()


def draw(report: Report, path: Path) -> bytes:
    """The report as a picture: the bytes of a file of that name, PNG or SVG. Raises ValueError as
    `check_plot` does."""
    check_plot(path)
    named = dict(zip(_names(report.cases), (r.values for r in report.cases), strict=True))
    figure = _figure_class()(figsize=(12, 3.5 + 0.4 * len(named)), layout="constrained")
    parts, spread = figure.subplots(1, 2)
    _draw_parts(parts, named)
    _draw_spread(spread, named)
    figure.suptitle(str(report.subject.get("model", "")), parse_math=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format=path.suffix[1:].lower())
    return picture.getvalue()


def _figure_class() -> Any:
    try:
        # Not pyplot: no window, no global state, and no display needed.
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise Refused(
            "plot", "needs matplotlib, which is not installed", "pip install matplotlib"
        ) from None


def _draw_parts(axes: Any, named: dict[str, Values]) -> None:
    timed = any("where_step_ms" in values for values in named.values())
    axes.set_title("a denoising step, median of each part" if timed else "a denoising step, median")
    axes.set_xlabel("ms")
    lefts = [0.0] * len(named)
    for key in PARTS if timed else ("step_ms",):
        widths = [float(np.median(values.get(key) or [0.0])) for values in named.values()]
        axes.barh(list(named), widths, left=lefts, height=0.5, label=_METRICS[key].label)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.invert_yaxis()
    if timed:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False)


def _draw_spread(axes: Any, named: dict[str, Values]) -> None:
    key = next((k for k in _SPREAD if any(k in values for values in named.values())), _SPREAD[-1])
    axes.set_title(f"{_METRICS[key].label}: percentiles")
    axes.set_xlabel("percentile")
    axes.set_ylabel(_METRICS[key].unit)
    for name, values in named.items():
        if measured := values.get(key):
            axes.plot(_RANKS, np.percentile(measured, _RANKS), label=name)
    for rank in (50, 95):
        axes.axvline(rank, color="0.8", linewidth=0.8, zorder=0)
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=False)


def _names(cases: list[CaseReport]) -> list[str]:
    """Each case by its settings; by those that vary, where some do."""
    settings = [asdict(result.case) for result in cases]
    varying = [name for name in settings[0] if len({s[name] for s in settings}) > 1]
    return [
        ", ".join(
            f"{name.replace('_', ' ')} {value}"
            for name, value in setting.items()
            if value is not None and (name in varying or not varying)
        )
        for setting in settings
    ]
