"""Which rows wait, which have a slot, and what each phase of a step does: bookkeeping, no tensors.

Requests are admitted strictly in the order in which they came, so that no large one is overtaken
by small ones for ever; only those that wait for what another one encodes let others pass: several
replies to one prompt, or requests that arrive together with one long system prompt, would each
encode the same tokens. All but the first wait without a slot, and then take the prefix over from
its slot. A step has five phases, and tasks go on between them: a picture is taken some layers of
the vision tower on, some tokens are encoded (prompts and commits alike), canvases are denoised,
tokens are drawn, and scores are taken.

Requests in the background, as of batches, yield to the others: they get slots behind them, never
the last one, and while others run they join one step of `BACKGROUND_EVERY`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sfumato.diffusion.canvas import Canvas
from sfumato.engine.queue.slots import SlotPool
from sfumato.engine.row import Row
from sfumato.tasks.works import Denoise, Draw, Score

BACKGROUND_EVERY = 8
"""Steps of which rows in the background join one while other rows run: an eighth of the steps is
what they take at most, and what they get at least."""
SHARED = 256  # tokens: encoding fewer costs less than the step that a follower starts later


def _shared(row: Row, other: Row) -> int:
    """The tokens that two prompts begin with alike; 0 where they are too few to wait for."""
    common = row.cache_key.common(other.cache_key)
    shared = min(common, row.prompt_tokens, other.prompt_tokens)
    one, two = (each.claim.prompt.origin or each.claim.prompt for each in (row, other))
    is_one_prompt = one is two
    return shared if is_one_prompt or shared >= SHARED else 0


Wanted = Callable[[Row], bool]
"""Whether a row has neither been cancelled nor is past its deadline."""


@dataclass(frozen=True)
class Piece:
    """Encode work of one step: the next `count` tokens of a row's prefix."""

    row: Row
    count: int


@dataclass(frozen=True)
class Share:
    """Who takes scores in a step, and how much of it."""

    rows: tuple[Row, ...]
    sharers: int  # rows that share the tokens, those with them that still encode
    tokens: int  # of all of them


