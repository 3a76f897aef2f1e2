"""How an engine is doing, as numbers: for health checks, metrics and the dashboard."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from sfumato.engine.events import Account, Decided
from sfumato.engine.memory.guard import MemoryView
from sfumato.engine.queue.slots import SlotState

WINDOW_S = 60.0  # what speeds are averaged over
GRAIN_S, GRAINS = 5.0, 60  # of the history, which goes back five minutes

Phase = Literal["queued", "prefill", "denoise", "causal", "commit", "read"]


@dataclass(frozen=True)
class Health:
    ok: bool
    reason: str | None  # why it is not ok
    uptime_s: float
    waiting: int
    running: int


@dataclass(frozen=True, kw_only=True)
class RowState(Account):
    """A request that runs, and its account until now, without the tokens of its questions."""

    phase: Phase
    encoded_tokens: int  # of the prompt, cached ones too


@dataclass
class Totals:
    """Counts since the engine was made. Seconds, tokens."""

    requests: Counter[str] = field(default_factory=Counter)  # by stop reason or failure
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of prompts, reused from slots
    encoded_tokens: int = 0  # prompts and commits
    output_tokens: int = 0  # of replies that have ended
    thought_tokens: int = 0
    canvas_tokens: int = 0  # positions of settled canvases
    canvases: int = 0
    retries: int = 0
    forwards: int = 0  # batched denoising forwards
    steps: int = 0  # denoising steps of rows: a forward of 3 rows is 3
    encode_s: float = 0.0
    denoise_s: float = 0.0
    decisions: int = 0  # that were decided
    questions: int = 0  # of these
    reads: int = 0  # canvases that were read, of all decisions that have ended
    read_tokens: int = 0  # of questions and canvases that went through the network
    read_s: float = 0.0


@dataclass(frozen=True)
class Speeds:
    """Over the last minute, per second of wall time, but for the last two."""

    output_tokens: float
    canvas_tokens: float
    steps: float
    ms_per_step: float  # of a batched forward
    rows_per_forward: float


@dataclass(frozen=True)
class History:
    """The last minutes, oldest first, a figure for every `grain_s` seconds."""

    grain_s: float
    canvas_tokens: tuple[float, ...]  # positions of settled canvases, per second
    rows: tuple[int, ...]  # requests in one forward, at most


@dataclass(frozen=True)
class EngineState:
    waiting: int
    running: tuple[RowState, ...]
    slots: tuple[SlotState, ...]
    totals: Totals
    speeds: Speeds
    history: History
    snapshot_bytes: int  # memory of the device that prefix snapshots take now
    larger_bytes: int
    memory: MemoryView  # predicted, and available when the engine was made
    circuit_open: bool  # no request is taken until a probe works


@dataclass
class _Grain:
    number: int  # of GRAIN_S since the beginning
    canvas_tokens: int = 0
    rows: int = 0


class Statistics:
    """Totals, their last minute, and a history. Written by the engine's thread alone."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.totals = Totals()
        self._clock = clock
        self._began = clock()
        self._samples = deque([(self._began, Totals())])  # when, and the totals then
        self._grains: deque[_Grain] = deque(maxlen=GRAINS)

    def stepped(self, rows: int, seconds: float) -> None:
        self.totals.forwards += 1
        self.totals.steps += rows
        self.totals.denoise_s += seconds
        grain = self._grain()
        grain.rows = max(grain.rows, rows)
        self._sample()

    def settled(self, positions: int) -> None:
        self.totals.canvases += 1
        self.totals.canvas_tokens += positions
        self._grain().canvas_tokens += positions

    def ended(self, outcome: str, account: Account | None) -> None:
        self.totals.requests[outcome] += 1
        if account is not None:
            # All at once: who reads them subtracts them from each other. And at the end only: a
            # stop string takes back what earlier canvases said.
            before, decided = self.totals, outcome == Decided.outcome
            self.totals = replace(
                before,
                prompt_tokens=before.prompt_tokens + account.prompt_tokens,
                cached_tokens=before.cached_tokens + account.cached_tokens,
                output_tokens=before.output_tokens + account.output_tokens,
                thought_tokens=before.thought_tokens + account.thought_tokens,
                retries=before.retries + account.retries,
                decisions=before.decisions + decided,
                questions=before.questions + (account.questions or 0) * decided,
                reads=before.reads + (account.reads or 0),
            )

    def copy(self) -> Totals:
        """The totals as they are now."""
        totals = self.totals
        return replace(totals, requests=Counter(totals.requests))

    def speeds(self) -> Speeds:
        now, new = self._clock(), self.totals
        recent = [totals for at, totals in tuple(self._samples) if at >= now - WINDOW_S]
        old = recent[0] if recent else new
        wall = max(1e-9, min(WINDOW_S, now - self._began))
        forwards = new.forwards - old.forwards
        return Speeds(
            (new.output_tokens - old.output_tokens) / wall,
            (new.canvas_tokens - old.canvas_tokens) / wall,
            (new.steps - old.steps) / wall,
            1e3 * (new.denoise_s - old.denoise_s) / max(1, forwards),
            (new.steps - old.steps) / max(1, forwards),
        )

    def history(self) -> History:
        """Ends with the last grain that is over."""
        grains = {grain.number: grain for grain in tuple(self._grains)}
        end = self._number()
        past = [grains.get(n, _Grain(n)) for n in range(max(0, end - GRAINS), end)]
        return History(
            GRAIN_S,
            tuple(grain.canvas_tokens / GRAIN_S for grain in past),
            tuple(grain.rows for grain in past),
        )

    def _number(self) -> int:
        return int((self._clock() - self._began) / GRAIN_S)

    def _grain(self) -> _Grain:
        """The present one."""
        number = self._number()
        if not self._grains or self._grains[-1].number != number:
            self._grains.append(_Grain(number))
        return self._grains[-1]

    def _sample(self) -> None:
        """Keeps one reading a second: what fills a minute in a few dozen."""
        now = self._clock()
        if not self._samples or now - self._samples[-1][0] >= 1.0:
            self._samples.append((now, replace(self.totals)))
        while self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()
