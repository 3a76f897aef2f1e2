"""Canvases of reads: their noise, their denoising steps, and what their slots say in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sfumato.diffusion.constraints.canvas_noise import NoiseKey
from sfumato.diffusion.constraints.slot_reading import SlotReading, slot_reading
from sfumato.diffusion.constraints.template import NOISE, ReadCanvas
from sfumato.diffusion.step.read_forwards import ReadForwards
from sfumato.model.device_result import DeviceResult
from sfumato.model.label_scores import VocabularyMass, label_mass, label_scores
from sfumato.model.network import Network
from sfumato.model.read_rows import Scratch
from sfumato.model.to_device import to_device


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
    network: Network,
    rows: Sequence[CanvasRow],
    steps: int,
    forwards: ReadForwards | None = None,
) -> DeviceResult[list[list[SlotReading]]]:
    """The readings of each row's slots after so many denoising steps, all rows in one forward a
    step, as `forwards` has it where it is given. The host waits for nothing.

    Only the open places change from step to step, each to a token that is drawn from the whole
    vocabulary at temperature 1, and only these have a soft embedding.
    """
    denoise = (forwards or network).denoise_beside
    scratches = [row.scratch for row in rows]
    lengths = [len(row.canvas.ids) for row in rows]
    canvases = [row.filled(row.first_tokens(network.config.vocab_size)) for row in rows]
    ids = to_device(torch.cat(canvases), network.device)
    starts = list(accumulate(lengths, initial=0))
    open_places = [
        start + at for start, row in zip(starts, rows, strict=False) for at in row.canvas.open
    ]
    places = to_device(torch.tensor(open_places, dtype=torch.int64), network.device)
    soft: Tensor | None = None
    for step in range(1, steps):
        wanted = [row.canvas.open for row in rows]
        hidden = denoise(ids.split(lengths), scratches, wanted, soft)
        drawn, of_places = _step(network, rows, hidden, step)
        ids = ids.index_copy(0, places, drawn)
        soft = hidden.new_zeros(starts[-1], hidden.shape[1], dtype=network.dtype)
        soft.index_copy_(0, places, of_places)
    wanted = [row.canvas.slots for row in rows]
    hidden = denoise(ids.split(lengths), scratches, wanted, soft)
    return _readings(network, rows, hidden)


@torch.no_grad()
def _step(
    network: Network, rows: Sequence[CanvasRow], hidden: Tensor, step: int
) -> tuple[Tensor, Tensor]:
    """What the next step reads at the open places: drawn tokens int64 [places], and soft embeddings
    [places, hidden]. hidden [all open places, hidden]."""
    uniforms = [row.key.uniform(row.sample, step, at) for row in rows for at in row.canvas.open]
    device = hidden.device
    wide = torch.float32 if device.type == "mps" else torch.float64
    stats = network.head(
        hidden,
        torch.ones(len(uniforms), device=device),
        to_device(torch.tensor(uniforms, dtype=wide), device),
    )
    return stats.drawn, stats.soft


@torch.no_grad()
def _readings(
    network: Network, rows: Sequence[CanvasRow], hidden: Tensor
) -> DeviceResult[list[list[SlotReading]]]:
    """hidden [all slots, hidden]."""
    labels = [own for row in rows for own in row.canvas.labels]
    scores = label_scores(network.head, hidden, labels)
    massive = [row.label_mass for row in rows for _ in row.canvas.slots]
    at = [number for number, wanted in enumerate(massive) if wanted]
    mass: DeviceResult[VocabularyMass] | None = None
    if at:
        chosen = hidden[to_device(torch.tensor(at), hidden.device)]
        mass = label_mass(network.head, chosen, [labels[number] for number in at])

    def readings(on_host: Sequence[Tensor]) -> list[list[SlotReading]]:
        logits = scores.result(on_host[: len(scores.tensors)])
        masses: dict[int, tuple[float, int]] = {}
        if mass is not None:
            known = mass.result(on_host[len(scores.tensors) :])
            masses = dict(zip(at, zip(known.labels, known.argmax, strict=True), strict=True))
        each = iter(
            slot_reading(logits[number], labels[number], masses.get(number))
            for number in range(len(labels))
        )
        return [[next(each) for _ in row.canvas.slots] for row in rows]

    tensors = scores.tensors if mass is None else (*scores.tensors, *mass.tensors)
    return DeviceResult(tensors, readings)
