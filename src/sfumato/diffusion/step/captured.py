"""Steps, and forwards alone, as functions without arguments, which a graph can hold.

A function reads and writes tensors of fixed address alone: the state of the rows, the cache of
their pool, and what `prepare_for_replay` writes.  Its shapes depend on the number of rows and the
width; everything else that differs between steps is a number in a tensor.  Rows whose numbers of
tokens to commit are not 0 commit them; the others are denoised.

The denoiser finds the function of some rows, writes what has changed in them, and replays or runs
it. `ReadForwards` does the same for reads, but those of long questions. A read's path depends on
the read alone, since products of another path round otherwise: what a question gives must not
depend on which others are read beside it.  Rows of one path, pool and width share forwards of a
bounded number of kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.scoring import Scoring, ban_limits, kind_of
from sfumato.diffusion.step.batch import Commit, StepBatch
from sfumato.diffusion.step.graphs import Room, Step, StepGraphs
from sfumato.diffusion.step.rules import LiftProbe, RowRules, StaticRules, takes_tensors
from sfumato.diffusion.step.step import Part, evaluate, move_rows, row_words
from sfumato.model.cache import KVPool, QuestionPool, Slot, adapters_of
from sfumato.model.devices import to_device
from sfumato.model.network import PREFILL_CHUNK, Network
from sfumato.model.placement import serving_kernels
from sfumato.model.segments import Beside, Suffix
from sfumato.ops.online_softmax import TOP, Bans

BANNED_AT_LEAST = 8
"""Ids that a row of a step with bans may ban, times a power of two."""


@dataclass(frozen=True)
class StepKind:
    """What the function of a step depends on, beside its addresses."""

    rows: int
    commits: bool  # whether some row commits
    bans: int  # how many ids a row may ban; 0 where no row does
    rules: tuple[RowRules, ...]  # of rows that are denoised, if there are any: one of each kind
    adapters: frozenset[int]  # that slots of the rows have

    @classmethod
    def of(cls, canvases: Sequence[Canvas], slots: Sequence[Slot], vocab_size: int) -> StepKind:
        denoised = [canvas for canvas in canvases if not isinstance(canvas, Commit)]
        most = max((len(limits) for limits in ban_limits(denoised, vocab_size)), default=0)
        bans = most and max(BANNED_AT_LEAST, 1 << (most - 1).bit_length())
        rules = [RowRules.of(canvas) for canvas in denoised or canvases]
        commits = len(denoised) < len(canvases)
        kinds = tuple(StaticRules.kinds_of(rules))
        return cls(len(canvases), commits, bans, kinds, adapters_of(slots))


class BatchForward(Step):
    """The forward alone of the first rows of a batch, whose scores or rules no graph can hold."""

    def __init__(
        self,
        network: Network,
        pool: KVPool,
        batch: StepBatch,
        rows: int,
        adapters: frozenset[int],
        hidden: Tensor | None,
    ) -> None:
        """hidden [positions of the whole batch, hidden]: that of another forward of the batch,
        which this one will overwrite."""
        super().__init__(network, pool, rows, batch.width, adapters, batch)
        self._first = batch.first(rows)
        if hidden is None:
            size = batch.rows * batch.width, network.config.hidden_size
            hidden = torch.zeros(size, dtype=network.dtype, device=network.device)
        self.batch_hidden = hidden
        self.hidden = hidden[: rows * batch.width]

    @torch.no_grad()
    def run(self) -> None:
        """Leaves the hidden states in `hidden`. Moves no row on."""
        rows = self._first
        seen = self.seen(rows.slots, lengths=rows.length)
        inputs = rows.tokens.flatten(), rows.soft.flatten(0, 1)
        self.hidden.copy_(self.network.denoise_batch(*inputs, seen))


class DeviceStep(Step):
    """The step of the first rows of a batch."""

    def __init__(self, network: Network, batch: StepBatch, pool: KVPool, kind: StepKind) -> None:
        super().__init__(network, pool, kind.rows, batch.width, kind.adapters, batch)
        self.kind = kind
        rows = batch.first(kind.rows)
        device, width = network.device, batch.width
        self._rules = StaticRules(kind.rules, kind.rows, device)
        self._part = Part(rows, (), None, self._rules, network.config.mask_id)
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
            and self.has(pool, kind.rows, kind.adapters)
            and (mine.commits, mine.bans) == (kind.commits, kind.bans)
            and self._rules.serves(kind.rules)
        )

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
        batch = self._part.batch
        commits = batch.commits if self.kind.commits else None
        seen = self.seen(batch.slots, lengths=batch.length, commits=commits)
        ids, limits = self._bans.unbind()
        bans = Bans(ids, limits, self._row, self._place) if self.kind.bans else None
        scoring = Scoring.plain(self.network.config.vocab_size, bans)
        # Rows that commit are done too: the step writes nothing of them.
        done = batch.done[:, None].expand(-1, batch.width).flatten()
        stats, _, (fresh,) = evaluate(self.network, (self._part,), scoring, seen, done=done)
        move_rows(batch, self._rules, stats, fresh, self.words, self._part.mask)


def obstacle(
    canvases: Sequence[Canvas], slots: Sequence[Slot], batch: StepBatch, probe: LiftProbe
) -> str | None:
    """Why rows of one batch cannot have a step of fixed shape; None where they can."""
    if len({id(slot.pool) for slot in slots}) > 1:
        return "rows have slots of several pools"
    for canvas in canvases:
        if isinstance(canvas, Commit):
            continue
        if canvas.guidance is not None and canvas.guidance.mask is not None:
            return "a grammar masks a position"
        if kind_of(canvas) != "plain":
            return "a row changes its scores, keeps them, or names more tokens"
        rules = canvas.config.sampler, canvas.config.stopping
        if all(map(takes_tensors, rules)):
            continue
        names = " or ".join(type(rule).__name__ for rule in rules if not takes_tensors(rule))
        if not probe.lifts(canvas, batch):
            return f"{names} reads numbers on the host"
        if canvas.length < batch.width:
            return f"{names} meets a canvas that is shorter than its batch's width"
    return None


class ReadForward(Step):
    """The forward of rows of reads, whose questions have places in a pool."""

    room: Room = "reads"

    def __init__(
        self,
        network: Network,
        pool: KVPool,
        questions: QuestionPool,
        rows: int,
        width: int,
        adapters: frozenset[int],
        shared: tuple[Tensor, Tensor],
    ) -> None:
        """shared: soft embeddings and hidden states [tokens, hidden] of all forwards of a network:
        each overwrites what the one before has left."""
        super().__init__(network, pool, rows, width, adapters)
        self._questions = questions
        tokens = rows * width
        sizes = [tokens, 1, *[rows] * 3]
        numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=network.device)
        self._ids, self._used, self._slots, self._starts, self._counts = numbers.split(sizes)
        self._numbers = numbers[tokens:]  # what the host writes
        self._soft, self.hidden = (each[:tokens] for each in shared)

    @torch.no_grad()
    def run(self) -> None:
        """Leaves the hidden states [rows · width, hidden] in `hidden`."""
        beside = Beside(self._questions, self._starts, self._counts, self._used)
        seen = self.seen(self._slots, beside=beside)
        self.hidden.copy_(self.network.denoise_batch(self._ids, self._soft, seen))

    def write(self, ids: Tensor, suffixes: Sequence[Suffix], soft: Tensor | None) -> None:
        """Writes what the first rows are: ids int64 and soft [tokens, hidden] (None: zeros) of
        their tokens. The rows after them see their own canvas alone, of the vocabulary's first
        token. One copy to the device, for which the host does not wait."""
        leases = [suffix.lease for suffix in suffixes]
        # A row that is not read names a slot and a place that there are.
        more = [0] * (self.rows - len(suffixes))
        slots = [*(suffix.slot.index for suffix in suffixes), *more]
        starts = [*(lease.start if lease else 0 for lease in leases), *more]
        counts = [*(suffix.length for suffix in suffixes), *more]
        numbers = torch.tensor([len(suffixes), *slots, *starts, *counts])
        self._numbers.copy_(to_device(numbers, self._numbers.device))
        tokens = len(suffixes) * self.width
        self._ids[:tokens].copy_(ids)
        self._ids[tokens:].zero_()
        # Other forwards have written into the same memory.
        self._soft[tokens if soft is not None else 0 :].zero_()
        if soft is not None:
            self._soft[:tokens].copy_(soft)


ReadGroup = tuple[QuestionPool, KVPool, int]
"""What rows have in common that may share a forward: where the question's keys stand, the pool of
the slots, and the width. A row has its own whatever the others are."""


def read_group(suffix: Suffix, width: int, questions: QuestionPool) -> ReadGroup | None:
    """The group of a row; None for a long question, whose keys stand in parts: such a row is
    attended by itself. questions: where an empty question is thought to stand."""
    if suffix.lease is None and suffix.length:
        return None
    own = suffix.lease.pool if suffix.lease else questions
    return own, suffix.slot.pool, width


_Row = tuple[Tensor, Suffix, Sequence[int], Tensor | None]
"""Ids int64 [width], the suffix, what is wanted, and soft embeddings [width, hidden]."""


class ReadForwards:
    """The forwards of one network."""

    def __init__(self, network: Network, graphs: StepGraphs, questions: QuestionPool) -> None:
        self._network, self._graphs, self._questions = network, graphs, questions
        self._tokens = room_tokens(network.config.canvas_length)  # of one forward at most
        size, kind = (self._tokens, network.config.hidden_size), network.dtype
        soft, hidden = (torch.zeros(size, dtype=kind, device=network.device) for _ in range(2))
        self._shared = soft, hidden

    def place(self, suffix: Suffix, tokens: int) -> None:
        """Gives a question of so many tokens places, unless it is long: in the pool, or in one of
        its own where the pool has none left."""
        suffix.place(self._questions, tokens)
        is_short = 0 < tokens <= self._questions.longest
        if is_short and suffix.lease is None and not suffix.length:
            suffix.place(self._questions.for_one(tokens), tokens)

    @torch.no_grad()
    def denoise_beside(
        self,
        canvases: Sequence[Tensor],
        suffixes: Sequence[Suffix],
        wanted: Sequence[Sequence[int]],
        soft: Tensor | None = None,
    ) -> Tensor:
        """Computes `Network.denoise_beside`."""
        lengths = [len(canvas) for canvas in canvases]
        softs = [None] * len(lengths) if soft is None else soft.split(lengths)
        rows = list(zip(canvases, suffixes, wanted, softs, strict=True))
        groups: dict[ReadGroup | None, list[int]] = {}
        for number, (canvas, suffix) in enumerate(zip(canvases, suffixes, strict=True)):
            group = read_group(suffix, len(canvas), self._questions)
            groups.setdefault(group, []).append(number)
        hidden, order = [], []
        for group, members in groups.items():
            most = len(members) if group is None else self._most_rows(group)
            for first in range(0, len(members), most):
                part = members[first : first + most]
                hidden.append(self._forward(group, [rows[number] for number in part], most))
                order += part
        if len(hidden) == 1:
            return hidden[0]
        return torch.cat(hidden).index_select(0, self._places(order, wanted))

    def _places(self, order: Sequence[int], wanted: Sequence[Sequence[int]]) -> Tensor:
        """int64: where each row's wanted tokens stand, where the rows stand in that order."""
        starts = accumulate((len(wanted[number]) for number in order), initial=0)
        first = dict(zip(order, starts, strict=False))
        places = [first[row] + at for row in range(len(wanted)) for at in range(len(wanted[row]))]
        return to_device(torch.tensor(places), self._network.device)

    def _most_rows(self, group: ReadGroup) -> int:
        """How many rows share a forward."""
        network, (_, pool, width) = self._network, group
        kernels = serving_kernels(network.device, network.dtype, network.cache_dtype)
        return most_rows(self._tokens, width, len(pool), kernels)

    def _forward(self, group: ReadGroup | None, rows: Sequence[_Row], most: int) -> Tensor:
        """The hidden states of the wanted tokens of rows of a group, which no later call
        overwrites."""
        ids, suffixes, wanted, softs = zip(*rows, strict=True)
        soft = None if softs[0] is None else torch.cat(softs)
        if group is None:
            return self._network.denoise_beside(ids, suffixes, wanted, soft)
        questions, pool, width = group
        adapters = adapters_of(suffix.slot for suffix in suffixes)
        step = self._step(questions, pool, read_rows(len(rows), most), width, adapters)
        step.write(to_device(torch.cat(ids), self._network.device), suffixes, soft)
        if questions is self._questions:
            self._graphs.run(step)
        else:
            step.run()
        starts = range(0, len(rows) * width, width)
        pairs = zip(starts, wanted, strict=True)
        only = list(chain.from_iterable((first + at for at in own) for first, own in pairs))
        return step.hidden.index_select(0, to_device(torch.tensor(only), self._network.device))

    def _step(
        self,
        questions: QuestionPool,
        pool: KVPool,
        rows: int,
        width: int,
        adapters: frozenset[int],
    ) -> ReadForward:
        """One that is kept, where the questions stand in the pool that is."""
        is_kept = questions is self._questions
        for step in self._graphs.kept(ReadForward) if is_kept else ():
            if step.width == width and step.has(pool, rows, adapters):
                return step
        step = ReadForward(self._network, pool, questions, rows, width, adapters, self._shared)
        if is_kept:
            self._graphs.add(step)
        return step


def read_rows(rows: int, most: int) -> int:
    """In how many rows so many are read, of which there are `most` in a forward: the next power of
    two, so that a graph serves any number below it, too, and few kinds are all."""
    assert 0 < rows <= most
    return min(most, 1 << (rows - 1).bit_length())


def room_tokens(canvas_length: int) -> int:
    """Tokens of a forward of reads at most."""
    return max(PREFILL_CHUNK, canvas_length)


def most_rows(tokens: int, width: int, slots: int, kernels: frozenset[str]) -> int:
    """Rows of a forward of so many tokens at most, whose slots are of a pool of `slots`; kernels:
    the operations that they serve. Torch gathers the slot of each row, and no step, whose memory is
    counted, has more of them than the pool has slots."""
    rows = max(1, tokens // width)
    return rows if "attend_padded" in kernels else min(rows, slots)
