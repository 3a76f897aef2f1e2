"""The read: a question goes through the network behind a state, and canvases behind the question.

The state is in a slot of the cache, which many reads share; each keeps the keys and values of its
question beside it.  What a read gives depends on its slot's tokens, its own tokens and the seed
alone: long questions are encoded in pieces that begin at their own start, and reads that share a
forward share nothing else.  On a CPU, and where kernels of `ops.triton` serve a GPU, that holds to
the bit; elsewhere products round by the number of rows in a forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sfumato.diffusion.causal import packed
from sfumato.diffusion.constraints.decision_plan import NoiseKey, Read
from sfumato.diffusion.constraints.questions import UNSURE, Sample, softmax
from sfumato.diffusion.constraints.read_template import NOISE, ReadCanvas
from sfumato.diffusion.scoring import Scoring, score
from sfumato.diffusion.step.captured import ReadForwards
from sfumato.model.cache import Slot
from sfumato.model.devices import DeviceResult, fetch_together, to_device
from sfumato.model.network import PREFILL_CHUNK, Network
from sfumato.model.scores import VocabularyMass, label_mass, label_scores
from sfumato.model.segments import Suffix
from sfumato.ops.gpu import widest_float
from sfumato.options.limits import AUTO_SAMPLES


@dataclass(frozen=True, eq=False)
class CanvasRow:
    """One canvas of one sample."""

    suffix: Suffix
    canvas: ReadCanvas
    key: NoiseKey
    sample: int
    label_mass: bool  # whether it is wanted

    def first_tokens(self, vocab_size: int, mask: int | None = None) -> list[int]:
        """The noise of the open places, or the mask where there is one."""
        if mask is not None:
            return [mask] * len(self.canvas.open)
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
) -> DeviceResult[list[list[Sample]]]:
    """The readings of each row's slots after so many denoising steps, all rows in one forward a
    step, as `forwards` has it where it is given. The host waits for nothing.

    Only the open places change from step to step, each to a token that is drawn from the whole
    vocabulary at temperature 1, and only these have a soft embedding. Where the network has a mask
    token, it stands at the open places, and there is one step: a place with a drawn token would be
    no question any more.
    """
    denoise = (forwards or network).denoise_beside
    suffixes = [row.suffix for row in rows]
    lengths = [len(row.canvas.ids) for row in rows]
    vocab_size, mask = network.config.vocab_size, network.config.mask_id
    canvases = [row.filled(row.first_tokens(vocab_size, mask)) for row in rows]
    ids = to_device(torch.cat(canvases), network.device)
    starts = list(accumulate(lengths, initial=0))
    open_places = [
        start + at for start, row in zip(starts, rows, strict=False) for at in row.canvas.open
    ]
    places = to_device(torch.tensor(open_places, dtype=torch.int64), network.device)
    soft: Tensor | None = None
    for step in range(1, steps if mask is None else 1):
        wanted = [row.canvas.open for row in rows]
        hidden = denoise(ids.split(lengths), suffixes, wanted, soft)
        drawn, of_places = _step(network, rows, hidden, step)
        ids = ids.index_copy(0, places, drawn)
        soft = hidden.new_zeros(starts[-1], hidden.shape[1], dtype=network.dtype)
        soft.index_copy_(0, places, of_places)
    wanted = [row.canvas.slots for row in rows]
    hidden = denoise(ids.split(lengths), suffixes, wanted, soft)
    return _readings(network, rows, hidden)


@torch.no_grad()
def _step(
    network: Network, rows: Sequence[CanvasRow], hidden: Tensor, step: int
) -> tuple[Tensor, Tensor]:
    """What the next step reads at the open places: drawn tokens int64 [places], and soft embeddings
    [places, hidden]. hidden [all open places, hidden]."""
    uniforms = [row.key.uniform(row.sample, step, at) for row in rows for at in row.canvas.open]
    device = hidden.device
    wide = widest_float(device.type)
    temperature = torch.ones(len(uniforms), device=device)
    drawn_with = temperature, to_device(torch.tensor(uniforms, dtype=wide), device)
    plain = Scoring.plain(network.head.vocab_size)
    stats, _ = score(network.head, hidden, *drawn_with, plain)
    return stats.drawn, stats.soft


@torch.no_grad()
def _readings(
    network: Network, rows: Sequence[CanvasRow], hidden: Tensor
) -> DeviceResult[list[list[Sample]]]:
    """hidden [all slots, hidden]."""
    labels = [own for row in rows for own in row.canvas.labels]
    scores = label_scores(network.head, hidden, labels)
    massive = [row.label_mass for row in rows for _ in row.canvas.slots]
    at = [number for number, wanted in enumerate(massive) if wanted]
    mass: DeviceResult[VocabularyMass] | None = None
    if at:
        chosen = hidden[to_device(torch.tensor(at), hidden.device)]
        mass = label_mass(network.head, chosen, [labels[number] for number in at])

    def readings(on_host: Sequence[Tensor]) -> list[list[Sample]]:
        logits = scores.result(on_host[: len(scores.tensors)])
        masses: dict[int, tuple[float, bool]] = {}
        if mass is not None:
            known = mass.result(on_host[len(scores.tensors) :])
            # Sums of float32 numbers: they may round to a little over 1.
            masses = {
                number: (min(1.0, mass), argmax in labels[number])
                for number, mass, argmax in zip(at, known.labels, known.argmax, strict=True)
            }
        each = (
            Sample(softmax(own), *masses.get(number, (None, None)))
            for number, own in enumerate(logits)
        )
        return [[next(each) for _ in row.canvas.slots] for row in rows]

    tensors = scores.tensors if mass is None else (*scores.tensors, *mass.tensors)
    return DeviceResult(tensors, readings)


PIECE = 256
"""Tokens of a question that are encoded at once."""


class OpenRead:
    """A read under way: what of its question is encoded, and which samples have been read."""

    def __init__(self, read: Read, slot: Slot) -> None:
        """slot: holds the prefix."""
        self.read, self.suffix = read, Suffix(slot)
        self.ids = torch.tensor(read.ids, dtype=torch.int64)
        self.samples: list[tuple[Sample, ...]] = []  # of each a sample for each target

    @property
    def wanted(self) -> int:
        """How many samples there are to be, as far as is known."""
        if self.read.settings.samples != "auto":
            return self.read.settings.samples
        is_unsure = any(sample.entropy > UNSURE for first in self.samples[:1] for sample in first)
        return AUTO_SAMPLES if is_unsure else 1

    @property
    def done(self) -> bool:
        return len(self.samples) >= self.wanted


@dataclass(frozen=True)
class ReadChunk:
    """What a read does next: its question is encoded up to `stop`, and, where that is all of it,
    `samples` samples are read."""

    read: OpenRead
    stop: int
    samples: int
    tokens: int  # that go through the network, of a canvas for one denoising step


def next_chunk(read: OpenRead, tokens: int) -> ReadChunk:
    """A chunk of at most so many tokens, or the smallest that there is."""
    held, canvas = read.suffix.length, read.read.canvas_tokens
    stop = min(len(read.ids), held + max(1, tokens // PIECE) * PIECE)
    if stop < len(read.ids):
        return ReadChunk(read, stop, 0, stop - held)
    room = (tokens - (stop - held)) // canvas
    samples = max(1, min(room, read.wanted - len(read.samples)))
    return ReadChunk(read, stop, samples, stop - held + samples * canvas)


def run_chunks(
    network: Network,
    chunks: Sequence[ReadChunk],
    together: int = PREFILL_CHUNK,
    forwards: ReadForwards | None = None,
) -> None:
    """Does what the chunks say, packed into few forwards, each of at most so many tokens `together`
    or of one piece or canvas, which changes no answer. Where it raises, what was encoded stays
    encoded, no sample is added, and the same chunks may be taken again. forwards: those of a device
    that works by itself, which take canvases of one width.

    Waits for a device once, after all forwards, and not where no samples are read."""
    for chunk in chunks:
        if forwards is not None:
            forwards.place(chunk.read.suffix, len(chunk.read.ids))
    while pieces := [chunk for chunk in chunks if chunk.read.suffix.length < chunk.stop]:
        for group in packed(pieces, _next_piece, together):
            _encode(network, group)
    rows = [list(_rows(chunk)) for chunk in chunks]
    kinds: dict[tuple[int, int], list[CanvasRow]] = {}
    for chunk, own in zip(chunks, rows, strict=True):
        for row in own:
            width = 0 if forwards is None else len(row.canvas.ids)
            kinds.setdefault((chunk.read.read.settings.steps, width), []).append(row)
    groups = [
        (steps, part)
        for (steps, _), alike in sorted(kinds.items(), key=lambda kind: kind[0])
        for part in packed(alike, lambda row: len(row.canvas.ids), together)
    ]
    on_device = [read_canvases(network, part, steps, forwards) for steps, part in groups]
    readings: dict[CanvasRow, list[Sample]] = {}
    for (_, part), results in zip(groups, fetch_together(on_device), strict=True):
        readings.update(zip(part, results, strict=True))
    for chunk, own in zip(chunks, rows, strict=True):
        each = len(chunk.read.read.canvases)
        for start in range(0, len(own), each):
            canvases = [readings[row] for row in own[start : start + each]]
            sample = tuple(target.sample(canvases) for target in chunk.read.read.targets)
            chunk.read.samples.append(sample)


def _next_piece(chunk: ReadChunk) -> int:
    """How many tokens are encoded at once."""
    return min(PIECE, chunk.stop - chunk.read.suffix.length)


def _encode(network: Network, chunks: Sequence[ReadChunk]) -> None:
    """One forward: the next piece of each question."""
    pieces = []
    for chunk in chunks:
        start = chunk.read.suffix.length
        pieces.append(chunk.read.ids[start : start + _next_piece(chunk)])
    network.encode_beside(pieces, [chunk.read.suffix for chunk in chunks])


def _rows(chunk: ReadChunk) -> Iterator[CanvasRow]:
    read, done = chunk.read.read, len(chunk.read.samples)
    for sample in range(done, done + chunk.samples):
        for canvas in read.canvases:
            key = read.key.extended(canvas.ids)
            yield CanvasRow(chunk.read.suffix, canvas, key, sample, read.settings.label_mass)
