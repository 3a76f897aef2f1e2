"""Canvases of reads: their noise, their denoising steps, and what their slots say in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.diffusion.constraints.canvas_noise import NoiseKey
from sfumato.diffusion.constraints.slot_reading import SlotReading, slot_reading
from sfumato.diffusion.constraints.template import NOISE, ReadCanvas
from sfumato.model.label_scores import label_scores, vocabulary_mass
from sfumato.model.network import Network
from sfumato.model.read_rows import Scratch


@dataclass(frozen=True, eq=False)
class CanvasRow:
    """One canvas of one sample."""

    scratch: Scratch
    canvas: ReadCanvas
    key: NoiseKey
    sample: int
    label_mass: bool  # whether it is wanted

    def first_tokens(self, vocab_size: int) -> list[int]:
        """The noise of the open places."""
        banned = frozenset(token for labels in self.canvas.labels for token in labels)
        return [self.key.token(self.sample, at, vocab_size, banned) for at in self.canvas.open]

    def filled(self, tokens: Sequence[int]) -> Tensor:
        """int64 [width]: the canvas with these tokens at its open places."""
        fill = iter(tokens)
        return torch.tensor([next(fill) if id == NOISE else id for id in self.canvas.ids])


def read_canvases(
    network: Network, rows: Sequence[CanvasRow], steps: int
) -> list[list[SlotReading]]:
    """The readings of each row's slots after so many denoising steps, all rows in one forward a
    step.

    Only the open places change from step to step, each to a token that is drawn from the whole
    vocabulary at temperature 1, and only these have a soft embedding.
    """
    tokens = [row.first_tokens(network.config.vocab_size) for row in rows]
    scratches = [row.scratch for row in rows]
    soft: Tensor | None = None
    for step in range(1, steps):
        canvases = [row.filled(each) for row, each in zip(rows, tokens, strict=True)]
        wanted = [row.canvas.open for row in rows]
        hidden = network.denoise_beside(canvases, scratches, wanted, soft)
        tokens, soft = _step(network, rows, hidden, step)
    canvases = [row.filled(each) for row, each in zip(rows, tokens, strict=True)]
    wanted = [row.canvas.slots for row in rows]
    hidden = network.denoise_beside(canvases, scratches, wanted, soft)
    return _readings(network, rows, hidden)


@torch.no_grad()
def _step(
    network: Network, rows: Sequence[CanvasRow], hidden: Tensor, step: int
) -> tuple[list[list[int]], Tensor]:
    """What the next step reads: tokens of the open places, and soft embeddings of all places.
    hidden [all open places, hidden]."""
    places = [(row, at) for row in rows for at in row.canvas.open]
    uniforms = [row.key.uniform(row.sample, step, at) for row, at in places]
    device = hidden.device
    wide = torch.float32 if device.type == "mps" else torch.float64
    stats = network.head(
        hidden,
        torch.ones(len(places), device=device),
        torch.tensor(uniforms, dtype=wide, device=device),
    )
    drawn = iter(stats.drawn.tolist())
    tokens = [[next(drawn) for _ in row.canvas.open] for row in rows]
    starts, start = [], 0
    for row in rows:
        starts += [start + at for at in row.canvas.open]
        start += len(row.canvas.ids)
    soft = hidden.new_zeros(start, hidden.shape[1], dtype=network.dtype)
    return tokens, soft.index_copy_(0, torch.tensor(starts, device=device), stats.soft)


@torch.no_grad()
def _readings(
    network: Network, rows: Sequence[CanvasRow], hidden: Tensor
) -> list[list[SlotReading]]:
    """hidden [all slots, hidden]."""
    labels = [own for row in rows for own in row.canvas.labels]
    scores = label_scores(network.head, hidden, labels)
    massive = [row.label_mass for row in rows for _ in row.canvas.slots]
    at = [number for number, wanted in enumerate(massive) if wanted]
    masses: dict[int, tuple[float, int]] = {}
    if at:
        chosen = hidden[torch.tensor(at, device=hidden.device)]
        mass = vocabulary_mass(network.head, chosen, [labels[number] for number in at])
        masses = dict(zip(at, zip(mass.labels, mass.argmax, strict=True), strict=True))
    readings = iter(
        slot_reading(scores[number], labels[number], masses.get(number))
        for number in range(len(labels))
    )
    return [[next(readings) for _ in row.canvas.slots] for row in rows]
