"""The host's side of a step: canvases take their rows, and learn what a step made of them.

`Denoiser.forward` moves no canvas on and may be repeated; `write` moves the rows on where their
state lives; `Pending.results` waits for what the host learns of it, which may be later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.step.batch import StepBatch, width_for
from sfumato.diffusion.step.change import change, write
from sfumato.diffusion.step.denoise import Findings, draw, forward, move
from sfumato.diffusion.step.layout import Layout, Part, lay_out
from sfumato.diffusion.step.lifting import LiftProbe
from sfumato.diffusion.step.packed import pack, to_host, unpack
from sfumato.diffusion.step.results import Pending, Result, result_of
from sfumato.diffusion.step.rules import RuleGroup
from sfumato.diffusion.step.seats import Key, Seats
from sfumato.model.cache import Slot
from sfumato.model.head import HeadStats
from sfumato.model.network import Network


class Denoiser:
    """Steps canvases of one network. Not for several threads at a time."""

    def __init__(self, network: Network, rows: int) -> None:
        """rows: for how many a batch has room at first."""
        self.network, self._rows = network, rows
        self._seats: dict[Key, Seats] = {}
        self._layout: tuple[object, Layout] | None = None
        self._probe = LiftProbe()

    @torch.no_grad()
    def forward(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> Findings:
        """One forward of the canvases; canvases[i] follows the prefix that slots[i] holds."""
        network = self.network
        layout = self._lay_out(canvases, slots)
        ordered = tuple(canvases[i] for i in layout.order)
        begun = any(canvas.step and canvas.config.self_conditioning for canvas in canvases)
        return forward(network, layout, ordered, layout.attended(slots), begun)

    @torch.no_grad()
    def write(self, findings: Findings) -> Pending:
        """Moves the rows on, and starts the copy of what the host learns of it."""
        words, errors = move(findings)
        return Pending(findings, errors, *to_host(words))

    def advance(self, findings: Findings) -> list[Result]:
        """Moves the canvases on: of each its draft, or what failed in it alone, in the order of
        `forward`."""
        return self.write(findings).results()

    def _lay_out(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> Layout:
        keys = [self._key(canvas) for canvas in canvases]
        pools = {id(slot.pool): None for slot in slots}  # rows of one pool stand together
        numbers = {pool: number for number, pool in enumerate(pools)}
        orders = {
            key: sorted(
                (i for i, other in enumerate(keys) if other == key),
                key=lambda i: numbers[id(slots[i].pool)],
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
                (self._seats[key].batch, [canvases[i] for i in rows], [slots[i] for i in rows])
                for key, rows in orders.items()
            ]
            vocab_size, device = self.network.head.vocab_size, self.network.device
            self._layout = version, lay_out(order, batches, vocab_size, device, self._probe)
        return self._layout[1]

    def _key(self, canvas: Canvas) -> Key:
        return width_for(canvas.length, self.network.config.canvas_length), canvas.history_rows

    def _seats_of(self, key: Key) -> Seats:
        if key not in self._seats:
            network = self.network
            hidden = network.config.hidden_size
            self._seats[key] = Seats(key, self._rows, hidden, network.dtype, network.device)
        return self._seats[key]


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
    """Moves a canvas alone one step on; stats: the statistics of its positions. Raises what
    fails."""
    if canvas.place is None:
        key = canvas.length, canvas.history_rows
        Seats(key, 1, stats.soft.shape[1], stats.soft.dtype, canvas.device).take([canvas])
    assert canvas.place
    batch, row = canvas.place
    state = StepBatch(*(tensor[row : row + 1] for tensor in batch.tensors()))
    places = None if batch.width == canvas.length else torch.arange(canvas.length)
    packed = None if places is None else places.to(canvas.device)
    part = Part(state, (canvas.length,), packed, (RuleGroup.alone(canvas),))
    new = change(part, stats, draw([part], canvas.vocab_size).fresh[0], {0: stats})
    if new.errors:
        raise new.errors[0]
    write(state, new)
    result = result_of(canvas, unpack(pack(state, new).cpu(), 1, batch.width), 0, stats)
    if isinstance(result, Exception):
        raise result
    return result
