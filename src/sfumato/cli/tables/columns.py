"""The columns of a table of answers, and the state of a row. Knows no files and no model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sfumato.decisions.question_file import QuestionFile, json_text
from sfumato.decisions.results import Decision, TypedAnswer, shown
from sfumato.diffusion.constraints.questions import Question, ScoreQuestion, YesNoQuestion

ERROR = "error"
_DIGITS = 6


@dataclass(frozen=True)
class Columns:
    """Which columns each question has. Raises ValueError, naming the column, where two are the
    same or the table has it already."""

    questions: Mapping[str, str]  # names, with "yes/no", "choice" or "score"
    probabilities: bool
    label_mass: bool
    spread: bool

    def names(self, table: Collection[str]) -> list[str]:
        """Those of the answers, to stand behind the columns of the table."""
        made = [f"{name}_{field}" for name, kind in self.questions.items() for field in _of(kind)]
        for wanted, field in self._more():
            made += [f"{name}_{field}" for name in self.questions if wanted]
        made.append(ERROR)
        name, count = Counter(made).most_common(1)[0]
        if count > 1:
            raise ValueError(f"two columns would have the name {name!r}; rename a question")
        for name in made:
            if name in table:
                raise ValueError(
                    f"the table has a column {name!r} already, where answers would stand; rename "
                    "the column or the question"
                )
        return made

    def _more(self) -> list[tuple[bool, str]]:
        return [
            (self.label_mass, "label_mass"),
            (self.spread, "spread"),
            (self.spread, "order_spread"),
            (self.probabilities, "probabilities"),
        ]

    def cells(self, decision: Decision[Any] | None, error: str, text: bool) -> dict[str, Any]:
        """The cells of a row; text: objects as JSON, for CSV. Where there is no decision all are
        empty but the error."""
        cells: dict[str, Any] = {}
        for name, kind in self.questions.items():
            values = None if decision is None else _values(decision[name])
            wanted = [*_of(kind), *(field for on, field in self._more() if on)]
            cells |= {f"{name}_{field}": values and values[field] for field in wanted}
        if text:
            cells = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in cells.items()}
        return cells | {ERROR: error or None}


def _of(kind: str) -> tuple[str, ...]:
    return {
        "yes/no": ("answer", "probability"),
        "choice": ("answer", "confidence"),
        "score": ("answer", "score", "confidence"),
    }[kind]


def _values(answer: TypedAnswer) -> dict[str, Any]:
    """Every field of an answer as a plain value."""
    return {
        "answer": shown(answer.value),
        "probability": _rounded(answer.probabilities.get(True)),
        "confidence": _rounded(answer.confidence),
        "score": _rounded(answer.score),
        "label_mass": _rounded(answer.label_mass),
        "spread": _rounded(answer.spread),
        "order_spread": _rounded(answer.order_spread),
        "probabilities": {shown(v): _rounded(p) for v, p in answer.probabilities.items()},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def row_state(file: QuestionFile, cells: Mapping[str, Any]) -> str:
    """The state of a row: the file's template filled, or else all columns as JSON, but those that
    have the name of a question: they are labels. Raises ValueError where the template names a
    column that is not there, or nothing is left."""
    if file.state is not None:
        return file.state.fill(cells)
    left = {name: value for name, value in cells.items() if name not in file.questions}
    if not left:
        raise ValueError("every column has the name of a question, so no state is left")
    return json_text(left)


def label_number(question: Question, text: str) -> int | None:
    """The number of the option that a label's cell names; None for an empty cell.

    An option's own name comes first, then other words for yes and no, then a level's number from 0.
    Raises ValueError."""
    text = text.strip()
    if not text:
        return None
    names = [option.name for option in question.options]
    if text in names:
        return names.index(text)
    word = text.lower()
    if isinstance(question, YesNoQuestion):
        for number, words in enumerate((("yes", "true", "1"), ("no", "false", "0"))):
            if word in words:
                return number
    elif isinstance(question, ScoreQuestion) and word in map(str, range(len(names))):
        return int(word)
    raise ValueError(f"{text!r:.80} is none of {', '.join(names)[:200]}")
