"""Which soft embeddings of a step are computed, and what each row may leave out of them.

All of it is of a row alone, so that its arithmetic does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.sampler import SAMPLERS
from sfumato.diffusion.stopping import Never, SettledToEnd, StableAndConfident
from sfumato.model.approximate import AS_ROUNDED, Skip
from sfumato.model.head import VocabularyHead

LATE_AT_MOST = 0.125
"""Of a row's positions: where not more are to be summed in full, they wait for the end of the pass.
A sweep of their own then costs less than their part in the pass's second product does, whose time
hardly falls with the number of positions; more of them are summed in it, and none is left out."""


def reads_soft(canvas: Canvas) -> bool:
    """Whether anything may read the soft embedding of the step to come. Nothing does where it is
    the canvas's last one, or the row has no self-conditioning, and the rules are built-in ones,
    which do not look at it."""
    config = canvas.config
    known = type(config.sampler) in SAMPLERS.values()
    known = known and type(config.stopping) in (StableAndConfident, SettledToEnd, Never)
    is_unread = canvas.is_at_last_step or not config.self_conditioning
    return not (known and canvas.guidance is None and is_unread)


def embedded(canvases: Sequence[Canvas], device: torch.device) -> bool | Tensor:
    """Of which packed positions a pass gives soft embeddings: True for all, False for none, or bool
    [positions]. Elsewhere than on a CPU a kernel does the whole pass, whatever is read of it."""
    reading = [device.type != "cpu" or reads_soft(canvas) for canvas in canvases]
    if all(reading) or not any(reading):
        return reading[0]
    return spread(canvases, reading)


def skip_of(
    head: VocabularyHead, canvases: Sequence[Canvas], expected: Tensor | None, device: torch.device
) -> Skip | None:
    """What the rows of a group may leave out of their soft embeddings; None for nothing. expected:
    as in `score_rows`, of their positions."""
    shares = [_share(head, canvas, device) for canvas in canvases]
    if expected is None or not any(shares):
        return None
    late = torch.zeros_like(expected)
    for canvas, at in zip(canvases, spans_of(canvases), strict=True):
        # Of the row alone, so that its arithmetic does not depend on other rows.
        late[at] = (~expected[at]).sum() <= canvas.length * LATE_AT_MOST
    return Skip(spread(canvases, shares).to(device), expected, late)


def _share(head: VocabularyHead, canvas: Canvas, device: torch.device) -> float:
    """The share that a row may leave out; see `Skip`."""
    config = canvas.config
    if config.soft_skip is not None:
        return float(config.soft_skip)
    hides = head.rounding > 0 and device.type == "cpu" and config.soft_top_k is None
    return AS_ROUNDED if hides else 0.0


def spans_of(canvases: Sequence[Canvas]) -> list[slice]:
    ends = list(accumulate(canvas.length for canvas in canvases))
    return [slice(end - c.length, end) for end, c in zip(ends, canvases, strict=True)]


def spread(canvases: Sequence[Canvas], values: Sequence[float]) -> Tensor:
    """One value a row → one a position."""
    return torch.cat([torch.full((c.length,), v) for c, v in zip(canvases, values, strict=True)])
