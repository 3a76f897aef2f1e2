from __future__ import annotations

from dataclasses import replace
from typing import Any

from sfumato import Choice
from sfumato.cli.decide import MOST_REASONS, Summary, lines
from sfumato.decisions.schema import DecisionUsage, schema_of
from sfumato.diffusion.constraints.questions import ChoiceAnswer


def decision(
    options: list[str], best: int, mass: float | None, other: list[float] | None = None
) -> Any:
    schema = schema_of({"team": Choice(options)})
    shares = [0.0] * len(options)
    shares[best] = 1.0
    answer = ChoiceAnswer(tuple(shares), mass, True)
    answer = answer if other is None else replace(answer, causal=tuple(other))
    return schema.decision({"team": answer}, DecisionUsage(1, 0, 1))


def test_nothing_decided_is_one_line() -> None:
    assert lines(Summary(["team"], 3).figures()) == [
        "0 rows decided in 0.0 s (3 were there already)"
    ]


def test_counts_means_and_a_low_label_mass() -> None:
    summary = Summary(["team"], 0)
    options = [f"o{number}" for number in range(15)]
    for number in (0, 0, *range(15)):
        summary.add(decision(options, number, 0.25), "")
    text = lines(summary.figures())
    assert text[2].split()[:5] == ["team", "1.000", "0.250", "o0", "3,"]
    assert text[2].endswith("3 others")
    for causal in ([1.0, 0.0], [0.0, 1.0]):
        summary.add(decision(["o0", "o1"], 0, 0.25, causal), "")
    assert lines(summary.figures())[2].endswith("3 others; 1 undecided")
    assert text[3].startswith("A label mass under 0.5 says")


def test_reasons_are_counted_and_bounded() -> None:
    summary = Summary(["team"], 0)
    for number in range(3 * MOST_REASONS):
        summary.add(None, f"reason {number}")
    figures = summary.figures()
    assert figures["failed"] == 3 * MOST_REASONS
    assert figures["reasons"]["other reasons"] == 2 * MOST_REASONS
    text = lines(figures)
    assert text[1].startswith("300 rows have no answers")
    assert text[-1] == "  and 96 other reasons"
