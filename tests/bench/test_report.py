from __future__ import annotations

import csv
import io
import json

import pytest
from rich.console import Console

from sfumato.bench.report import (
    METRICS,
    Case,
    CaseReport,
    Report,
    number,
    to_csv,
    to_json,
    to_tables,
)


def a_report() -> Report:
    one, two = CaseReport(Case(64, threads=2)), CaseReport(Case(128, threads=2))
    one.add({"step_ms": [10.0, 30.0], "total_s": [1.0]})
    one.add({"step_ms": [20.0], "total_s": [3.0], "output_tokens": [8.0]})
    one.finished(wall_s=4.0)
    one.values["peak_anonymous"] = [2.5e9]
    two.failures += ["HTTP 503: busy", "HTTP 500"]
    subject = {"model": "painter", "formats": {"Q4_K": 3, "F32": 1}, "precision": None}
    return Report(subject, [one, two], {"commit": "abc"}, {"repeats": 3})


def shown(report: Report) -> str:
    console = Console(width=100, file=io.StringIO(), record=True)
    for table in to_tables(report):
        console.print(table)
    return console.export_text()


def row(text: str, label: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if label in line)
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_json_is_one_line_with_every_metric() -> None:
    line = to_json(a_report())
    assert "\n" not in line
    report_json = json.loads(line)
    first = report_json["cases"][0]
    assert first["settings"]["threads"] == 2
    assert set(first["metrics"]) == {metric.key for metric in METRICS}
    assert first["metrics"]["step_ms"] == {
        "count": 3, "min": 10.0, "p50": 20.0, "p95": 29.0, "max": 30.0,
    }  # fmt: skip
    assert first["metrics"]["throughput_tps"]["p50"] == 2.0
    assert first["metrics"]["load_s"] is None
    assert report_json["cases"][1]["failures"] == ["HTTP 503: busy", "HTTP 500"]
    assert report_json["interrupted"] is False


def test_csv_has_a_row_for_each_case() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(a_report()))))
    assert [r["max_tokens"] for r in rows] == ["64", "128"]
    assert (rows[0]["model"], rows[0]["commit"]) == ("painter", "abc")
    assert (rows[0]["step_ms_p50"], rows[0]["step_ms_p95"]) == ("20.0", "29.0")
    assert (rows[1]["step_ms_p50"], rows[1]["failures"]) == ("", "2")


def test_tables_say_what_nobody_could_tell() -> None:
    text = shown(a_report())
    first, second = text.split("max tokens 128")
    assert row(first, "a step, ms") == ["20", "29", "10", "30", "3"]
    assert row(first, "anonymous, GB") == ["2.50"] * 4 + ["1"]
    assert row(first, "load, s") == ["—"] * 4 + [""]
    assert "attention" not in text  # it was not asked where the time goes
    assert "2 failed, the first: HTTP 503: busy" in second
    assert "formats    Q4_K 75%, F32 25%" in text
    assert "precision  —" in text


def test_json_is_json_or_nothing() -> None:
    report = a_report()
    report.cases[0].values["step_ms"] = [float("nan")]
    with pytest.raises(ValueError, match="JSON compliant"):
        to_json(report)


def test_a_seed_is_shown_as_it_is_given() -> None:
    report = a_report()
    report.work["seed"] = 2**64 - 1
    assert "seed       18446744073709551615" in shown(report)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (3.0, "3"), (1234.56, "1,235"), (123.4, "123"), (12.34, "12.3"),
        (1.234, "1.23"), (0.0123456, "0.0123"), (0.00000123, "0.000001"), (-2.5, "-2.50"),
    ],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text
