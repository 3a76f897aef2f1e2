"""What the command line says of the embedded model, which was made for a demonstration alone.

Knows what the model was trained to answer, and no display.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from sfumato.api import EMBEDDED
from sfumato.server.examples import CANNOT

if TYPE_CHECKING:
    from sfumato.api import Model
    from sfumato.cli.generation import Answer

TOY = (
    "The embedded model is a toy: it solves 4x4 Sudoku and answers a fixed set of simple questions "
    "(docs/embedded-model.md). -m PATH loads a real model."
)


def is_embedded(model: Model) -> bool:
    """Whether it is the model in the package."""
    return model.path == EMBEDDED


def remark(answer: Answer, model: Model, raises: str = "--steps") -> str | None:
    """What a person must know about a reply that may be of no use; None where there is nothing.

    raises: the option or command that raises the limit of steps.
    """
    reply = answer.reply
    if reply is None:
        return None
    capped = "step_cap" in reply.stats.convergence
    if is_embedded(model):
        return CANNOT if capped or not _is_known(reply.text, reply.stop_reason == "eos") else None
    if not capped:
        return None
    stats = reply.stats
    return (
        f"the text may be unsettled: {stats.convergence.count('step_cap')} of {stats.canvases} "
        f"canvases hit the step cap ({max(stats.steps)}); {raises} raises it"
    )


def _is_known(text: str, complete: bool) -> bool:
    """Whether the model was trained to write this: four rows of a Sudoku, or one of its answers;
    the beginning of one, where the reply was ended early. A canvas of anything else may settle
    too, and its entropy is as low as that of a right answer."""
    from sfumato.train import sudoku

    if complete and text.count("\n") == 3 and sudoku.from_text(text) is not None:
        return True
    if complete:
        return text in _answers()
    return any(answer.startswith(text) for answer in _answers()) or not set(text) - set("1234\n")


@cache
def _answers() -> frozenset[str]:
    from sfumato.train.questions import all_questions

    return frozenset(question.answer for question in all_questions())
