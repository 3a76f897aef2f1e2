from __future__ import annotations

from pathlib import Path

from sfumato.bench.report import METRICS, PARTS

GUIDE = Path(__file__).parents[2] / "docs" / "benchmarking.md"


def test_every_metric_is_there_once() -> None:
    keys = [metric.key for metric in METRICS]
    assert len(set(keys)) == len(keys)
    assert set(PARTS) < {metric.key for metric in METRICS if metric.group == "where"}


def test_the_guide_defines_them_in_the_same_words() -> None:
    rows = [line for line in GUIDE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    expected = [
        f"| `{m.key}` | {m.label}{', ' * bool(m.unit)}{m.unit} | {m.definition} |" for m in METRICS
    ]
    assert rows == expected
