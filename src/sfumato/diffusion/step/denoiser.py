"""The host's side of a step: canvases take their rows, and learn what a step made of them.

`Denoiser.forward` moves no canvas on and may be repeated; `apply` moves the rows on where their
state lives and starts the copy to the host; `Pending.results` waits for that copy, which may be
some steps later.  Where steps are captured, `launch` does both at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.step.batch import width_for
from sfumato.diffusion.step.commit import Commit
from sfumato.diffusion.step.denoise import ForwardResult, apply_updates, compute_updates, forward
from sfumato.diffusion.step.device_steps import DeviceSteps
from sfumato.diffusion.step.graphs import GraphBackend
from sfumato.diffusion.step.layout import Layout, lay_out
from sfumato.diffusion.step.lifting import LiftProbe
from sfumato.diffusion.step.results import HostCopy, Pending
from sfumato.diffusion.step.seats import Key, Seats
from sfumato.model.cache import Slot
from sfumato.model.network import Network
from sfumato.model.to_device import to_host


class Denoiser:
    """Steps canvases of one network. Not for several threads at a time."""

    def __init__(self, network: Network, rows: int, backend: GraphBackend | None = None) -> None:
        """rows: for how many a batch has room at first; backend: captures steps for `launch`."""
        self.network, self._rows = network, rows
        self._seats: dict[Key, Seats] = {}
        self._layout: tuple[object, Layout] | None = None
        self._probe = LiftProbe()
        self._outstanding: list[Pending] = []  # written steps of which the host has learned nothing
        self.device_steps = None
        if backend is not None:
            self.device_steps = DeviceSteps(network, backend, rows, self._probe)

    @torch.no_grad()
    def forward(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> ForwardResult:
        """One forward of the canvases; canvases[i] follows the prefix that slots[i] holds.

        Waits for the results of earlier steps only where a row asks for more than the plain
        distribution: what scores such a row reads on the host how far its canvas has come.
        """
        layout = self._lay_out(canvases, slots)
        if layout.reads_progress:
            for pending in list(self._outstanding):
                pending.results()
        ordered = tuple(canvases[i] for i in layout.order)
        seats = [self._seats[key] for key in dict.fromkeys(map(self._key, ordered))]
        attended, hidden = layout.attended(slots), None
        if self.device_steps is not None and len(attended) == 1 and attended[0].index is None:
            pool = attended[0].pool
            hidden = self.device_steps.hidden(seats[0].batch, len(canvases), pool)
        return forward(self.network, layout, ordered, attended, seats, hidden)

    @torch.no_grad()
    def apply(self, result: ForwardResult) -> Pending:
        """Moves the rows on, and starts the copy of what the host learns of it.

        Raises only while nothing has been written, so that forward and apply may be tried again;
        ValueError where the rows have become others', or been moved on, since the forward.
        """
        if not result.is_current():
            raise ValueError("the rows were given away or moved on since this forward")
        updates, words = compute_updates(result)
        copy = HostCopy.start(result, updates, words)
        for seats, _ in result.seats:
            seats.steps += 1
        error = None
        try:
            apply_updates(result.layout.parts, updates)
        except Exception as failure:
            error = failure
        return self._pending(copy, error)

    def advance(self, result: ForwardResult) -> list[Draft | Exception]:
        """Moves the canvases on: of each its draft, or what failed in it alone, in the order of
        `forward`. Raises only what `apply` does."""
        return [
            ValueError("the canvas was done before this step") if row is None else row
            for row in self.apply(result).results()
        ]

    def step(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> list[Draft]:
        """`forward` and `advance`. Raises what fails in one of the canvases."""
        drafts = []
        for result in self.advance(self.forward(canvases, slots)):
            if isinstance(result, Exception):
                raise result
            drafts.append(result)
        return drafts

    def groups(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> list[list[int]]:
        """The canvases that `launch` takes together, by their places: those of one width where
        each such group has a step that can be captured, else all."""
        served = self.served_groups(canvases, slots)
        return [list(range(len(canvases)))] if served is None else served

    def served_groups(
        self, canvases: Sequence[Canvas], slots: Sequence[Slot]
    ) -> list[list[int]] | None:
        """The canvases of each width, by their places; None where some cannot have a captured
        step."""
        by_key: dict[Key, list[int]] = {}
        for place, canvas in enumerate(canvases):
            by_key.setdefault(self._key(canvas), []).append(place)
        groups = list(by_key.values())
        served = (
            self._is_served([canvases[i] for i in group], [slots[i] for i in group])
            for group in groups
        )
        return groups if all(served) else None

    @torch.no_grad()
    def launch(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> Pending:
        """Moves the rows on, `Commit`s among them, and starts the copy of what the host learns.

        Raises only while nothing has been written, but for what commits put into the cache beyond
        their slots' prefixes; ValueError where there are commits and no step for them.
        """
        if not self._is_served(canvases, slots):
            if any(isinstance(canvas, Commit) for canvas in canvases):
                raise ValueError("commits are rows only of steps that can be captured")
            return self.apply(self.forward(canvases, slots))
        assert self.device_steps is not None
        self._layout = None  # what it notes in the batches is about to be overwritten
        seats = self._seats_of(self._key(canvases[0]))
        seated = tuple(seats.take([canvases]))
        places = {id(canvas): place for place, canvas in enumerate(canvases)}
        order = tuple(places[id(canvas)] for canvas in seated)
        step = self.device_steps.run(seats, seated, [slots[place] for place in order])
        seats.steps += 1
        shape = step.kind.rows, step.width
        copy = HostCopy(seated, order, (shape,), ({},), {}, step.words.flatten(), None)
        error = None
        try:
            # The next step writes over its words; on a CPU they would be the host's own.
            words, copied = to_host(copy.words.clone())
            copy = replace(copy, words=words, copied=copied)
        except Exception as failure:
            error = failure
        return self._pending(copy, error)

    def _is_served(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> bool:
        """Whether the canvases can have a captured step."""
        keys = {self._key(canvas) for canvas in canvases}
        if self.device_steps is None or len(keys) != 1:
            return False
        return self.device_steps.serve(canvases, slots, self._seats_of(keys.pop()).batch)

    def _pending(self, copy: HostCopy, error: Exception | None) -> Pending:
        pending = Pending(copy, error, self._outstanding.remove)
        self._outstanding.append(pending)
        return pending

    def _lay_out(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> Layout:
        pools = {id(slot.pool): None for slot in slots}  # rows of one pool stand together
        numbers = {pool: number for number, pool in enumerate(pools)}
        groups: dict[Key, dict[int, list[Canvas]]] = {}
        for canvas, slot in zip(canvases, slots, strict=True):
            of_key = groups.setdefault(
                self._key(canvas), {number: [] for number in numbers.values()}
            )
            of_key[numbers[id(slot.pool)]].append(canvas)
        seated = {key: self._seats_of(key).take(list(groups[key].values())) for key in groups}
        places = {id(canvas): place for place, canvas in enumerate(canvases)}
        order = [places[id(canvas)] for members in seated.values() for canvas in members]
        version = (
            tuple(order),
            tuple((key, len(members), self._seats[key].version) for key, members in seated.items()),
            tuple((numbers[id(slot.pool)], slot.index) for slot in slots),
        )
        if self._layout is None or self._layout[0] != version:
            self._layout = None  # what it notes in the batches is about to be overwritten
            if self.device_steps is not None:
                self.device_steps.forget()
            batches = [
                (self._seats[key].batch, members, [slots[places[id(c)]] for c in members])
                for key, members in seated.items()
            ]
            vocab_size, device = self.network.head.vocab_size, self.network.device
            self._layout = version, lay_out(order, batches, vocab_size, device, self._probe)
        return self._layout[1]

    def _key(self, canvas: Canvas) -> Key:
        longest = self.network.config.canvas_length
        width = canvas.step_width if isinstance(canvas, Commit) else None
        width = width or width_for(canvas.length, longest)
        return Key(width, canvas.history_rows)

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
    return denoiser.step(canvases, slots)
