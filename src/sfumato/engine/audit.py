"""The audit log: one line of JSON for every request, for operators and their programs.

A line has the figures of a request, and its texts only where the operator wants them. A thread of
its own writes the lines: a disk that stalls holds up no request. Knows no HTTP and no engine:
`facts` gives what a line says of the engine.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import Full, Queue
from threading import Lock, Thread
from typing import Any, BinaryIO

from sfumato.api import Model
from sfumato.engine.events import Account, Failed, Terminal
from sfumato.engine.memory.device_memory import Budget, used_memory
from sfumato.engine.request import AnyRequest

logger = logging.getLogger(__name__)

MAX_BYTES, KEEP = 64 << 20, 5


def facts(model: Model, name: str, budget: Budget | None) -> dict[str, Any]:
    """The part of a line that is the engine's, not the request's: of a model that clients call
    `name`, at this moment; budget: what the engine was given. Bytes."""
    device, nbytes = model.network.device, None if budget is None else budget.nbytes
    memory = {"device": str(device), "used": used_memory(device), "budget": nbytes}
    return {"model": name, "architecture": model.family.architecture, "memory": memory}


def entry(
    request: AnyRequest,
    event: Terminal,
    facts: Mapping[str, Any],
    text: bool = False,
    now: datetime | None = None,
) -> dict[str, Any]:
    """The line of one request, as plain values. Seconds, tokens, tokens per second, bytes.

    What is not known (a request that was refused has no account) is None. An error's message may
    quote the request, and so is there with `text` only; now: None is the present.
    """
    account = event.account
    reason = None if isinstance(event, Failed) else event.outcome
    fields: dict[str, Any] = {
        "event": "failed" if isinstance(event, Failed) else "finished",
        "timestamp": (now or datetime.now(UTC)).isoformat(timespec="milliseconds"),
        "request_id": request.id,
        "endpoint": request.endpoint,
        "user": request.user,
        **facts,
        "adapter": request.adapter,
        "success": reason not in (None, "cancelled"),
        "stop_reason": reason,
        "error": event.kind if isinstance(event, Failed) else None,
        "seed": request.seed if account is None else account.seed,
        "tokens": {x: getattr(account, f"{x}_tokens", None) for x in _TOKENS},
        "steps": account and list(account.steps),
        "convergence": account and list(account.convergence),
        "retries": account and account.retries,
        "seconds": account and {x: _rounded(getattr(account, f"{x}_s")) for x in _SECONDS},
        "speed": account and _speeds(account),
        "allocation": account
        and {"slot": account.slot, "context": account.context, "reused": account.allocated},
    }
    if account is None:
        fields["tokens"]["requested"] = request.max_tokens
    if request.call:
        fields["headers"] = dict(request.call)
    if account is not None and account.constraint is not None:
        fields["constraint"] = asdict(account.constraint)
    if account is not None and account.questions is not None:
        fields["decision"] = {"questions": account.questions, "reads": account.reads}
    if text:
        fields["text"] = request.texts() | event.texts()
    return fields


_TOKENS = ("prompt", "cached", "requested", "output", "thought", "canvas")
_SECONDS = (
    "queue",
    "slot_wait",
    "prefill",
    "denoise",
    "commit",
    "first_draft",
    "first_commit",
    "total",
)


def _speeds(account: Account) -> dict[str, float | None]:
    """Speeds, as the reports of `sfumato bench` have them: visible tokens over the whole request,
    positions of canvases over the seconds of denoising. None where nothing was divided by."""
    steps = sum(account.steps)
    quotients = {
        "visible_tokens_per_second": (account.output_tokens, account.total_s),
        "canvas_tokens_per_second": (account.canvas_tokens, account.denoise_s),
        "ms_per_step": (account.denoise_s * 1e3, steps),
        "tokens_per_forward": (account.output_tokens, steps),
    }
    return {x: round(over / under, 6) if under else None for x, (over, under) in quotients.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def to_line(fields: dict[str, Any]) -> bytes:
    """What the file has of these fields."""
    return json.dumps(fields, separators=(",", ":"), default=str).encode() + b"\n"


class AuditLog:
    """A file of lines, rotated by size: path is the newest, path.1 the one before it.

    Every line is written in one call. The first one goes to a line of its own, even where a crash
    has left half a line, which stays. Where another program has moved the file away, a new one is
    begun. What cannot be written (a full
    disk) is lost, with one warning; requests do not suffer. Any thread may write.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int = MAX_BYTES,
        keep: int = KEEP,
        text: bool = False,
    ) -> None:
        """max_bytes: of one file, 0 for no rotation; keep: older files that stay; text: whether
        lines hold prompts and answers. Raises ValueError where the path cannot be written."""
        self.path, self.text = Path(path), text
        self._max_bytes, self._keep = max_bytes, keep
        self._lock = threading.Lock()
        self._lost = 0  # lines, since the last that could be written
        self.lost = 0  # lines, since the start
        self._file: BinaryIO | None = None
        self._is_torn = False  # whether the file ends within a line, that of a crash
        self._closed = False
        try:
            self._file = self._opened()
        except OSError as error:
            raise ValueError(
                f"audit log: {self.path} cannot be written ({error.strerror}); name a file in a "
                "folder that exists and that this user may write to"
            ) from error

    def append(self, data: bytes) -> None:
        """Adds what `to_line` gives; never raises for what the file or the disk does."""
        with self._lock:
            if self._closed:
                return
            try:
                self._append(data)
            except OSError as error:
                self._lost += 1
                self.lost += 1
                if self._lost == 1:
                    logger.warning(
                        "audit log: %s cannot be written (%s); lines are lost until it can",
                        self.path,
                        error.strerror or error,
                    )
            else:
                if self._lost:
                    logger.warning(
                        "audit log: %s is written again; lines lost: %d", self.path, self._lost
                    )
                self._lost = 0

    def close(self) -> None:
        """What is written after it is dropped."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                self._file.close()

    def _opened(self) -> BinaryIO:
        file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (open as long as the log)
        self._is_torn = _ends_within_a_line(self.path, os.fstat(file.fileno()))
        return file

    def _append(self, data: bytes) -> None:
        if self._file is not None and self._moved(self._file):
            self._file.close()
            self._file = None
        if self._file is None:
            self._file = self._opened()
        size = os.fstat(self._file.fileno()).st_size
        # A pipe or a terminal has no size, and is never rotated.
        if self._max_bytes and size and size + len(data) > self._max_bytes:
            self._rotate()
            size = 0
        if self._is_torn:  # half a line would spoil the next one
            data = b"\n" + data
        written = self._file.write(data)
        if written == len(data):
            self._is_torn = False
            return
        was_torn, self._is_torn = self._is_torn, True
        os.ftruncate(self._file.fileno(), size)  # raises for a pipe
        self._is_torn = was_torn
        raise OSError(f"{written or 0} of {len(data)} bytes written")

    def _moved(self, file: BinaryIO) -> bool:
        """Whether the path names another file by now, or none, as after logrotate."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(file.fileno()))
        except FileNotFoundError:
            return True

    def _rotate(self) -> None:
        """path → path.1 → … → path.keep; the oldest goes."""
        assert self._file is not None
        self._file.close()
        self._file = None  # opened again even where a file cannot be moved
        names = [self.path, *(Path(f"{self.path}.{i}") for i in range(1, self._keep + 1))]
        if not self._keep:
            self.path.unlink()
        for older, newer in reversed(list(zip(names[1:], names, strict=False))):
            if newer.exists():
                newer.replace(older)
        self._file = self._opened()


