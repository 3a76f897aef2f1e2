"""Batches of requests, a line each: `Store` keeps them, `scan` checks them, `answer` asks them.

A store is one SQLite file: SQLite keeps what was written whole where the process is killed, bounds
its size, and keeps other processes out. The result of a line takes its place in one transaction:
none is lost, and none has two results. Results have the order of their lines, whatever the order in
which they come. Knows no routes.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Literal

import httpx
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field

from sfumato.refused import Refused
from sfumato.server.dialects import DECISIONS, DIALECTS
from sfumato.server.http.errors import ApiError
from sfumato.server.http.middleware import ASGIApp, canonical
from sfumato.server.http.request_body import decoded
from sfumato.server.schemas import Body
from sfumato.server.settings import ServerSettings

MOST_RECORDS = 1000  # of files, and again of batches
MOST_LINES = 50_000  # of a file, as OpenAI's API has it
LONGEST_ID = 512  # characters
LATER = (429, 503, 529)  # statuses of answers that say to come later
MOST_TRIES = 20  # of a line, in eight minutes; where the queue is full, until it is not
LONGEST_WAIT_S, TICK_S = 30.0, 0.25
_PAGE = 4096  # bytes
_LAYOUT = f"""
PRAGMA page_size = {_PAGE};
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA foreign_keys = ON;
BEGIN EXCLUSIVE;
CREATE TABLE IF NOT EXISTS records (
    id TEXT PRIMARY KEY, owner TEXT, kind TEXT, expires INTEGER, shown TEXT
);
CREATE TABLE IF NOT EXISTS lines (
    record TEXT REFERENCES records ON DELETE CASCADE, number INTEGER, part TEXT, data BLOB,
    UNIQUE (record, number)
);
COMMIT;
"""

Part = Literal["left", "output", "error"]
"""What a line of a batch is: a request that is left, or its result, an answer or an error."""


class NoRoom(ApiError, ValueError):
    """There is no room for more files, batches or lines."""

    def __init__(self, message: str) -> None:
        super().__init__(413, message, code="no_room")


@dataclass(frozen=True)
class Record:
    """A file or a batch."""

    id: str
    owner: str
    kind: str  # "file" or "batch"
    expires: int | None  # when it is removed, in seconds since 1970
    shown: dict[str, Any]  # as OpenAI's API has it


class Store:
    """Any thread may call."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        """Raises ValueError where there is no such store, or another process has it open."""
        self._lock = Lock()
        try:
            self._base = sqlite3.connect(path, timeout=0, check_same_thread=False)
            self._base.executescript(_LAYOUT)
            self._base.execute(f"PRAGMA max_page_count = {max(64, most_bytes // _PAGE)}")
        except sqlite3.Error as error:
            why = f"({error}); another process may use it"
            raise ValueError(f"{path}: cannot be opened as a store of batches {why}") from None

    def close(self) -> None:
        self._base.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction. Raises NoRoom."""
        try:
            with self._lock, self._base:
                yield self._base
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            why = "the disk is full, or --batch-space is reached"
            raise NoRoom(f"there is no room for more lines of batches: {why}") from None

    def _read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._base.execute(query, values).fetchall()

    def put(self, record: Record, lines: Iterable[tuple[int, bytes]] = ()) -> None:
        """Adds a record with its numbered lines, or replaces what is known of it. Raises NoRoom."""
        with self._writing() as base:
            _put(base, record)
            query = "SELECT count(*) FROM records WHERE kind = ?"
            if base.execute(query, (record.kind,)).fetchone()[0] > MOST_RECORDS:
                raise NoRoom(f"there are {MOST_RECORDS:,} already; delete some, or wait")
            rows = ((record.id, number, data) for number, data in lines)
            base.executemany("INSERT INTO lines VALUES (?, ?, 'left', ?)", rows)

    def drop(self, name: str) -> None:
        """Removes a record and its lines."""
        with self._writing() as base:
            base.execute("DELETE FROM records WHERE id = ?", (name,))

    def records(self, kind: str, owner: str | None = None) -> list[Record]:
        """Records of a kind, of one owner or all, oldest first; what has expired is removed."""
        with self._writing() as base:
            base.execute("DELETE FROM records WHERE expires <= ?", (int(time.time()),))
        query = "SELECT * FROM records WHERE kind = ? AND coalesce(?, owner) = owner ORDER BY rowid"
        rows = self._read(query, kind, owner)
        return [
            Record(name, owner, kind, expires, json.loads(shown))
            for name, owner, kind, expires, shown in rows
        ]

    def answered(self, name: str, number: int, part: Part, result: bytes) -> None:
        """Replaces a line of a batch by its result. Raises NoRoom."""
        with self._writing() as base:
            query = "UPDATE lines SET part = ?, data = ? WHERE record = ? AND number = ?"
            base.execute(query, (part, result, name, number))

    def end(self, batch: Record, files: Mapping[Part, Record]) -> None:
        """Replaces what is known of a batch, and makes its results the lines of these files; what
        is left is removed. Raises NoRoom."""
        with self._writing() as base:
            _put(base, batch)
            for part, file in files.items():
                _put(base, file)
                query = "UPDATE lines SET record = ? WHERE record = ? AND part = ?"
                base.execute(query, (file.id, batch.id, part))
            base.execute("DELETE FROM lines WHERE record = ?", (batch.id,))

    def numbers(self, name: str, part: Part | None = None) -> list[int]:
        """The numbers of the lines of a record, in their order; None: of all of them."""
        query = "SELECT number FROM lines WHERE record = ? AND coalesce(?, part) = part ORDER BY 1"
        return [number for (number,) in self._read(query, name, part)]

    def line(self, name: str, number: int) -> bytes:
        """A line; nothing where it is not there any more."""
        query = "SELECT data FROM lines WHERE record = ? AND number = ?"
        return b"".join(data for (data,) in self._read(query, name, number))

    def size(self, name: str, part: Part) -> tuple[int, int]:
        """Lines of a part of a batch, and their bytes."""
        query = "SELECT count(*), total(length(data)) FROM lines WHERE record = ? AND part = ?"
        ((count, nbytes),) = self._read(query, name, part)
        return count, int(nbytes)


