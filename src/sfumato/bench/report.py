"""The results of a benchmark, as a table for people, JSON for programs and CSV for spreadsheets.

A report is the same for this machine and for a server; unknown figures stay empty.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from sfumato.bench.metrics import METRICS, Metric, Values
from sfumato.bench.summary import Summary, summarize
from sfumato.bench.workload import Case

ABSENT = "—"
_COLUMNS = ("p50", "p95", "min", "max")


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


def to_json(report: Report) -> str:
    """One line."""
    cases = [
        {
            "settings": asdict(result.case),
            "requests": result.requests,
            "failures": result.failures,
            "metrics": {key: s and asdict(s) for key, s in result.summaries().items()},
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
            row |= {f"{key}_p50": summary and summary.p50, f"{key}_p95": summary and summary.p95}
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
    return [*(number(getattr(summary, name) / scale) for name in _COLUMNS), str(summary.count)]


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
