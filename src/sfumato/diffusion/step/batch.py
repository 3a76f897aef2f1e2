"""The state of all rows of a step: a few tensors of fixed shape and address.

A batch is for one canvas width and one depth of argmax history.  Its tensors are allocated once and
written in place, so that a step can be captured once and replayed.  Rows join and leave by index;
those that take part in a step stand first.  Knows no network and no rules.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sfumato.diffusion.canvas import RowStart
from sfumato.diffusion.noise import seed_words
from sfumato.options.limits import MOST_STEPS

WIDTHS = (16, 32, 64, 128, 256)
"""Canvas widths that have a batch of their own, beside the checkpoint's."""


def width_for(length: int, longest: int) -> int:
    """The width of the batch in which a canvas of `length` positions runs; longest: the
    checkpoint's canvas length."""
    return min(width for width in (*WIDTHS, max(length, longest)) if width >= length)


@dataclass(frozen=True)
class StepBatch:
    """Rows of one canvas width. R: rows, W: width, H: depth of the history."""

    tokens: Tensor  # int64 [R, W]: the canvases that the next step reads
    soft: Tensor  # [R, W, hidden]: for the next step's self-conditioning; 0 before there is any
    history: Tensor  # int64 [R, H, W]: argmax canvases, the newest last; -1: none yet
    unchanged: Tensor  # int64 [R]: steps in a row before which the argmax canvas was the same
    pinned: Tensor  # int64 [R, W]: the token of a pinned position, -1 elsewhere
    seeds: Tensor  # int64 [R, 2]: 32-bit words, the low one first
    canvas: Tensor  # int64 [R]: 0, 1, … within the reply
    attempt: Tensor  # int64 [R]
    step: Tensor  # int64 [R]: steps done
    max_steps: Tensor  # int64 [R]
    temperatures: Tensor  # float32 [R, MOST_STEPS]
    cold: Tensor  # bool [R]
    self_conditioning: Tensor  # bool [R]
    length: Tensor  # int64 [R]: positions that take part, the first ones
    slots: Tensor  # int64 [R]: the row's slot in its pool
    converged: Tensor  # bool [R]: the stopping rule ended the canvas
    done: Tensor  # bool [R]: no step changes the row any more

    @classmethod
    def allocate(
        cls,
        rows: int,
        width: int,
        history: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> StepBatch:
        def integers(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=torch.int64, device=device)

        def flag() -> Tensor:
            return torch.zeros(rows, dtype=torch.bool, device=device)

        return cls(
            tokens=integers(width),
            soft=torch.zeros(rows, width, hidden, dtype=dtype, device=device),
            history=integers(history, width),
            unchanged=integers(),
            pinned=integers(width),
            seeds=integers(2),
            canvas=integers(),
            attempt=integers(),
            step=integers(),
            max_steps=integers(),
            temperatures=torch.ones(rows, MOST_STEPS, device=device),
            cold=flag(),
            self_conditioning=flag(),
            length=integers(),
            slots=integers(),
            converged=flag(),
            done=flag(),
        )

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def first(self, count: int) -> StepBatch:
        """The first `count` rows: views."""
        return StepBatch(*(tensor[:count] for tensor in self.tensors()))

    def begin(self, row: int, start: RowStart) -> None:
        """Makes a row a new canvas."""
        length = len(start.tokens)
        for tensor, value in (
            (self.soft, 0),
            (self.history, -1),
            (self.unchanged, 0),
            (self.canvas, start.canvas),
            (self.attempt, start.attempt),
            (self.step, 0),
            (self.max_steps, len(start.temperatures)),
            (self.cold, start.cold),
            (self.self_conditioning, start.self_conditioning),
            (self.length, length),
            (self.converged, False),
            (self.done, False),
        ):
            tensor[row].fill_(value)
        # Positions that take no part are pinned to token 0: no embedding lacks it.
        for tensor, values in ((self.tokens, start.tokens), (self.pinned, start.pinned)):
            tensor[row].zero_()
            tensor[row, :length].copy_(values)
        self.seeds[row].copy_(torch.tensor(seed_words(start.seed)))
        self.temperatures[row, : len(start.temperatures)].copy_(torch.tensor(start.temperatures))

    def copy_row(self, row: int, source: StepBatch, source_row: int) -> None:
        """Overwrites a row by one of a batch of the same width and depth."""
        for tensor, values in zip(self.tensors(), source.tensors(), strict=True):
            tensor[row].copy_(values[source_row])

    def swap(self, one: int, other: int) -> None:
        """Exchanges two rows."""
        for tensor in self.tensors():
            before = tensor[one].clone()
            tensor[one].copy_(tensor[other])
            tensor[other].copy_(before)
