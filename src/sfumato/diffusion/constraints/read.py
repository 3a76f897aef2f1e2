"""The read: a question goes through the network behind a state, and canvases behind the question.

The state is in a slot of the cache, which many reads share; each keeps the keys and values of its
question beside it.  What a read gives depends on its slot's tokens, its own tokens and the seed
alone: long questions are encoded in pieces that begin at their own start, and reads that share a
forward share nothing else.  On a CPU, and where kernels of `ops.triton` serve a GPU, that holds to
the bit; elsewhere products round by the number of rows in a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from sfumato.diffusion.constraints.answers import UNSURE, Sample
from sfumato.diffusion.constraints.canvas_noise import NoiseKey
from sfumato.diffusion.constraints.decision_settings import DecisionSettings
from sfumato.diffusion.constraints.read_canvases import CanvasRow, read_canvases
from sfumato.diffusion.constraints.reads import Read
from sfumato.diffusion.constraints.slot_reading import SlotReading
from sfumato.diffusion.step.read_forwards import ReadForwards
from sfumato.model.cache import Slot
from sfumato.model.device_result import DeviceResult, fetch_together
from sfumato.model.network import PREFILL_CHUNK, Network
from sfumato.model.read_rows import Scratch
from sfumato.options.limits import AUTO_SAMPLES

PIECE = 256
"""Tokens of a question that are encoded at once."""

Item = TypeVar("Item")


class OpenRead:
    """A read under way: what of its question is encoded, and which samples have been read."""

    def __init__(self, read: Read, slot: Slot, key: NoiseKey, settings: DecisionSettings) -> None:
        """key: the noise of the prefix that the slot holds."""
        self.read, self.settings = read, settings
        self.scratch = Scratch(slot)
        self.ids = torch.tensor(read.ids, dtype=torch.int64)
        self.key = key.extended(read.ids)
        self.samples: list[tuple[Sample, ...]] = []  # of each a sample for each target

    @property
    def wanted(self) -> int:
        """How many samples there are to be, as far as is known."""
        if self.settings.samples != "auto":
            return self.settings.samples
        is_unsure = any(sample.entropy > UNSURE for first in self.samples[:1] for sample in first)
        return AUTO_SAMPLES if is_unsure else 1

    @property
    def done(self) -> bool:
        return len(self.samples) >= self.wanted


@dataclass(frozen=True)
class Turn:
    """What a read does next: its question is encoded up to `stop`, and, where that is all of it,
    `samples` samples are read."""

    read: OpenRead
    stop: int
    samples: int
    tokens: int  # that go through the network, of a canvas for one denoising step


def next_turn(read: OpenRead, tokens: int) -> Turn:
    """A turn of at most so many tokens, or the smallest that there is."""
    held, canvas = read.scratch.length, read.read.canvas_tokens
    stop = min(len(read.ids), held + max(1, tokens // PIECE) * PIECE)
    if stop < len(read.ids):
        return Turn(read, stop, 0, stop - held)
    room = (tokens - (stop - held)) // canvas
    samples = max(1, min(room, read.wanted - len(read.samples)))
    return Turn(read, stop, samples, stop - held + samples * canvas)


def take_turns(
    network: Network,
    turns: Sequence[Turn],
    together: int = PREFILL_CHUNK,
    forwards: ReadForwards | None = None,
) -> None:
    """Does what the turns say, packed into few forwards, each of at most so many tokens `together`
    or of one piece or canvas, which changes no answer. Where it raises, what was encoded stays
    encoded, no sample is added, and the same turns may be taken again. forwards: those of a device
    that works by itself, which take canvases of one width.

    Waits for a device once, after all forwards, and not where no samples are read."""
    for turn in turns:
        if forwards is not None:
            forwards.place(turn.read.scratch, len(turn.read.ids))
    while pieces := [turn for turn in turns if turn.read.scratch.length < turn.stop]:
        for group in _packed(pieces, _next_piece, together):
            _encode(network, group)
    rows = [(row, turn.read.settings.steps) for turn in turns for row in _rows(turn)]
    readings: list[list[SlotReading]] = [[] for _ in rows]
    numbers: list[list[int]] = []  # of the rows that share a forward
    on_device: list[DeviceResult[list[list[SlotReading]]]] = []
    kinds: dict[tuple[int, int], list[tuple[int, CanvasRow]]] = {}
    for number, (row, steps) in enumerate(rows):
        width = 0 if forwards is None else len(row.canvas.ids)
        kinds.setdefault((steps, width), []).append((number, row))
    for (steps, _), alike in sorted(kinds.items(), key=lambda kind: kind[0]):
        for part in _packed(alike, lambda item: len(item[1].canvas.ids), together):
            numbers.append([number for number, _ in part])
            members = [row for _, row in part]
            on_device.append(read_canvases(network, members, steps, forwards))
    for part_numbers, results in zip(numbers, fetch_together(on_device), strict=True):
        for number, result in zip(part_numbers, results, strict=True):
            readings[number] = result
    taken = iter(readings)
    for turn in turns:
        for _ in range(turn.samples):
            canvases = [next(taken) for _ in turn.read.read.canvases]
            sample = tuple(target.sample(canvases) for target in turn.read.read.targets)
            turn.read.samples.append(sample)


def _next_piece(turn: Turn) -> int:
    """How many tokens are encoded at once."""
    return min(PIECE, turn.stop - turn.read.scratch.length)


def _encode(network: Network, turns: Sequence[Turn]) -> None:
    """One forward: the next piece of each question."""
    pieces = []
    for turn in turns:
        start = turn.read.scratch.length
        pieces.append(turn.read.ids[start : start + _next_piece(turn)])
    network.encode_beside(pieces, [turn.read.scratch for turn in turns])


def _rows(turn: Turn) -> Iterator[CanvasRow]:
    open_read, done = turn.read, len(turn.read.samples)
    for sample in range(done, done + turn.samples):
        for canvas in open_read.read.canvases:
            key = open_read.key.extended(canvas.ids)
            wanted = open_read.settings.label_mass
            yield CanvasRow(open_read.scratch, canvas, key, sample, wanted)


def _packed(
    items: Sequence[Item], tokens: Callable[[Item], int], most: int
) -> Iterator[list[Item]]:
    """The items in groups of at most so many tokens, one item at least."""
    group: list[Item] = []
    total = 0
    for item in items:
        count = tokens(item)
        if group and total + count > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += count
    if group:
        yield group
