"""A report as a picture: where the time of a step goes, and how the steps' times are spread.

Drawn by matplotlib, which is optional; it is imported by name, only when something is drawn.
"""

from __future__ import annotations

import importlib
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

from sfumato.bench.metrics import METRICS, PARTS, Values
from sfumato.bench.report import CaseReport, Report
from sfumato.bench.summary import percentile
from sfumato.refused import Refused

_SUFFIXES = (".png", ".svg")
_SPREAD = ("step_ms", "total_s")  # what the curves show: the first that was measured
_RANKS = range(101)
_LABELS = {metric.key: metric.label for metric in METRICS}
_UNITS = {metric.key: metric.unit for metric in METRICS}


def check(path: Path) -> None:
    """Raises ValueError if nothing can be drawn to `path`: better before hours of measuring."""
    if path.suffix.lower() not in _SUFFIXES:
        raise Refused("plot", f"{path} ends in neither {' nor '.join(_SUFFIXES)}")
    _figure_class()


def draw(report: Report, path: Path) -> bytes:
    """The report as a picture: the bytes of a file of that name, PNG or SVG. Raises ValueError as
    `check` does."""
    check(path)
    named = dict(zip(_names(report.cases), (r.values for r in report.cases), strict=True))
    figure = _figure_class()(figsize=(12, 3.5 + 0.4 * len(named)), layout="constrained")
    parts, spread = figure.subplots(1, 2)
    _draw_parts(parts, named)
    _draw_spread(spread, named)
    figure.suptitle(str(report.subject.get("model", "")), parse_math=False)
    picture = BytesIO()
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
        widths = [_median(values, key) for values in named.values()]
        axes.barh(list(named), widths, left=lefts, height=0.5, label=_LABELS[key])
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.invert_yaxis()
    if timed:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False)


def _draw_spread(axes: Any, named: dict[str, Values]) -> None:
    key = next((k for k in _SPREAD if any(k in values for values in named.values())), _SPREAD[-1])
    axes.set_title(f"{_LABELS[key]}: percentiles")
    axes.set_xlabel("percentile")
    axes.set_ylabel(_UNITS[key])
    for name, values in named.items():
        if measured := values.get(key):
            curve = [percentile(measured, rank / 100) for rank in _RANKS]
            axes.plot(_RANKS, curve, label=name)
    for rank in (50, 95):
        axes.axvline(rank, color="0.8", linewidth=0.8, zorder=0)
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=False)


def _median(values: Values, key: str) -> float:
    return percentile(values[key], 0.5) if values.get(key) else 0.0


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
