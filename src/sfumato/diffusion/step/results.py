"""What the host learns of a step: a draft of each canvas, or what failed in its row alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.step.denoise import Findings
from sfumato.diffusion.step.packed import CONVERGED, DONE, NOT_FINITE, Unpacked, row_words, unpack
from sfumato.model.head import HeadStats

Result = Draft | Exception


@dataclass(frozen=True)
class Pending:
    """A step that has been written, and of which the host has learned nothing yet."""

    findings: Findings
    errors: list[dict[int, Exception]]  # of each part, by row: what its rules raised
    words: Tensor  # of all parts, on the host
    copied: torch.Event | None  # None: `words` can be read at once

    def results(self) -> list[Result]:
        """Of each canvas its draft, or what failed in it alone, in the order of `forward`."""
        if self.copied is not None:
            self.copied.synchronize()
        findings, layout = self.findings, self.findings.layout
        top = findings.stats.top_ids.shape[1]
        results: dict[int, Result] = {}
        sizes = [part.batch.rows * row_words(part.batch.width, top) for part in layout.parts]
        words = self.words.split(sizes)
        for part, errors, part_words in zip(layout.parts, self.errors, words, strict=True):
            step = unpack(part_words, part.batch.rows, part.batch.width)
            for row in range(len(part.lengths)):
                at = len(results)
                canvas = findings.canvases[at]
                if row in errors:
                    results[at] = errors[row]
                else:
                    results[at] = result_of(canvas, step, row, findings.extra.get(at))
        places = {place: at for at, place in enumerate(layout.order)}
        return [results[places[place]] for place in range(len(results))]


def result_of(canvas: Canvas, step: Unpacked, row: int, extra: HeadStats | None) -> Result:
    """Tells a canvas what became of its row."""
    length, flags = canvas.length, step.flags[row]
    entropy = step.entropy[row, :length]
    if flags & NOT_FINITE:
        try:
            canvas.check_entropy(entropy, step.steps[row])
        except (ValueError, FloatingPointError) as error:
            return error
    canvas.learn(step.steps[row], bool(flags & CONVERGED), bool(flags & DONE))
    assert canvas.config.max_steps
    return Draft(
        canvas.noise.canvas,
        canvas.step,
        step.argmax[row, :length],
        entropy,
        step.accepted[row, :length],
        canvas.config.max_steps,
        step.top_ids[row, :length] if extra is None else extra.top_ids.cpu(),
        step.top_probs[row, :length] if extra is None else extra.top_probs.cpu(),
        canvas.begun if canvas.step == 1 else None,
    )
