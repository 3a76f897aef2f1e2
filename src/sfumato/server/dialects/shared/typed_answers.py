"""Answers as System One's objects, which Gemini's form shares, and the figures beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sfumato.diffusion.constraints.answers import Answer, ChoiceAnswer, ScoreAnswer, YesNoAnswer


def figures(answer: Answer) -> dict[str, Any]:
    """What the forms do not have: all names begin with x_, as System One asks."""
    mass = {"x_label_mass": answer.label_mass, "x_is_label": answer.is_label}
    return {
        **{name: value for name, value in mass.items() if value is not None},
        "x_samples": answer.samples,
        "x_spread": answer.spread,
        "x_orders": answer.orders,
        "x_order_spread": answer.order_spread,
    }


def noul(answer: Answer) -> dict[str, Any]:
    assert isinstance(answer, YesNoAnswer)
    return {"type": "noul", "noul": answer.probability, **figures(answer)}


def choice(answer: Answer, names: Sequence[str]) -> dict[str, Any]:
    """names: of the options, in the caller's order."""
    assert isinstance(answer, ChoiceAnswer)
    return {
        "type": "choice",
        "choice": names[answer.choice],
        "probabilities": dict(zip(names, answer.probabilities, strict=True)),
        "confidence": answer.confidence,
        **figures(answer),
    }


def score(answer: Answer, levels: Sequence[Any]) -> dict[str, Any]:
    """levels: as the caller wrote them, from low to high."""
    assert isinstance(answer, ScoreAnswer)
    return {
        "type": "score",
        "score": answer.score,
        "legend": {str(number): level for number, level in enumerate(levels)},
        "probabilities": {str(n): p for n, p in enumerate(answer.probabilities)},
        "confidence": answer.confidence,
        **figures(answer),
    }
