"""What a table of answers comes to: counts, means, speed, and rows without an answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sfumato.cli.units import table
from sfumato.decisions.results import Decision, TypedAnswer, shown

MOST_REASONS = 100  # that are told apart
SHOWN_REASONS, SHOWN_OPTIONS = 5, 12
LEAST_MASS = 0.5  # of a mean label mass, below which the summary has a note


@dataclass
class Tally:
    """The answers to one question."""

    answers: Counter[str] = field(default_factory=Counter)
    confidence: float = 0.0  # sums
    label_mass: float = 0.0
    masses: int = 0

    def add(self, answer: TypedAnswer) -> None:
        self.answers[shown(answer.value)] += 1
        self.confidence += answer.confidence
        if answer.label_mass is not None:
            self.label_mass += answer.label_mass
            self.masses += 1

    def figures(self) -> dict[str, Any]:
        count = self.answers.total()
        return {
            "answers": dict(self.answers.most_common()),
            "mean_confidence": self.confidence / count if count else None,
            "mean_label_mass": self.label_mass / self.masses if self.masses else None,
        }


class Summary:
    """Adds rows up as they come."""

    def __init__(self, questions: Iterable[str], before: int) -> None:
        """before: rows that an earlier run has decided."""
        self.rows, self.before, self.seconds = 0, before, 0.0
        self._tallies = {name: Tally() for name in questions}
        self._reasons: Counter[str] = Counter()

    def add(self, decision: Decision[Any] | None, error: str) -> None:
        self.rows += 1
        if decision is None:
            known = error in self._reasons or len(self._reasons) < MOST_REASONS
            self._reasons[error if known else "other reasons"] += 1
            return
        for name, answer in decision.items():
            self._tallies[name].add(answer)

    @property
    def failed(self) -> int:
        return self._reasons.total()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Within, rows are decided, and no model is loaded."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - start

    def figures(self) -> dict[str, Any]:
        """All as plain values."""
        answered = (self.rows - self.failed) * len(self._tallies)
        return {
            "rows": self.rows,
            "rows_before": self.before,
            "seconds": self.seconds,
            "questions_per_second": answered / self.seconds if self.seconds else None,
            "failed": self.failed,
            "reasons": dict(self._reasons.most_common()),
            "questions": {name: tally.figures() for name, tally in self._tallies.items()},
        }


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures for people."""
    speed = figures["questions_per_second"]
    rate = f", {speed:.3g} questions/s" if speed else ""
    before = f" ({figures['rows_before']:,} were there already)" if figures["rows_before"] else ""
    out = [f"{figures['rows']:,} rows decided in {figures['seconds']:.1f} s{rate}{before}"]
    rows = [("question", "confidence", "label mass", "answers")]
    for name, each in figures["questions"].items():
        counts = [f"{answer} {count:,}" for answer, count in each["answers"].items()]
        if len(counts) > SHOWN_OPTIONS:
            counts[SHOWN_OPTIONS:] = [f"{len(counts) - SHOWN_OPTIONS} others"]
        confidence, mass = map(_mean, (each["mean_confidence"], each["mean_label_mass"]))
        rows.append((name, confidence, mass, ", ".join(counts)))
    out += table(rows)
    masses = [each["mean_label_mass"] for each in figures["questions"].values()]
    if any(mass is not None and mass < LEAST_MASS for mass in masses):
        out.append(
            f"A label mass under {LEAST_MASS} says that the model hardly takes the options for "
            "answers; its probabilities then mean little (docs/decisions.md)."
        )
    if figures["failed"]:
        out.append(f"{figures['failed']:,} rows have no answers (see their column error):")
        reasons = list(figures["reasons"].items())
        out += [f"  {count:,} × {reason}" for reason, count in reasons[:SHOWN_REASONS]]
        if len(reasons) > SHOWN_REASONS:
            out.append(f"  and {len(reasons) - SHOWN_REASONS} other reasons")
    return out


def _mean(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
