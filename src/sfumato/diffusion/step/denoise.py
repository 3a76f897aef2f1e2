"""One denoising step as pure tensor functions of the state of batches.

`forward` and `compute_updates` change nothing; the second packs what the host is to learn into one
tensor.  `apply_updates` writes them into the batches in place.  None of the three reads a value on
the host, copies to the device, or has a shape that depends on data.  Exceptions are rows that ask
for more than the plain distribution (see `scoring.py`), and rules that cannot be lifted (see
`rules.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.noise import step_noise
from sfumato.diffusion.scoring import score_rows
from sfumato.diffusion.soft_rows import embedded
from sfumato.diffusion.step.layout import Layout, Part
from sfumato.diffusion.step.masked import score_masked
from sfumato.diffusion.step.packed import pack
from sfumato.diffusion.step.seats import Seats, SeatsState
from sfumato.diffusion.step.update import Update, apply_update, compute_update
from sfumato.model.attention import CanvasPart, CanvasRows
from sfumato.model.head import HeadStats
from sfumato.model.network import Network


@dataclass(frozen=True)
class Draws:
    """What a step is drawn with."""

    temperature: Tensor  # float32 [positions], packed
    uniforms: Tensor  # float64 [positions], packed
    fresh: tuple[Tensor, ...]  # int64 [R, W] of each part


def draw(parts: Sequence[Part], vocab_size: int) -> Draws:
    """Of the step to come."""
    temperatures, uniforms, fresh = [], [], []
    for part in parts:
        batch = part.batch
        counters = batch.canvas, batch.attempt, batch.step, batch.max_steps
        temperature, uniform, tokens = step_noise(
            batch.seeds, *counters, batch.temperatures, batch.width, vocab_size
        )
        temperatures.append(part.pack(temperature))
        uniforms.append(part.pack(uniform))
        fresh.append(tokens)
    return Draws(_joined(temperatures), _joined(uniforms), tuple(fresh))


def hidden_states(
    network: Network, parts: Sequence[Part], attended: Sequence[CanvasPart]
) -> Tensor:
    """One forward: [positions, hidden], packed. Before a row's first step its soft embedding is
    zeros, which give what none gives: whether there is one is not asked on the host."""
    tokens = _joined([part.pack(part.batch.tokens) for part in parts])
    soft = _joined([part.pack(part.batch.soft) for part in parts])
    return network.denoise_batch(tokens, soft, CanvasRows(attended))


@dataclass(frozen=True)
class ForwardResult:
    """What a forward gives, before any canvas is moved on."""

    layout: Layout
    canvases: tuple[Canvas, ...]  # in the layout's order
    draws: Draws
    stats: HeadStats  # of all packed positions
    extra: dict[int, HeadStats]  # by row in the layout's order: see `score_rows`
    seats: tuple[tuple[Seats, SeatsState], ...]  # of all parts, as they were at the forward

    def is_current(self) -> bool:
        """Whether the rows are still those of the forward, and no step has been written since."""
        return all(seats.state == state for seats, state in self.seats)


def forward(
    network: Network,
    layout: Layout,
    canvases: tuple[Canvas, ...],
    attended: Sequence[CanvasPart],
    seats: Sequence[Seats],
    hidden: Tensor | None = None,
) -> ForwardResult:
    """canvases: in the layout's order; attended: see `hidden_states`, whose result is
    `hidden` where that has been computed."""
    states = tuple((part_seats, part_seats.state) for part_seats in seats)
    draws = draw(layout.parts, network.config.vocab_size)
    if hidden is None:
        hidden = hidden_states(network, layout.parts, attended)
    inputs = draws.temperature, draws.uniforms
    embeds = embedded(canvases, hidden.device)
    expected = _joined([part.pack(part.batch.expected) for part in layout.parts])
    stats, extra = score_rows(
        network.head, hidden, canvases, *inputs, layout.scoring, expected > 0, embeds
    )
    if any(canvas.guidance is not None for canvas in canvases):
        spans = [span for part in layout.parts for span in part.spans]
        extra = score_masked(network.head, hidden, canvases, spans, *inputs, stats, extra)
    return ForwardResult(layout, canvases, draws, stats, extra, states)


def compute_updates(result: ForwardResult) -> tuple[list[Update], Tensor]:
    """What a step makes of each part, and the packed words of all parts, one part after another."""
    parts, stats = result.layout.parts, result.stats
    updates = []
    row = position = 0
    for part, fresh in zip(parts, result.draws.fresh, strict=True):
        rows, positions = len(part.lengths), sum(part.spans)
        part_stats = stats if len(parts) == 1 else stats[position : position + positions]
        extra = {i - row: e for i, e in result.extra.items() if row <= i < row + rows}
        updates.append(compute_update(part, part_stats, fresh, extra))
        row, position = row + rows, position + positions
    return updates, _joined([pack(new).flatten() for new in updates])


def apply_updates(parts: Sequence[Part], updates: Sequence[Update]) -> None:
    """Moves the rows on. Allocates nothing."""
    for part, new in zip(parts, updates, strict=True):
        apply_update(part.batch, new)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
