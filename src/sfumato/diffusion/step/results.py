"""What the host learns of a step: a draft of each canvas, or what failed in its row alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.step.denoise import ForwardResult
from sfumato.diffusion.step.packed import (
    CONVERGED,
    DONE,
    FROZEN,
    NOT_FINITE,
    Unpacked,
    row_words,
    unpack,
)
from sfumato.diffusion.step.update import Update
from sfumato.model.head import HeadStats
from sfumato.model.to_device import to_host

Result = Draft | Exception | None
"""None: the row was done before the step, which changed nothing in it."""

Top = tuple[Tensor, Tensor, Tensor | None]
"""Ids int64 [length, top] and probabilities float32 [length, top] of the most probable tokens, and
log probabilities float32 [length, n] of n named ones, if any."""


@dataclass(frozen=True)
class HostCopy:
    """What the host learns of a step, on its way: nothing of it is on the device."""

    canvases: tuple[Canvas, ...]  # in the layout's order
    order: tuple[int, ...]  # of each canvas, its place among those of the caller
    shapes: tuple[tuple[int, int], ...]  # rows and width of each part
    errors: tuple[dict[int, Exception], ...]  # of each part, by row: what its rules raised
    extra: dict[int, Top]  # by row in the layout's order: of rows that asked for more tokens
    words: Tensor  # of all parts, on the host
    copied: torch.Event | None  # None: `words` can be read at once

    @classmethod
    def start(cls, result: ForwardResult, updates: Sequence[Update], words: Tensor) -> HostCopy:
        """Starts the copy of a step's packed words."""
        layout = result.layout
        return cls(
            result.canvases,
            layout.order,
            tuple((part.batch.rows, part.batch.width) for part in layout.parts),
            tuple(new.errors for new in updates),
            {row: _top_of(own) for row, own in result.extra.items()},
            *to_host(words),
        )

    def read(self) -> list[Result]:
        """The results in the caller's order, once the copy has arrived."""
        if self.copied is not None:
            self.copied.synchronize()
        results: list[Result] = [None] * len(self.order)
        top = _top(self.shapes, len(self.words))
        sizes = [rows * row_words(width, top) for rows, width in self.shapes]
        at = 0
        for shape, errors, words in zip(
            self.shapes, self.errors, self.words.split(sizes), strict=True
        ):
            step = unpack(words, *shape)
            for row in range(shape[0]):
                results[self.order[at]] = _result(
                    self.canvases[at], step, row, errors.get(row), self.extra.get(at)
                )
                at += 1
        return results


class Pending:
    """A step that has been written, and of which the host may have learned nothing yet."""

    def __init__(
        self, copy: HostCopy, error: Exception | None, on_read: Callable[[Pending], None]
    ) -> None:
        """error: what the writing raised; on_read: called once, when the results are there."""
        self._copy, self._error, self._on_read = copy, error, on_read
        self._results: list[Result] | None = None

    def results(self) -> list[Result]:
        """Of each canvas its draft, or what failed in it, in the order of `forward`. Raises
        nothing: the rows have been moved on, and may not be stepped again in place of this step."""
        if self._results is None:
            self._results = self._read()
            self._on_read(self)
        return self._results

    def _read(self) -> list[Result]:
        try:
            if self._error is not None:
                raise self._error
            return self._copy.read()
        except Exception as error:
            return [error] * len(self._copy.order)


def _top_of(stats: HeadStats) -> Top:
    """On the host."""
    named = None if stats.named is None else stats.named.cpu()
    return stats.top_ids.cpu(), stats.top_probs.cpu(), named


def _top(shapes: Sequence[tuple[int, int]], words: int) -> int:
    """How many most probable tokens of each position the words of all parts hold."""
    without = sum(rows * row_words(width, 0) for rows, width in shapes)
    with_one = sum(rows * row_words(width, 1) for rows, width in shapes)
    return (words - without) // (with_one - without)


def _result(
    canvas: Canvas, step: Unpacked, row: int, error: Exception | None, top: Top | None
) -> Result:
    """Tells a canvas what became of its row. error: what its rules raised."""
    length, flags = canvas.length, step.flags[row]
    if flags & FROZEN:
        return None
    if error is not None:
        return error
    entropy = step.entropy[row, :length]
    if flags & NOT_FINITE:
        try:
            canvas.check_entropy(entropy, step.steps[row])
        except (ValueError, FloatingPointError) as not_finite:
            return not_finite
    canvas.learn(step.steps[row], bool(flags & CONVERGED), bool(flags & DONE))
    assert canvas.config.max_steps
    ids, probs, named = top or (step.top_ids[row, :length], step.top_probs[row, :length], None)
    return Draft(
        canvas.noise.canvas,
        canvas.step,
        step.argmax[row, :length],
        entropy,
        step.accepted[row, :length],
        canvas.config.max_steps,
        ids,
        probs,
        canvas.begun if canvas.step == 1 else None,
        named=named,
    )
