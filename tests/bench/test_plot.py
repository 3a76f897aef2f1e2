from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from sfumato.bench import report as forms
from sfumato.bench.report import PARTS, Case, CaseReport, Report


def a_report(*parts: str) -> Report:
    cases = [CaseReport(Case(64, context=context)) for context in (0, 4096)]
    for result in cases:
        result.values = {"step_ms": [3.0, 4.0, 9.0]} | {key: [1.0, 2.0] for key in parts}
    return Report({"model": "painter"}, cases)


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"pip install matplotlib"):
        forms.check_plot(tmp_path / "a.png")


def test_only_png_and_svg() -> None:
    with pytest.raises(ValueError, match=r"a\.pdf ends in neither \.png nor \.svg"):
        forms.check_plot(Path("a.pdf"))


def test_a_name_is_no_formula(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs sfumato[plot]")
    report = a_report()
    report.subject["model"] = r"$\frac$"
    assert forms.draw(report, tmp_path / "a.svg")


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("b.svg", b"<?xml")])
def test_draws(tmp_path: Path, name: str, start: bytes, timed: bool) -> None:
    pytest.importorskip("matplotlib", reason="needs sfumato[plot]")
    report = a_report(*(("where_step_ms", *PARTS) if timed else ()))
    assert forms.draw(report, tmp_path / name).startswith(start)
    assert not (tmp_path / name).exists()


def test_draws_a_report_without_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs sfumato[plot]")
    assert forms.draw(Report({}, [CaseReport(Case(64))]), tmp_path / "a.png")


def test_cases_are_named_by_what_varies() -> None:
    assert forms._names(a_report().cases) == ["context 0", "context 4096"]
    assert forms._names(a_report().cases[:1]) == ["max tokens 64, context 0"]
