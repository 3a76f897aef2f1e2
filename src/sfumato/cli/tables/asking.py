"""What is asked about every row of a table, and how it is read. Knows no files of rows."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sfumato.cli.tables.columns import row_state
from sfumato.cli.tables.source import Row
from sfumato.decisions.calibration import Calibration, ModelIdentity
from sfumato.decisions.question_file import QuestionFile
from sfumato.decisions.results import Decision
from sfumato.diffusion.constraints.decision_plan import DecisionSettings
from sfumato.diffusion.constraints.questions import Question, Reading
from sfumato.engine.decision import DecisionRequest

if TYPE_CHECKING:
    from sfumato.api import Model
    from sfumato.engine.events import Decided


def reading_of(args: argparse.Namespace) -> Reading:
    """How the options say that questions are read."""
    return Reading(args.samples, args.orders, args.order, args.steps, args.joint)


@dataclass(frozen=True)
class Asking:
    """Questions of a file, and how they are read."""

    file: QuestionFile
    questions: Mapping[str, Question]  # those of the file that are read
    reading: Reading
    seed: int
    label_mass: bool
    calibration: Calibration | None = None

    @property
    def several(self) -> bool:
        """Whether answers have a spread."""
        return self.reading.samples != 1 or self.reading.orders > 1

    @property
    def options(self) -> dict[str, Any]:
        """What `Model.decide`, `DecisionSettings` and `DecisionRequest` take besides the texts."""
        return {**asdict(self.reading), "seed": self.seed, "label_mass": self.label_mass}

    def check(self, model: Model) -> None:
        """Raises ValueError for questions that cannot be asked about any state at all, and for a
        calibration that is not for them."""
        model.plan_decision("", self.questions, DecisionSettings(**self.options))
        if self.calibration is not None:
            self.calibration.check(self.questions, model.identity, self.reading)

    def request(self, row: Row) -> DecisionRequest:
        """The request about a row."""
        return DecisionRequest(row_state(self.file, row.cells), self.questions, **self.options)

    def decision(self, decided: Decided, model: ModelIdentity) -> Decision[dict[str, Any]]:
        """The typed answers to all questions of the file. model: for the calibration."""
        answers = decided.answers
        if self.calibration is not None:
            answers = self.calibration.apply(answers, self.questions, model, self.reading)
        return self.file.schema.decision(answers, decided.usage)