def _put(base: sqlite3.Connection, record: Record) -> None:
    base.execute(
        "INSERT INTO records VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
        "SET expires = excluded.expires, shown = excluded.shown",
        (*astuple(record)[:4], json.dumps(record.shown)),
    )


BODIES: dict[str, type[BaseModel] | None] = {
    path: post.body_type for post in DIALECTS for path in (post.path, *post.aliases)
} | dict.fromkeys(route.path for route in DECISIONS)
"""The paths that lines may name, and the bodies of those that have one form."""


class BatchLine(Body):
    """OpenAI's."""

    custom_id: str = Field(min_length=1, max_length=LONGEST_ID)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


def check_path(path: str, field: str) -> str:
    """The path as routes have it. Raises Refused where lines may not name it."""
    if (known := canonical(path)) not in BODIES:
        raise Refused(field, f"{path[:100]!r} is none of {', '.join(BODIES)}")
    return known


def read_line(data: bytes, settings: ServerSettings) -> BatchLine:
    """A line, whose body asks for no stream. Raises Refused and ApiError."""
    line = decoded(bytearray(data), BatchLine, settings.lenient, settings.max_values)
    body_type = BODIES[check_path(line.url, "url")]
    fields = () if body_type is None else tuple(body_type.model_fields)
    if line.body.get("stream"):
        raise Refused("body.stream", "a batch streams nothing", "leave it out")
    if "stream" in fields:
        line.body["stream"] = False  # Ollama's routes stream where nothing is said
    if "store" in fields:
        line.body.setdefault("store", False)  # else responses of others would be forgotten
    return line


