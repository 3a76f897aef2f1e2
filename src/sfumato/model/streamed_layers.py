"""Layers that a card computes while their weights stay in the host's memory.

The card has two buffers, each as large as the largest of these layers.  Layers take them in turn:
while one layer is computed in a buffer, the next one is copied into the other.  A layer has its
buffer for good, so its weights are views that are made once.  Knows no checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sfumato.ops.device_check import mapped
from sfumato.ops.side_copies import SideCopies

BUFFERS = 2  # one is read while the other is filled
ALIGNMENT = 256  # bytes: of an allocation on a card, which kernels count on
PIECE = 64 << 20
"""Bytes of the host's memory that are page-locked at a time. A power of two: torch rounds larger
pieces up to one, which for a layer could be almost twice its size."""


def aligned(nbytes: int) -> int:
    """Bytes that a tensor of so many takes in a buffer."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def buffers_of(layers: Sequence[int]) -> list[int]:
    """The bytes of each buffer on the card for layers of so many bytes each."""
    return [max(layers)] * min(BUFFERS, len(layers)) if layers else []


def kept_bytes(layers: Sequence[int]) -> int:
    """The host's memory for layers of so many bytes each."""
    return -(-sum(layers) // PIECE) * PIECE


class HostMemory:
    """Memory of the host in pieces, of which tensors take their bytes one after another."""

    def __init__(self, copies: SideCopies, piece: int = PIECE) -> None:
        """piece: bytes of each, a multiple of ALIGNMENT."""
        self.copies, self.end = copies, 0
        self._size = piece
        self._pieces: list[Tensor] = []

    def parts(self, start: int, stop: int) -> list[Tensor]:
        """The bytes start..stop of all that is taken, as views of the pieces."""
        parts = []
        while start < stop:
            number, at = divmod(start, self._size)
            if number == len(self._pieces):
                self._pieces.append(self.copies.memory(self._size))
            size = min(stop - start, self._size - at)
            parts.append(self._pieces[number][at : at + size])
            start += size
        return parts

    def keep(self, data: Tensor) -> None:
        """Copies uint8 [n] from any device behind what is taken, and pads it to a multiple of
        ALIGNMENT."""
        start, self.end = self.end, self.end + aligned(len(data))
        parts = self.parts(start, start + len(data))
        for part, given in zip(parts, data.split([len(part) for part in parts]), strict=True):
            part.copy_(given)


class KeptLayer:
    """The weights of one layer in the host's memory, in the form that the card computes with."""

    def __init__(self, memory: HostMemory) -> None:
        """Keeps the weights of one layer before those of another."""
        self._memory, self._start, self.nbytes = memory, memory.end, 0
        self._places: list[tuple[Any, Callable[[Any], None]]] = []

    @cached_property
    def parts(self) -> list[Tensor]:
        """uint8 views, which follow each other in a buffer, when all is kept."""
        return self._memory.parts(self._start, self._start + self.nbytes)

    def keep(self, value: Any, put: Callable[[Any], None]) -> None:
        """Keeps a weight, tensor or dataclass with tensors, of which nothing stays on the card;
        `put` will be given the same weight in the layer's buffer."""
        assert self._memory.end == self._start + self.nbytes, "another layer was kept meanwhile"
        self._places.append((mapped(value, self._kept), put))
        self.nbytes = self._memory.end - self._start

    def _kept(self, x: Tensor) -> Tensor:
        """A tensor of no memory, with dtype and shape; its bytes are kept."""
        self._memory.keep(x.contiguous().reshape(-1).view(torch.uint8))
        return torch.empty(x.shape, dtype=x.dtype, device="meta")

    def put_into(self, buffer: Tensor) -> None:
        """Gives every weight as views of a buffer."""
        start = 0

        def view(x: Tensor) -> Tensor:
            nonlocal start
            part = buffer[start : start + x.nbytes]
            start += aligned(x.nbytes)
            return part.view(x.dtype).view(x.shape)

        for value, put in self._places:
            put(mapped(value, view))
        self._places.clear()


class StreamedLayers:
    """The streamed layers of one card, and the buffers that they take in turn."""

    def __init__(
        self, device: torch.device, layers: dict[int, KeptLayer], copies: SideCopies
    ) -> None:
        """layers: by their numbers in the network."""
        self._layers, self._copies = dict(sorted(layers.items())), copies
        sizes = buffers_of([layer.nbytes for layer in layers.values()])
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        numbers, count = list(self._layers), len(sizes)
        self._slots = {number: place % count for place, number in enumerate(numbers)}
        turns = [numbers[slot::count] for slot in range(count)]
        self._next = {n: turn[(i + 1) % len(turn)] for turn in turns for i, n in enumerate(turn)}
        self._held: list[int | None] = [None] * count
        self._waits: list[Callable[[], None]] = [lambda: None] * count
        for number, layer in self._layers.items():
            layer.put_into(self.buffers[self._slots[number]])

    @property
    def nbytes(self) -> int:
        """Bytes of the layers in the host's memory."""
        return sum(layer.nbytes for layer in self._layers.values())

    @contextmanager
    def present(self, number: int) -> Iterator[None]:
        """Within it, work for the card finds the layer's weights in their buffer. Afterwards the
        buffer is filled with the layer that has its next turn, as soon as that work is done; the
        last one's is the first of the next forward."""
        self._bring(number)
        self._waits[self._slots[number]]()
        yield
        self._bring(self._next[number])

    def _bring(self, number: int) -> None:
        """Starts the copy of a layer that is not in its buffer."""
        slot, layer = self._slots[number], self._layers[number]
        if self._held[slot] == number:
            return
        self._held[slot] = None  # where the copy cannot start, neither layer is there
        target = self.buffers[slot][: layer.nbytes]
        self._waits[slot] = self._copies.start(target, layer.parts)
        self._held[slot] = number
