"""The keyword arguments of `Model.decide`, for type checkers: its two signatures share them."""

from __future__ import annotations

from os import PathLike
from typing import Literal, TypedDict

from sfumato.decisions.calibration import Calibration


class DecideOptions(TypedDict, total=False):
    """What `Model.decide` says of them."""

    seed: int
    samples: int | Literal["auto"]
    orders: int
    order: Literal["state", "schema"]
    steps: int
    joint: bool
    label_mass: bool
    calibration: Calibration | str | PathLike[str] | None