def scan(
    stream: BinaryIO, settings: ServerSettings, endpoint: str | None = None
) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, each of which is checked but for what its route
    checks. endpoint: the path of all lines. Raises Refused, which names the line."""
    numbers: dict[str, int] = {}  # of lines, by their custom_id
    for number in count(1):
        data = stream.readline(settings.max_body + 1)
        if not data:
            break
        if not data.strip() and len(data) <= settings.max_body:
            continue
        try:
            if len(data) > settings.max_body:
                raise Refused(None, f"is over {settings.max_body:,} bytes (--max-body)")
            if len(numbers) == MOST_LINES:
                raise Refused(None, f"is one over {MOST_LINES:,}", "divide the file")
            line = read_line(data, settings)
            if endpoint not in (None, canonical(line.url)):
                raise Refused("url", f"is not {endpoint}, the endpoint of the batch")
            if (first := numbers.setdefault(line.custom_id, number)) != number:
                raise Refused("custom_id", f"{line.custom_id[:64]!r} is that of line {first} too")
        except (Refused, ApiError) as error:
            raise Refused(None, f"line {number}: {error}") from None
        yield number, data
    if not numbers:
        raise Refused(None, "the file has no lines")


@dataclass(frozen=True)
class Asking:
    """The lines of a batch, and what answers them: an application within this process."""

    app: ASGIApp
    store: Store
    batch: str
    settings: ServerSettings
    at_a_time: int
    is_over: Callable[[], bool]  # whether to leave the rest
    on_line: Callable[[], None] = lambda: None  # called after each line


async def answer(asking: Asking) -> None:
    """Asks the lines that are left, some at a time. Those that are under way when it is over stay.
    Raises NoRoom."""
    # The name of the client is for logs, and for its turn among others.
    transport = httpx.ASGITransport(asking.app, False, client=("batch", 0))
    numbers = await run_in_threadpool(asking.store.numbers, asking.batch, "left")
    left, under_way = iter(numbers), set[asyncio.Task[None]]()
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        try:
            while not asking.is_over():
                while len(under_way) < asking.at_a_time and (number := next(left, None)):
                    under_way.add(asyncio.create_task(_answer(asking, client, number)))
                if not under_way:
                    return
                done, under_way = await asyncio.wait(
                    under_way, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED
                )
                for each in done:
                    each.result()
        finally:
            for each in under_way:
                each.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)


async def _answer(asking: Asking, client: httpx.AsyncClient, number: int) -> None:
    """Asks a line, again where the answer is to come later, and keeps its result."""
    data = await run_in_threadpool(asking.store.line, asking.batch, number)
    line = await run_in_threadpool(read_line, data, asking.settings)
    headers, tries, wait_s = {"Content-Type": "application/json"}, 0, 1.0
    content = json.dumps(line.body).encode()
    while True:
        answer = await client.post(line.url, content=content, headers=headers)
        is_busy = answer.status_code in (429, 529) or '"queue_full"' in answer.text
        tries += not is_busy
        if answer.status_code not in LATER or tries >= MOST_TRIES:
            break
        await asyncio.sleep(wait_s)
        wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    def keep() -> None:
        response = {"status_code": answer.status_code, "body": answer.json()}
        response |= {"request_id": answer.headers.get("x-request-id")}
        result = result_of(asking.batch, number, line.custom_id, response=response)
        part: Part = "output" if answer.is_success else "error"
        asking.store.answered(asking.batch, number, part, result)

    await run_in_threadpool(keep)
    asking.on_line()


def result_of(batch: str, number: int, custom_id: str, **how: Any) -> bytes:
    """A line of results in OpenAI's form. how: a response, or an error."""
    name = f"batch_req_{batch.removeprefix('batch_')}_{number}"
    fields = {"id": name, "custom_id": custom_id, "response": None, "error": None} | how
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
