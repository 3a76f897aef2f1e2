"""Typed decisions in Python: questions as types, answers as values with probabilities.

Loads no torch. `Model.decide` asks; `diffusion.constraints` has the questions as a model gets them.
"""

from __future__ import annotations

from sfumato.decisions.calibration import Calibration, ModelIdentity, read_calibration
from sfumato.decisions.question_file import (
    QuestionFile,
    State,
    read_questions,
    state_of,
    state_text,
)
from sfumato.decisions.schema import (
    Choice,
    Decision,
    DecisionUsage,
    Schema,
    Score,
    TypedAnswer,
    YesNo,
    schema_of,
)
from sfumato.diffusion.constraints.questions import Reading

__all__ = [
    "Calibration",
    "Choice",
    "Decision",
    "DecisionUsage",
    "ModelIdentity",
    "QuestionFile",
    "Reading",
    "Schema",
    "Score",
    "State",
    "TypedAnswer",
    "YesNo",
    "read_calibration",
    "read_questions",
    "schema_of",
    "state_of",
    "state_text",
]
