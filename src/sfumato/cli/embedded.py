"""What the command line says of the embedded model, which was made for a demonstration alone.

Knows no display; server/examples.py knows what the model was trained to answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.api import EMBEDDED
from sfumato.server.examples import CANNOT, is_answered

if TYPE_CHECKING:
    from sfumato.api import Model
    from sfumato.cli.generation import Answer

TOY = (
    "The embedded model is a toy: it solves 4x4 Sudoku, answers a fixed set of simple questions, "
    "and writes small JSON objects (docs/embedded-model.md). -m PATH loads a real model."
)


def is_embedded(model: Model) -> bool:
    """Whether it is the model in the package."""
    return model.path.resolve() == EMBEDDED.resolve()


def remark(answer: Answer, model: Model, raises: str = "--steps") -> str | None:
    """The hint below a reply that may be wrong; None where the reply gives no reason for one.

    raises: the option or command that raises the limit of steps.
    """
    reply = answer.reply
    if reply is None:
        return None
    capped = "step_cap" in reply.stats.convergence
    if is_embedded(model):
        return None if is_answered(reply) else CANNOT
    if not capped:
        return None
    stats = reply.stats
    return (
        f"the text may be unsettled: {stats.convergence.count('step_cap')} of {stats.canvases} "
        f"canvases hit the step cap ({max(stats.steps)}); {raises} raises it"
    )