class PrefillChunk:
    """Tokens that a step encodes at most, all rows together: fewer after a memory shortage."""

    def __init__(self, tokens: int) -> None:
        self.tokens = self._full = tokens
        self._has_failed = False  # the memory did not suffice for the last encode work
        self._rows_then: set[Row] = set()  # that ran when it last did not

    def shrink(self, tokens: int, running: Iterable[Row]) -> bool:
        """Halves the chunk, since the memory did not suffice for so many tokens. Whether the last
        encode work had failed in the same way."""
        before, self._has_failed, self._rows_then = self._has_failed, True, set(running)
        self.tokens = max(1, min(self.tokens, tokens) // 2)
        return before

    def succeeded(self, running: Sequence[Row]) -> None:
        """Some encode work was done."""
        self._has_failed = False
        self.restore(running)

    def restore(self, running: Sequence[Row]) -> None:
        """Restores the full chunk after a memory shortage, once one of the rows that ran at the
        time has ended and no row has tokens left to encode: sooner, a long prompt might fail and
        start over for ever."""
        if not (self._rows_then.issubset(running) or any(row.pending for row in running)):
            self.tokens, self._rows_then = self._full, set()


class Scheduler:
    """The queue, the batch, and the slots that their rows have."""

    def __init__(
        self,
        pool: SlotPool,
        prefill_chunk: int,
        clock: Callable[[], float],
        most_scored: int | None = None,
    ) -> None:
        """prefill_chunk: tokens encoded in a step at most, all rows together; most_scored: tokens
        of a step's scores, None as many."""
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []  # oldest first
        self.pool, self.chunk = pool, PrefillChunk(prefill_chunk)
        self._clock = clock
        self._most_scored = prefill_chunk if most_scored is None else most_scored
        # Rows in the background that have a slot at most: others find one, where there are two.
        self._most_background = max(1, len(pool.empty_slots) - 1)
        self._step, self._all_move = 0, True

    def admit(self) -> list[tuple[Row, Exception | None]]:
        """Gives slots to waiting rows, strictly in order, as long as there are any; those in the
        background come last. A row that waits for what another row encodes needs none yet. Returns
        the rows that have one now, and those for which there can be none, with the reason. Begins a
        step, of which it decides who moves in it."""
        admitted: list[tuple[Row, Exception | None]] = []
        for row in sorted(self.waiting, key=lambda row: row.request.background):  # stable
            if (row.request.background and self._is_full()) or self._waits(row):
                continue
            if row.first_in_queue is None:
                row.first_in_queue = self._clock()
            try:
                if not self._lease(row):
                    break
            except Exception as error:
                admitted.append((row, error))
            else:
                self.running.append(row)  # first: others count both, and it is never in neither
                self.waiting.remove(row)
                admitted.append((row, None))
        self._step += 1
        alone = all(row.request.background for row in self.running)
        self._all_move = alone or self._step % BACKGROUND_EVERY == 0
        return admitted

    def _is_full(self) -> bool:
        """Whether rows in the background have as many slots as they may have."""
        return sum(row.request.background for row in self.running) >= self._most_background

    @property
    def _moving(self) -> list[Row]:
        """The rows that go on in this step, oldest first."""
        return [row for row in self.running if self._all_move or not row.request.background]

    def _waits(self, row: Row) -> bool:
        """Whether a waiting row should wait for what one of the running rows encodes.

        Asked anew before each step: where the row that it followed has ended, it follows another
        one, or none. A row follows only rows that were given their slot before it, so one always
        moves, and none in the background unless it is there itself.
        """
        ahead = [
            other
            for other in self.running
            if other.lease
            and other.encoded < other.prompt_tokens
            and other.request.background <= row.request.background
        ]
        if row.leader not in ahead:
            row.leader, row.shared = None, 0
            for other in ahead:
                shared = _shared(row, other)
                if shared < other.prompt_tokens and not self.pool.keeps_marks:
                    continue  # its slot will be past what can be taken over
                if shared > max(row.shared, other.encoded):
                    row.leader, row.shared = other, shared
            if row.leader and self.pool.reusable(row.cache_key) >= row.shared:
                row.leader = None  # some slot has it all already
        leader = row.leader
        if leader is None or leader.encoded >= row.shared:
            row.leader = None
            return False
        assert leader.lease
        leader.lease.stop_at(row.shared)
        return True

    def restart(self, row: Row) -> bool:
        """Another slot for a running row, whose own an encode has emptied. Whether there is one."""
        self._release(row, keep=False)
        return self._lease(row)

    def remove(self, row: Row) -> None:
        """Removes a row that has ended, and ends the lease of its slot."""
        if row in self.running:
            self.running.remove(row)
        elif row in self.waiting:
            self.waiting.remove(row)
        self.chunk.restore(self.running)
        self._release(row, keep=True)

    def _lease(self, row: Row) -> bool:
        """Whether there is a slot for a row now, which then has it."""
        lease = self.pool.lease(row.cache_key, row.claim.positions, row.claim.prompt.marks)
        if lease is not None:
            row.leased(lease, self._clock())
        return lease is not None

    def _release(self, row: Row, keep: bool) -> None:
        lease, row.lease = row.lease, None
        if lease is not None:
            self.pool.release(lease, keep)

    # The phases of a step.

    def see(self) -> list[Row]:
        """The rows that lack a picture, oldest first."""
        return [row for row in self._moving if row.lacking is not None]

    def encode(self) -> tuple[Piece, ...]:
        """Shares the chunk: half of it is the oldest row's, so that a long prompt always moves; the
        rest goes to those that need least, so that a commit never waits behind a long prompt. What
        others leave is the oldest row's too. Shared equally, it would have all finish late. The
        oldest row that lacks no picture takes one whole that is more than its share."""
        rows = [row for row in self._moving if row.ready(1, oversized=True)]
        rows = [row for row in rows if row.encodes_alone][:1] or rows
        if not rows:
            return ()
        oldest, *others = rows
        counts = {oldest: oldest.ready(-(-self.chunk.tokens // 2), oversized=True)}
        left = max(0, self.chunk.tokens - counts[oldest])
        for row in sorted(others, key=lambda row: row.pending):  # stable: of equals the older
            counts[row] = row.ready(left)
            left = max(0, left - counts[row])
        counts[oldest] = oldest.ready(counts[oldest] + left, oversized=True)
        return tuple(Piece(row, counts[row]) for row in rows if counts[row])

    def denoise(self, wanted: Wanted) -> list[tuple[Row, Canvas]]:
        """The canvases of a step: one of each row, and of the rows that have several side by side
        as many more as there are rows, for the step of the others not to take more than twice as
        long; all of them where no other row denoises."""
        rows = self._ready(Denoise, wanted)
        canvases = [row.unanswered for row in rows]
        more, most = len(rows) if len(rows) > 1 else None, max(map(len, canvases), default=0)
        chosen = {row: own[:1] for row, own in zip(rows, canvases, strict=True)}
        for place in range(1, most):  # in turn, so that all have a part
            for row, own in zip(rows, canvases, strict=True):
                if place < len(own) and more != 0:
                    chosen[row].append(own[place])
                    more = None if more is None else more - 1
        return [(row, canvas) for row, own in chosen.items() for canvas in own]

    def draw(self, wanted: Wanted) -> list[Row]:
        """Rows that get a token by the head alone."""
        return self._ready(Draw, wanted)

    def score(self, wanted: Wanted, denoised: int) -> Share:
        """Scores have as many tokens of a step as the canvases that are denoised in it, for the
        step not to take more than twice as long. denoised: positions of these."""
        most = min(self.chunk.tokens, self._most_scored)
        sharers = sum(row.claim.beside > 0 or isinstance(row.work, Score) for row in self._moving)
        tokens = min(most, denoised) if denoised else most
        return Share(tuple(self._ready(Score, wanted)), sharers, tokens)

    def _ready(self, kind: type, wanted: Wanted) -> list[Row]:
        rows = (row for row in self._moving if isinstance(row.work, kind) and not row.pending)
        return [row for row in rows if wanted(row)]
