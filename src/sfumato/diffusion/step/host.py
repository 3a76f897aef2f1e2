"""The host's side of a step: canvases take their rows, and learn what a step made of them.

`Denoiser.forward` moves no canvas on and may be repeated; `write` moves the rows on where their
state lives; `Pending.results` waits for what the host learns of it, which may be later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.scoring import score_rows
from sfumato.diffusion.step.batch import StepBatch, width_for
from sfumato.diffusion.step.denoise import Draws, change, draw, hidden_states, write
from sfumato.diffusion.step.layout import Layout, Part, lay_out
from sfumato.diffusion.step.packed import (
    CONVERGED,
    DONE,
    NOT_FINITE,
    Unpacked,
    pack,
    to_host,
    unpack,
)
from sfumato.diffusion.step.rules import RuleGroup
from sfumato.diffusion.step.seats import Key, Seats
from sfumato.model.cache import Slot
from sfumato.model.head import HeadStats
from sfumato.model.network import Network

Result = Draft | Exception


@dataclass(frozen=True)
class Findings:
    """What a forward found, before any canvas is moved on."""

    layout: Layout
    canvases: tuple[Canvas, ...]  # in the layout's order
    draws: Draws
    stats: HeadStats  # of all packed positions
    extra: dict[int, HeadStats]  # by row in the layout's order: see `score_rows`


class Denoiser:
    """Steps canvases of one network. Not for several threads at a time."""

    def __init__(self, network: Network, rows: int) -> None:
        """rows: for how many a batch has room at first."""
        self.network, self._rows = network, rows
        self._seats: dict[Key, Seats] = {}
        self._layout: tuple[object, Layout] | None = None

    @torch.no_grad()
    def forward(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> Findings:
        """One forward of the canvases; canvases[i] follows the prefix that slots[i] holds."""
        network = self.network
        layout = self._lay_out(canvases, slots)
        ordered = tuple(canvases[i] for i in layout.order)
        draws = draw(layout.parts, network.config.vocab_size)
        begun = any(canvas.step and canvas.config.self_conditioning for canvas in canvases)
        hidden = hidden_states(network, layout.parts, layout.attended(slots), begun)
        given = hidden, ordered, draws.temperature, draws.uniforms, layout.scoring
        return Findings(layout, ordered, draws, *score_rows(network.head, *given))

    @torch.no_grad()
    def write(self, findings: Findings) -> Pending:
        """Moves the rows on, and starts the copy of what the host learns of it."""
        parts, stats = findings.layout.parts, findings.stats
        changes = []
        row = position = 0
        for part, fresh in zip(parts, findings.draws.fresh, strict=True):
            rows, positions = len(part.lengths), sum(part.spans)
            part_stats = stats if len(parts) == 1 else stats[position : position + positions]
            extra = {i - row: e for i, e in findings.extra.items() if row <= i < row + rows}
            changes.append(change(part, part_stats, fresh, extra))
            row, position = row + rows, position + positions
        for part, new in zip(parts, changes, strict=True):
            write(part.batch, new)
        words = [pack(part.batch, new) for part, new in zip(parts, changes, strict=True)]
        return Pending(findings, [new.errors for new in changes], *to_host(words))

    def advance(self, findings: Findings) -> list[Result]:
        """Moves the canvases on: of each its draft, or what failed in it alone, in the order of
        `forward`."""
        return self.write(findings).results()

    def _lay_out(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> Layout:
        keys = [self._key(canvas) for canvas in canvases]
        rows = range(len(canvases))
        pools = {id(slot.pool): None for slot in slots}  # rows of one pool stand together
        numbers = {pool: number for number, pool in enumerate(pools)}
        orders = {
            key: sorted(
                (i for i in rows if keys[i] == key), key=lambda i: numbers[id(slots[i].pool)]
            )
            for key in dict.fromkeys(keys)
        }
        for key, members in orders.items():
            self._seats_of(key).take([canvases[i] for i in members])
        order = [i for members in orders.values() for i in members]
        version = (
            tuple(order),
            tuple((key, len(members), self._seats[key].version) for key, members in orders.items()),
            tuple((numbers[id(slot.pool)], slot.index) for slot in slots),
        )
        if self._layout is None or self._layout[0] != version:
            batches = [
                (self._seats[key].batch, [canvases[i] for i in own], [slots[i] for i in own])
                for key, own in orders.items()
            ]
            vocab_size, device = self.network.head.vocab_size, self.network.device
            self._layout = version, lay_out(order, batches, vocab_size, device)
        return self._layout[1]

    def _key(self, canvas: Canvas) -> Key:
        return width_for(canvas.length, self.network.config.canvas_length), canvas.history_rows

    def _seats_of(self, key: Key) -> Seats:
        if key not in self._seats:
            network = self.network
            hidden = network.config.hidden_size
            self._seats[key] = Seats(key, self._rows, hidden, network.dtype, network.device)
        return self._seats[key]


@dataclass(frozen=True)
class Pending:
    """A step that has been written, and of which the host has learned nothing yet."""

    findings: Findings
    errors: list[dict[int, Exception]]  # of each part, by row: what its rules raised
    words: list[Tensor]  # of each part, on the host
    copied: torch.Event | None  # None: `words` can be read at once

    def results(self) -> list[Result]:
        """Of each canvas its draft, or what failed in it alone, in the order of `forward`."""
        if self.copied is not None:
            self.copied.synchronize()
        findings, layout = self.findings, self.findings.layout
        results: dict[int, Result] = {}
        for part, errors, words in zip(layout.parts, self.errors, self.words, strict=True):
            step = unpack(words, part.batch.width)
            for row in range(len(part.lengths)):
                at = len(results)
                canvas = findings.canvases[at]
                if row in errors:
                    results[at] = errors[row]
                else:
                    results[at] = _result(canvas, step, row, findings.extra.get(at))
        places = {place: at for at, place in enumerate(layout.order)}
        return [results[places[place]] for place in range(len(results))]


def _result(canvas: Canvas, step: Unpacked, row: int, extra: HeadStats | None) -> Result:
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


def denoise_step(
    network: Network, canvases: Sequence[Canvas], slots: Sequence[Slot]
) -> list[Draft]:
    """Moves each canvas one step on; canvases[i] follows the prefix that slots[i] holds. Raises
    what fails in one of them.

    Canvases stay with the denoiser of their first step, so that their state stays where it is."""
    known = (canvas.denoiser for canvas in canvases)
    denoiser = next((d for d in known if d is not None and d.network is network), None)
    if denoiser is None:
        denoiser = Denoiser(network, len(canvases))
    for canvas in canvases:
        canvas.denoiser = denoiser
    drafts = []
    for result in denoiser.advance(denoiser.forward(canvases, slots)):
        if isinstance(result, Exception):
            raise result
        drafts.append(result)
    return drafts


@torch.no_grad()
def advance_one(canvas: Canvas, stats: HeadStats) -> Draft:
    """Moves a canvas alone one step on; stats: what a forward found at its positions. Raises what
    fails."""
    if canvas.place is None:
        key = canvas.length, canvas.history_rows
        Seats(key, 1, stats.soft.shape[1], stats.soft.dtype, canvas.device).take([canvas])
    assert canvas.place
    batch, row = canvas.place
    state = StepBatch(*(tensor[row : row + 1] for tensor in batch.tensors()))
    places = None if batch.width == canvas.length else torch.arange(canvas.length)
    packed = None if places is None else places.to(canvas.device)
    part = Part(state, (canvas.length,), packed, RuleGroup.of([canvas], canvas.device))
    new = change(part, stats, draw([part], canvas.vocab_size).fresh[0], {0: stats})
    if new.errors:
        raise new.errors[0]
    write(state, new)
    (words,), copied = to_host([pack(state, new)])
    if copied is not None:
        copied.synchronize()
    result = _result(canvas, unpack(words, batch.width), 0, stats)
    if isinstance(result, Exception):
        raise result
    return result