def _ends_within_a_line(path: Path, held: os.stat_result) -> bool:
    """Whether a file has no line end at its end; a pipe or a terminal has none to look for."""
    if not stat.S_ISREG(held.st_mode) or not held.st_size:
        return False
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # it may be written and not read; an empty line spoils none
        return True


MOST_LINES = 10_000  # that wait for the disk; more are lost
MOST_BYTES = 64 << 20  # of these lines; one line may wait whatever its length
CLOSE_S = 5.0  # for the last lines to be written
QUIET_S = 60.0  # between two log lines about the same fault


@dataclass(frozen=True)
class AuditCounts:
    """Since the start."""

    overflowed: int  # lines lost because too many waited
    unwritten: int  # lines lost because the file could not be written
    errors: int  # lines lost by an exception that no file explains
    waiting: int  # lines that wait now
    waiting_bytes: int  # of these, and of the line that is being written
    alive: bool  # whether the thread that writes them runs


class AuditWriter:
    """Writes to a log in the background, in order, and closes it in the end. Any thread may
    write. Failures are counted and logged, and do not stop the lines that follow."""

    def __init__(self, log: AuditLog, most: int = MOST_LINES, most_bytes: int = MOST_BYTES) -> None:
        self._log = log
        self._lines: Queue[bytes | None] = Queue(most)
        self._most_bytes, self._bytes = most_bytes, 0
        self._overflowed = self._errors = 0
        self._quiet_until = {"overflow": 0.0, "error": 0.0}
        self._lock = Lock()  # of the counts: many threads write
        self._thread = Thread(target=self._run, name="sfumato-audit", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> AuditCounts:
        return AuditCounts(
            self._overflowed,
            self._log.lost,
            self._errors,
            self._lines.qsize(),
            self._bytes,
            self._thread.is_alive(),
        )

    def write(self, line: dict[str, Any]) -> None:
        """Never waits and never raises: where too many lines or bytes wait already, this line is
        lost, with a warning."""
        try:
            data = to_line(line)  # here, so that what waits has a size, and holds no request
        except Exception as error:
            self._failed(error)
            return
        with self._lock:
            is_lost = self._bytes > 0 and self._bytes + len(data) > self._most_bytes
            try:
                if not is_lost:
                    self._lines.put_nowait(data)
                    self._bytes += len(data)
            except Full:
                is_lost = True
            self._overflowed += is_lost
        if is_lost and self._may_log("overflow"):
            logger.warning(
                "audit log: %s takes no lines; they are lost until it does", self._log.path
            )

    def record(
        self, request: AnyRequest, event: Terminal, facts: Mapping[str, Any], held_back: int = 0
    ) -> None:
        """Writes the line of one request. held_back: refusals before it that have none. Never
        raises: an audit that fails ends no request."""
        try:
            line = entry(request, event, facts, self._log.text)
            self.write(line | {"held_back": held_back} if held_back else line)
        except Exception as error:
            self._failed(error)

    def close(self, seconds: float = CLOSE_S) -> None:
        """Waits so long for what has been written to reach the file."""
        try:
            self._lines.put(None, timeout=seconds)
        except Full:
            return
        self._thread.join(seconds)

    def _run(self) -> None:
        while (data := self._lines.get()) is not None:
            self._guarded(self._log.append, data)
            with self._lock:
                self._bytes -= len(data)
        self._guarded(self._log.close)

    def _guarded(self, do: Callable[..., None], *what: Any) -> None:
        try:
            do(*what)
        except BaseException as error:  # the thread is for this alone, and must go on
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Counts a line that an exception cost."""
        with self._lock:
            self._errors += 1
        if self._may_log("error"):
            logger.error(
                "audit log: a line of %s is lost (%d so far)",
                self._log.path,
                self._errors,
                exc_info=error,
            )

    def _may_log(self, what: str) -> bool:
        """True once in QUIET_S, so that the log is not flooded."""
        with self._lock:
            now = time.monotonic()
            due = now >= self._quiet_until[what]
            if due:
                self._quiet_until[what] = now + QUIET_S
            return due
