"""One step of some rows of a batch as a function without arguments, which a graph can hold.

The function reads and writes tensors of fixed address alone: the state of the rows, the cache of
their pool, and what `prepare_for_replay` writes.  Its shapes depend on the number of rows and the
width; everything else that differs between steps is a number in a tensor.  Rows whose numbers of
tokens to commit are not 0 commit them; the others are denoised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.scoring import ban_limits
from sfumato.diffusion.step.batch import StepBatch
from sfumato.diffusion.step.commit import Commit
from sfumato.diffusion.step.denoise import Draws, draw, hidden_states
from sfumato.diffusion.step.layout import Part
from sfumato.diffusion.step.packed import pack, row_words
from sfumato.diffusion.step.rules import RowRules
from sfumato.diffusion.step.static_rules import StaticRules
from sfumato.diffusion.step.update import apply_update, decided_update
from sfumato.model.attention import CanvasPart
from sfumato.model.cache import KVPool, Slot
from sfumato.model.head import HeadStats
from sfumato.model.network import Network
from sfumato.model.step_rows import StepPart, StepRows
from sfumato.model.to_device import to_device
from sfumato.ops.online_softmax import TOP, Bans
from sfumato.ops.registry import operation

BANNED_AT_LEAST = 8
"""Ids that a row of a step with bans may ban, times a power of two."""


@dataclass(frozen=True)
class StepKind:
    """What the function of a step depends on, beside its addresses."""

    rows: int
    commits: bool  # whether some row commits
    bans: int  # how many ids a row may ban; 0 where no row does
    rules: tuple[RowRules, ...]  # of rows that are denoised, if there are any: one of each kind

    @classmethod
    def of(cls, canvases: Sequence[Canvas], vocab_size: int) -> StepKind:
        denoised = [canvas for canvas in canvases if not isinstance(canvas, Commit)]
        most = max((len(limits) for limits in ban_limits(denoised, vocab_size)), default=0)
        bans = most and max(BANNED_AT_LEAST, 1 << (most - 1).bit_length())
        rules = [RowRules.of(canvas) for canvas in denoised or canvases]
        commits = len(denoised) < len(canvases)
        return cls(len(canvases), commits, bans, tuple(StaticRules.kinds_of(rules)))


class ForwardStep:
    """The forward alone of the first rows of a batch, whose slots are of one pool: of steps whose
    scores or rules no graph can hold. Moves no row on."""

    def __init__(
        self,
        network: Network,
        batch: StepBatch,
        pool: KVPool,
        rows: int,
        room: Tensor | None = None,
    ) -> None:
        """room: that of another forward of the batch, which this one will overwrite."""
        self.network, self.rows, self.width = network, rows, batch.width
        self._pool, self._batch = weakref.ref(pool), weakref.ref(batch)
        self._part = Part(batch.first(rows), (), None, ())
        if room is None:
            size = batch.rows * batch.width, network.config.hidden_size
            room = torch.zeros(size, dtype=network.dtype, device=network.device)
        self.room = room  # [positions of the whole batch, hidden]
        self.hidden = room[: rows * batch.width]

    def serves(self, batch: StepBatch, pool: KVPool, rows: int) -> bool:
        """Whether this is the forward of these rows. False where the pool is gone."""
        return self.is_of(batch) and self._pool() is pool and self.rows == rows

    def is_of(self, batch: StepBatch) -> bool:
        """Whether its rows are those of this batch."""
        return self._batch() is batch

    @property
    def is_alive(self) -> bool:
        """Whether its batch and its pool still exist."""
        return self._batch() is not None and self._pool() is not None

    def prepare_for_capture(self) -> Callable[[], None]:
        """See `DeviceStep`."""
        return self.run

    @torch.no_grad()
    def run(self) -> None:
        """Leaves the hidden states [rows · width, hidden] in `hidden`."""
        rows, pool = self._part.batch, self._pool()
        assert pool is not None
        attended = CanvasPart(pool, rows.slots, rows.width, rows.length)
        self.hidden.copy_(hidden_states(self.network, [self._part], [attended]))


class DeviceStep:
    """The step of the first rows of a batch, whose slots are of one pool."""

    def __init__(self, network: Network, batch: StepBatch, pool: KVPool, kind: StepKind) -> None:
        self.network, self.kind, self.width = network, kind, batch.width
        self._pool, self._batch = weakref.ref(pool), weakref.ref(batch)
        rows = batch.first(kind.rows)
        self._part = Part(rows, (), None, ())
        device, width = network.device, batch.width
        self._rules = StaticRules(kind.rules, kind.rows, device)
        # Ids, then the number of first positions at which a row bans them.
        self._bans = torch.zeros(2, kind.rows, kind.bans, dtype=torch.int64, device=device)
        place = torch.arange(kind.rows * width, device=device)
        self._row, self._place = place // width, place % width
        words = row_words(width, min(TOP, network.config.vocab_size))
        self.words = torch.zeros(kind.rows, words, dtype=torch.int32, device=device)

    def serves(self, batch: StepBatch, pool: KVPool, kind: StepKind) -> bool:
        """Whether this is the step of these rows. False where the pool is gone."""
        mine = self.kind
        return (
            self.is_of(batch)
            and self._pool() is pool
            and (mine.rows, mine.commits, mine.bans) == (kind.rows, kind.commits, kind.bans)
            and self._rules.serves(kind.rules)
        )

    def is_of(self, batch: StepBatch) -> bool:
        """Whether its rows are those of this batch, rather than of one that was outgrown."""
        return self._batch() is batch

    @property
    def rows(self) -> int:
        return self.kind.rows

    @property
    def is_alive(self) -> bool:
        """Whether its batch and its pool still exist."""
        return self._batch() is not None and self._pool() is not None

    def prepare_for_capture(self) -> Callable[[], None]:
        """The function to capture. It has run before, so that nothing is made for the first time
        in the capture."""
        return self.run

    def prepare_for_replay(self, canvases: Sequence[Canvas], slots: Sequence[Slot]) -> None:
        """Writes what the rows' canvases ask for; canvases in the order of their rows, slots
        likewise."""
        self._part.batch.note(canvases, slots)
        self._rules.write([None if isinstance(c, Commit) else RowRules.of(c) for c in canvases])
        if self.kind.bans:
            limits = ban_limits(canvases, self.network.config.vocab_size)
            fill = [[0] * (self.kind.bans - len(row)) for row in limits]
            ids = [[*row, *rest] for row, rest in zip(limits, fill, strict=True)]
            first = [[*row.values(), *rest] for row, rest in zip(limits, fill, strict=True)]
            self._bans.copy_(to_device(torch.tensor([ids, first]), self._bans.device))

    @torch.no_grad()
    def run(self) -> None:
        """The step: moves the rows on and leaves the packed words in `words`. Reads nothing on the
        host. Where it raises, no row has moved on."""
        draws = draw([self._part], self.network.config.vocab_size)
        stats = self._scored(self._hidden(), draws)
        move_rows(self._part.batch, self._rules, stats, draws.fresh[0], self.words)

    def _hidden(self) -> Tensor:
        """Hidden states [rows · width, hidden]."""
        batch, pool = self._part.batch, self._pool()
        assert pool is not None
        if not self.kind.commits:
            canvases = CanvasPart(pool, batch.slots, batch.width, batch.length)
            return hidden_states(self.network, [self._part], [canvases])
        rows = StepRows(StepPart(pool, batch.slots, batch.width, batch.length, batch.commits))
        tokens, soft = self._part.pack(batch.tokens), self._part.pack(batch.soft)
        return self.network.step_batch(tokens, soft, rows)

    def _scored(self, hidden: Tensor, draws: Draws) -> HeadStats:
        head, batch = self.network.head, self._part.batch
        # Rows that commit are done too: the step writes nothing of them.
        done = batch.done[:, None].expand(-1, batch.width).flatten()
        if not self.kind.bans:
            return head(hidden, draws.temperature, draws.uniforms, done=done)
        ids, limits = self._bans.unbind()
        bans = Bans(ids, limits, self._row, self._place)
        stats = head(hidden, draws.temperature, draws.uniforms, bans=bans, done=done)
        covered = bans.covers(head.vocab_size)
        return replace(stats, entropy=stats.entropy.masked_fill(covered, float("inf")))


@operation
def move_rows(
    rows: StepBatch, rules: StaticRules, stats: HeadStats, fresh: Tensor, words: Tensor
) -> None:
    """Moves rows one step on, in place, and packs what the host is to learn.

    stats: of all positions of the rows, [R · W, ...]; fresh: new tokens int64 [R, W]; words int32
    [R, words], which are overwritten.  A row that is done stays as it is.
    """
    update = decided_update(Part(rows, (), None, ()), stats, fresh, rules.decide)
    words.copy_(pack(update))
    apply_update(rows, update)
