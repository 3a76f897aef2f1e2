"""Steps in which only a part of a canvas is computed (see `Turbo`); on a CPU.

A canvas keeps the keys and values of all its positions, and the statistics of its last step.  A
partial step computes the positions that have not settled, which see the kept keys and values of the
others; the statistics of the others are those of the step before.  What a row gives depends on the
row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato import ops
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.scoring import plain_bans
from sfumato.diffusion.soft_rows import embedded, skip_of
from sfumato.diffusion.step.layout import Part
from sfumato.diffusion.step.update import Update
from sfumato.diffusion.turbo import Turbo
from sfumato.model.attention import CanvasPart, CanvasRows
from sfumato.model.cache import Slot
from sfumato.model.head import HeadStats
from sfumato.model.head_stats import PLAIN
from sfumato.model.model_config import ModelConfig
from sfumato.model.network import Network

MOST_PARTIAL = 0.75
"""Of a canvas: where more has to be computed, all of it is."""


class Kept:
    """What a canvas keeps from step to step."""

    def __init__(self, config: ModelConfig, length: int, max_steps: int, turbo: Turbo) -> None:
        self.turbo, self.length, self.max_steps = turbo, length, max_steps
        self.shapes = [(length, layer.kv_heads, layer.head_dim) for layer in config.layers]
        self.keys: list[Tensor] = []  # of each layer, as packed tokens have them
        self.values: list[Tensor] = []
        self.stats: HeadStats | None = None  # of the last step, [length, ...]
        self.settled = torch.zeros(length, dtype=torch.bool)
        self.steps = self.computed = 0  # done, and the positions that they computed
        self._partial = 0  # steps since the last whole one
        self._ends = False  # whether the step to come decides whether the canvas ends

    def places(self) -> Tensor | None:
        """int64 [n], rising: the positions that the step to come computes; None: all."""
        turbo = self.turbo
        is_whole = self.steps < turbo.first or self._partial >= turbo.partial
        if is_whole or self._ends or self.steps + 1 >= self.max_steps:
            return None
        open_places = (~self.settled).float()[None, None]
        wide = F.max_pool1d(open_places, 2 * turbo.near + 1, 1, turbo.near)[0, 0]
        places = wide.nonzero().flatten()
        return places if 0 < len(places) <= MOST_PARTIAL * self.length else None

    def allocate(self, like: Tensor) -> None:
        """Makes room for keys and values of the dtype of `like`."""
        if not self.keys:
            self.keys = [like.new_empty(shape) for shape in self.shapes]
            self.values = [like.new_empty(shape) for shape in self.shapes]

    def took(
        self, stats: HeadStats, accepted: Tensor, is_stopped: bool, places: Tensor | None
    ) -> None:
        """Takes in a step that has been written: the statistics of the canvas, and accepted bool
        [length]; is_stopped: whether the stopping rule would end the canvas after it."""
        same = torch.zeros(self.length, dtype=torch.bool)
        if self.stats is not None:
            same = self.stats.argmax == stats.argmax
        self.settled = accepted & same & (stats.entropy <= self.turbo.settled)
        self.stats = stats
        self.steps += 1
        self.computed += self.length if places is None else len(places)
        self._partial = 0 if places is None else self._partial + 1
        self._ends = is_stopped and places is not None


class KeptRows:
    """Attention of canvases of which `places` are computed; the keys and values of the other
    positions are those of earlier steps. Each row goes by itself."""

    def __init__(
        self,
        slots: Sequence[Slot],
        kept: Sequence[Kept],
        places: Sequence[Tensor | None],
        width: int,
    ) -> None:
        """width: of the batch, which a whole step's sums are laid out for."""
        self._rows = list(zip(slots, kept, places, strict=True))
        self._counts = [each.length if own is None else len(own) for _, each, own in self._rows]
        self._width = width

    def positions(self) -> Tensor:
        """int64 [tokens]: each token's position in its row."""
        return torch.cat(
            [
                slot.length + (torch.arange(kept.length) if places is None else places)
                for slot, kept, places in self._rows
            ]
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = zip(*(x.split(self._counts) for x in (q, k, v)), strict=True)
        outs = []
        for (slot, kept, places), (rq, rk, rv) in zip(self._rows, split, strict=True):
            kept.allocate(rk)
            keys, values = kept.keys[layer], kept.values[layer]
            if places is None:
                keys.copy_(rk)
                values.copy_(rv)
                outs.append(CanvasRows([self._part(slot, kept.length)])(layer, rq, rk, rv))
                continue
            keys.index_copy_(0, places, rk)
            values.index_copy_(0, places, rv)
            old_keys, old_values = slot.read(layer)[:2]
            own = keys.transpose(0, 1), values.transpose(0, 1)
            outs.append(ops.attend(rq, (old_keys, own[0]), (old_values, own[1])))
        return torch.cat(outs)

    def _part(self, slot: Slot, length: int) -> CanvasPart:
        index = None if length == self._width else torch.arange(length)
        numbers = torch.tensor([slot.index]), self._width, torch.tensor([length])
        return CanvasPart(slot.pool, *numbers, index)


@dataclass(frozen=True)
class Recomputed:
    """What a forward computed of a part of a step."""

    kept: tuple[Kept, ...]
    places: tuple[Tensor | None, ...]
    stats: HeadStats  # of all packed positions: new ones, and those of the step before

    def held_open(self, part: Part, new: Update) -> Update:
        """The update in which no row has ended after a partial step."""
        partial = torch.tensor([places is not None for places in self.places]) & ~new.frozen
        stays = partial & ~part.batch.converged
        at_cap = new.step >= part.batch.max_steps
        return replace(new, converged=new.converged & ~stays, done=new.done & (~stays | at_cap))

    def taken(self, new: Update) -> None:
        """Tells the canvases of the update, as the rules made it."""
        rows = self.stats_of_rows()
        for row, (kept, places, stats) in enumerate(zip(self.kept, self.places, rows, strict=True)):
            accepted = new.accepted[row, : kept.length]
            kept.took(stats, accepted, bool(new.stop[row]), places)

    def stats_of_rows(self) -> list[HeadStats]:
        """Of each row's canvas."""
        ends = torch.tensor([kept.length for kept in self.kept]).cumsum(0).tolist()
        return [self.stats[end - k.length : end] for end, k in zip(ends, self.kept, strict=True)]


def recompute(
    network: Network,
    part: Part,
    canvases: Sequence[Canvas],
    slots: Sequence[Slot],
    temperature: Tensor,
    uniforms: Tensor,
) -> Recomputed:
    """One forward of a part whose canvases are computed in part. temperature float32 and uniforms
    float64 [packed positions of the part]. Moves nothing on, and may be repeated."""
    kept = tuple(_kept_of(canvas, network.config) for canvas in canvases)
    places = tuple(each.places() for each in kept)
    computed = [
        torch.arange(k.length) if p is None else p for k, p in zip(kept, places, strict=True)
    ]
    batch = part.batch
    inside = torch.cat([own + row * batch.width for row, own in enumerate(computed)])
    starts = torch.tensor([0, *(each.length for each in kept[:-1])]).cumsum(0)
    packed = torch.cat([own + start for own, start in zip(computed, starts, strict=True)])
    tokens, soft = (x.flatten(0, 1).index_select(0, inside) for x in (batch.tokens, batch.soft))
    attend = KeptRows(slots, kept, places, batch.width)
    hidden = network.denoise_batch(tokens, soft, attend)
    inputs = hidden, temperature.index_select(0, packed), uniforms.index_select(0, packed)
    bans = plain_bans(canvases, network.head.vocab_size, packed)
    embeds = embedded(canvases, hidden.device)
    if isinstance(embeds, Tensor):
        embeds = embeds.index_select(0, packed)
    skip = skip_of(network.head, canvases, part.pack(batch.expected) > 0, hidden.device)
    skip = None if skip is None else skip.at(packed)
    new = network.head(*inputs, skip=skip, bans=bans, embeds=embeds)
    if bans is not None:
        covered = bans.covers(network.head.vocab_size)
        new = replace(new, entropy=new.entropy.masked_fill(covered, float("inf")))
    return Recomputed(kept, places, _merged(new, kept, places, [len(own) for own in computed]))


def _kept_of(canvas: Canvas, config: ModelConfig) -> Kept:
    if canvas.kept is None:
        turbo, most = canvas.config.turbo, canvas.config.max_steps
        assert turbo is not None and most is not None
        canvas.kept = Kept(config, canvas.length, most, turbo)
    kept = canvas.kept
    assert isinstance(kept, Kept)
    return kept


def _merged(
    new: HeadStats, kept: Sequence[Kept], places: Sequence[Tensor | None], counts: Sequence[int]
) -> HeadStats:
    """Of all positions: the new statistics, and those of the step before at other places."""

    def merge(name: str) -> Tensor:
        rows = []
        parts = getattr(new, name).split(list(counts))
        for row, own, each in zip(parts, places, kept, strict=True):
            if own is None:
                rows.append(row)
            else:
                assert each.stats is not None
                rows.append(getattr(each.stats, name).index_copy(0, own, row))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    merged = HeadStats(*map(merge, PLAIN))
    return merged if new.top_suffices is None else replace(merged, top_suffices=merge("suffices"))
