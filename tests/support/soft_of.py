"""The soft embedding of a canvas."""

from __future__ import annotations

from torch import Tensor

from sfumato.diffusion.canvas import Canvas


def soft_of(canvas: Canvas) -> Tensor:
    """[length, hidden]: what the next step's self-conditioning reads, after one step at least."""
    assert canvas.place is not None and canvas.step
    batch, row = canvas.place
    soft: Tensor = batch.soft[row, : canvas.length].clone()
    return soft
