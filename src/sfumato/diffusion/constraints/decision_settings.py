"""How questions are read: a frozen value, checked against its bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sfumato.diffusion.checks import is_whole
from sfumato.diffusion.limits import check_seed
from sfumato.options.limits import MOST_READ_STEPS, MOST_READS
from sfumato.refused import Refused
from sfumato.weights.errors import quoted


@dataclass(frozen=True)
class DecisionSettings:
    """How questions are read.

    samples: reads of different noise, whose probabilities are averaged; "auto" is one, and three
    more where its options have an entropy over 0.1 nats. orders: how many orders of the options
    are read and averaged, as far as there are so many. steps: denoising steps of a read. joint:
    all questions in one canvas, rather than each by itself. order: "state" encodes the state once
    before all questions, "schema" puts each question before the state. label_mass: whether the
    whole vocabulary is scored too, for `Answer.label_mass`.
    """

    seed: int = 0
    samples: int | Literal["auto"] = 1
    orders: int = 1
    steps: int = 1
    joint: bool = False
    order: Literal["state", "schema"] = "state"
    label_mass: bool = True

    def check(self) -> None:
        """Raises ValueError, naming the field."""
        check_seed(self.seed)
        if self.samples != "auto" and not _within(self.samples, MOST_READS):
            raise Refused(
                "samples",
                f'must be a whole number from 1 to {MOST_READS} or "auto", got '
                f"{quoted(self.samples)}",
            )
        for name, most in (("orders", MOST_READS), ("steps", MOST_READ_STEPS)):
            if not _within(getattr(self, name), most):
                got = quoted(getattr(self, name))
                raise Refused(name, f"must be a whole number from 1 to {most}, got {got}")
        if self.order not in ("state", "schema"):
            raise Refused("order", f'must be "state" or "schema", got {quoted(self.order)}')
        for name in ("joint", "label_mass"):
            if not isinstance(getattr(self, name), bool):
                got = quoted(getattr(self, name))
                raise Refused(name, f"must be true or false, got {got}")


def _within(value: object, most: int) -> bool:
    return is_whole(value) and isinstance(value, int) and 1 <= value <= most
