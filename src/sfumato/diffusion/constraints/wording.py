"""The text of a question as a model reads it.

The state comes first and the question after it, so that one encoded state serves many questions;
with the schema first the question comes before its state.  A change here changes every answer of
every model, and the embedded model was trained on this wording.  Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from sfumato.diffusion.constraints.questions import Question, ScoreQuestion, YesNoQuestion

BETWEEN = "\n\n"
"""Between the state and the question, and in a user's turn that has the question first."""

_WORDING = 40
"""Characters of a question beside its own, about."""
_LABEL = 4
"""Characters of an option's line beside its own: "A: " and the line's end."""


def question_text(
    question: Question, labels: Sequence[str], order: Sequence[int] | None = None
) -> str:
    """The question with its options, each behind the label that stands for it on the canvas.

    labels: of the options, in their order; order: numbers of the options, in the order in which
    they are listed (None: their own).
    """
    listed = range(len(labels)) if order is None else order
    lines = [f"Question: {question.instructions or _default_instructions(question)}"]
    for label, option in [(labels[i], question.options[i]) for i in listed]:
        # Where the name is the label, as for yes and no, it is not said twice.
        name = "" if label == option.name else option.name
        described = (
            f" ({option.description})" if name and option.description else option.description
        )
        text = f"{name}{described}"
        lines.append(f"{label}: {text}" if text else label)
    lines.append(_request([labels[i] for i in listed]))
    return "\n".join(lines)


def question_length(question: Question) -> int:
    """Characters of `question_text`, about: what labels and wording have is counted at its least,
    before labels are known."""
    own = sum(len(option.name) + len(option.description) for option in question.options)
    return len(question.instructions) + own + _WORDING + _LABEL * len(question.options)


def joint_text(questions: Sequence[str]) -> str:
    """Several questions that are answered on one canvas, a line each; questions: their texts."""
    numbered = [f"{number}. {text}" for number, text in enumerate(questions, 1)]
    request = "Answer every question on a line of its own, as its number and its answer."
    return BETWEEN.join((*numbered, request))


def joint_line(number: int) -> tuple[str, str]:
    """What stands before and after the label of a question, 1, 2, …, on such a canvas."""
    return f"{number}: ", "\n"


def _default_instructions(question: Question) -> str:
    if isinstance(question, YesNoQuestion):
        return "Does this hold?"
    return "Which level fits?" if isinstance(question, ScoreQuestion) else "Which option fits?"


def _request(labels: Sequence[str]) -> str:
    if len(labels) == 2:
        return f"Answer {labels[0]} or {labels[1]}."
    if all(label.isdecimal() for label in labels):
        return "Answer with one number."
    return "Answer with one label."
