"""`/v1/files` and `/v1/batches` as OpenAI's API has them, and `Batches`, which answers the lines.

A batch is a task of the server's event loop that asks the application itself, in the background
(`WITHIN`). A server that was killed goes on with the lines that have no result. A batch belongs to
a key: where the key is not accepted any more, it rests.
"""

from __future__ import annotations

import asyncio
import io
import logging
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from secrets import token_hex
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response, StreamingResponse
from pydantic import Field, PrivateAttr

from sfumato.refused import Refused
from sfumato.server.batches import (
    LONGEST_WAIT_S,
    MOST_LINES,
    MOST_RECORDS,
    TICK_S,
    Asking,
    Part,
    Record,
    Store,
    answer,
    check_path,
    read_line,
    result_of,
    scan,
)
from sfumato.server.dialects.responses.body import MOST_METADATA, Metadata
from sfumato.server.http import multipart, request_body
from sfumato.server.http.errors import ApiError, internal
from sfumato.server.http.middleware import OWNER, WITHIN, ASGIApp, Receive, Scope, Send, owner_of
from sfumato.server.openapi import fails, takes
from sfumato.server.schemas import Body, at_most
from sfumato.server.service import Service

log = logging.getLogger(__name__)

FILES, PATH = "/v1/files", "/v1/batches"
MOST_RUNNING = 4  # batches that are answered at a time; others wait for their turn
WINDOW_S = 24 * 3600  # seconds that a batch has, as OpenAI's API names them
KEPT_S = 30 * WINDOW_S  # that files and ended batches are kept
ENDED = ("completed", "failed", "expired", "cancelled")
_STAMPS = ("in_progress", "finalizing", "cancelling", *ENDED)
_OFF = "files and batches are off here; start the server with --batch-dir FOLDER"
_EXPIRED = "the batch had no time left for this request; send it in another batch"
Shown = dict[str, Any]
_RESULTS: tuple[Part, ...] = ("output", "error")


class FileBody(Body):
    """The form of an upload."""

    purpose: Literal["batch"]
    _data: bytes = PrivateAttr(b"")


class BatchBody(Body):
    """OpenAI's."""

    input_file_id: str = Field(description="A file of the purpose batch.")
    endpoint: str = Field(description="The path that every line of the file has.")
    completion_window: Literal["24h"]
    metadata: Annotated[Metadata | None, at_most(MOST_METADATA)] = Field(
        None, description="Repeated in the batch."
    )


class Batches:
    """The batches of a server. Belongs to one event loop."""

    def __init__(self, app: ASGIApp, service: Service, store: Store) -> None:
        self.store = store
        self._app, self._service = app, service
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by id, in the order of their turns
        self._cancelled: set[str] = set()

    def resume(self) -> None:
        """Goes on with the batches that an earlier process has left. To be called in the loop that
        serves, when it serves."""
        keys = self._service.settings.api_keys
        owners = {owner_of(key.encode()) for key in keys} or {""}
        for record in self.store.records("batch"):
            if record.owner in owners:
                self.begin(record)

    def begin(self, record: Record) -> None:
        """Sees to it that a batch comes to its end."""
        if record.shown["status"] == "cancelling":
            self._cancelled.add(record.id)
        if record.shown["status"] not in ENDED and record.id not in self._tasks:
            self._tasks[record.id] = asyncio.create_task(self._run(record))

    def shown(self, record: Record) -> Shown:
        """A file or a batch as clients see it, with the lines that it has answered."""
        if record.kind == "file" or record.shown["status"] in ENDED:
            return record.shown
        parts: dict[str, Part] = {"completed": "output", "failed": "error"}
        counts = {name: self.store.size(record.id, part)[0] for name, part in parts.items()}
        return record.shown | {"request_counts": record.shown["request_counts"] | counts}

    async def _run(self, record: Record) -> None:
        def is_over() -> bool:
            is_late = time.time() >= record.shown["expires_at"]
            return is_late or record.id in self._cancelled

        failure = None
        try:
            while list(self._tasks).index(record.id) >= MOST_RUNNING and not is_over():
                await asyncio.sleep(TICK_S)
            try:
                await answer(self._asking(record, is_over))
            except Exception as error:
                log.exception("the batch %s failed", record.id)
                failure = error if isinstance(error, ApiError) else internal()
            while not await run_in_threadpool(self._end, record, failure):
                await asyncio.sleep(LONGEST_WAIT_S)
        finally:
            del self._tasks[record.id]
            self._cancelled.discard(record.id)

    def _asking(self, record: Record, is_over: Callable[[], bool]) -> Asking:
        service = self._service

        async def within(scope: Scope, receive: Receive, send: Send) -> None:
            scope[WITHIN] = record.owner
            await self._app(scope, receive, send)

        return Asking(
            within,
            self.store,
            record.id,
            service.settings,
            at_a_time=2 * service.engine.config.slots if service.models.is_loaded else 8,
            is_over=is_over,
        )

    def _end(self, record: Record, failure: ApiError | None) -> bool:
        """Ends a batch, whose results become files of its owner; False where the disk does not
        take that now."""
        store, now = self.store, int(time.time())
        left, files = store.numbers(record.id, "left"), dict[Part, Record]()
        status = "completed" if not left else "expired" if failure is None else "failed"
        status = "cancelled" if left and record.id in self._cancelled else status
        try:
            for number in left if status == "expired" else ():
                line = read_line(store.line(record.id, number), self._service.settings)
                error = {"code": "batch_expired", "message": _EXPIRED}
                result = result_of(record.id, number, line.custom_id, error=error)
                store.answered(record.id, number, "error", result)
            over = self.shown(record) | {"status": status, f"{status}_at": now}
            if failure is not None:
                fault = {"code": failure.code, "message": failure.message, "line": None}
                over["errors"] = {"object": "list", "data": [fault]}
            for part in _RESULTS:
                lines, nbytes = store.size(record.id, part)
                name = f"file-{record.id.removeprefix('batch_')}{part[0]}"
                if lines:
                    files[part] = _file(record.owner, name, "batch_output", nbytes)
                    over[f"{part}_file_id"] = name
            store.end(replace(record, expires=now + KEPT_S, shown=over), files)
        except (ApiError, sqlite3.Error):
            log.exception("the end of the batch %s cannot be written yet", record.id)
            return False
        return True


def _file(owner: str, name: str, purpose: str, nbytes: int) -> Record:
    """What is known of a new file."""
    now = int(time.time())
    shown = {
        "id": name,
        "object": "file",
        "bytes": nbytes,
        "created_at": now,
        "expires_at": now + KEPT_S,
        "filename": f"{name}.jsonl",
        "purpose": purpose,
        "status": "processed",
    }
    return Record(name, owner, "file", now + KEPT_S, shown)


def add_routes(app: FastAPI, service: Service) -> Batches | None:
    """Adds the nine routes; returns what runs behind them, None where they are off. Raises
    ValueError and OSError for the folder."""
    folder, batches = service.settings.batch_dir, None
    if folder is not None:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        store = Store(folder / "batches.sqlite", service.settings.batch_space)
        batches = Batches(app, service, store)

    def on() -> Batches:
        if batches is None:
            raise ApiError(404, _OFF, code="not_record_of")
        return batches

    _add_files(app, service, on)
    _add_batches(app, service, on)
    for kind, path in (("file", FILES), ("batch", PATH)):
        _add_reads(app, on, kind, path)
    return batches


On = Callable[[], Batches]


def _owner(http: Request) -> str:
    owner: str = http.scope.get(OWNER, "")
    return owner


def _record_of(store: Store, http: Request, kind: str, name: str) -> Record:
    for record in store.records(kind, _owner(http)):
        if record.id == name:
            return record
    message = f"there is no {kind} {name[:128]!r} here; it was deleted, or has expired"
    raise ApiError(404, message, f"{kind}_id", "not_record_of")


def _add_files(app: FastAPI, service: Service, on: On) -> None:
    @app.post(FILES, tags=["OpenAI"], responses=fails(400, 404, 408, 415, 503))
    async def create_file(http: Request) -> Shown:
        """Keeps the file of a batch: multipart/form-data with file and purpose."""
        store = on().store
        boundary = multipart.boundary_of(http.headers.get("content-type", ""))

        def decode(data: bytearray) -> FileBody:
            if boundary is None:
                raise Refused("file", "is missing", "send multipart/form-data", "missing")
            lines, parts = multipart.split(data, boundary, "file")
            fields = {name: part.decode(errors="replace") for name, part in parts.items()}
            body = request_body.validated(fields, FileBody, service.settings.lenient)
            body._data = bytes(lines)
            return body

        async with request_body.read_with(service, http, decode) as body:
            return await run_in_threadpool(_kept, store, _owner(http), body)

    @app.get(f"{FILES}/{{file_id}}/content", tags=["OpenAI"], responses=fails(404))
    def content(http: Request, file_id: str) -> Response:
        """The bytes of a file."""
        store = on().store
        name = _record_of(store, http, "file", file_id).id
        lines = (store.line(name, number) for number in store.numbers(name))
        return StreamingResponse(lines, media_type="application/octet-stream")

    @app.delete(f"{FILES}/{{file_id}}", tags=["OpenAI"], responses=fails(404))
    def delete_file(http: Request, file_id: str) -> Shown:
        """Removes a file; batches that were made of it go on."""
        on().store.drop(_record_of(on().store, http, "file", file_id).id)
        return {"id": file_id, "object": "file", "deleted": True}


def _add_reads(app: FastAPI, on: On, kind: str, path: str) -> None:
    @app.get(path, name=f"{kind}_list", tags=["OpenAI"], responses=fails(400, 404))
    def listed(
        http: Request,
        limit: Annotated[int, Query(ge=1, le=MOST_RECORDS)] = 20,
        after: str | None = None,
    ) -> Shown:
        """What is kept, the newest first."""
        records = on().store.records(kind, _owner(http))[::-1]
        ids = [each.id for each in records]
        if after is not None and after not in ids:
            raise Refused("after", "is the id of none of these")
        start = 0 if after is None else ids.index(after) + 1
        data = [on().shown(each) for each in records[start : start + limit]]
        return {"object": "list", "data": data, "has_more": len(ids) > start + limit}

    @app.get(f"{path}/{{item_id}}", name=kind, tags=["OpenAI"], responses=fails(404))
    def one(http: Request, item_id: str) -> Shown:
        """What is known of it; of a batch, how many of its lines have results."""
        return on().shown(_record_of(on().store, http, kind, item_id))


def _kept(store: Store, owner: str, body: FileBody) -> Shown:
    """A file that was uploaded. Raises ApiError and Refused."""
    if body._data.count(b"\n") > MOST_LINES:
        raise Refused("file", f"has over {MOST_LINES:,} lines", "divide it")
    record = _file(owner, f"file-{token_hex(12)}", "batch", len(body._data))
    store.put(record, enumerate(io.BytesIO(body._data)))
    return record.shown


def _add_batches(app: FastAPI, service: Service, on: On) -> None:
    @app.post(PATH, tags=["OpenAI"], **takes(BatchBody, statuses=(404,)))
    async def create_batch(http: Request) -> Shown:
        """Begins a batch of a file's lines. It yields to other requests."""
        batches = on()
        async with request_body.read(service, http, BatchBody) as body:
            record = await run_in_threadpool(_made, batches.store, service, http, body)
        batches.begin(record)
        return record.shown

    @app.post(f"{PATH}/{{batch_id}}/cancel", tags=["OpenAI"], responses=fails(400, 404, 408))
    async def cancel_batch(http: Request, batch_id: str) -> Shown:
        """Ends a batch; the results that there are become its files."""
        await request_body.discard(http)
        batches = on()
        record = await run_in_threadpool(_record_of, batches.store, http, "batch", batch_id)
        if (status := record.shown["status"]) in ENDED:
            raise ApiError(400, f"the batch is {status} already", "batch_id", "batch_ended")
        how = {"status": "cancelling", "cancelling_at": int(time.time())}
        record = replace(record, shown=record.shown | how)
        await run_in_threadpool(batches.store.put, record)
        batches.begin(record)
        return await run_in_threadpool(batches.shown, record)


def _made(store: Store, service: Service, http: Request, body: BatchBody) -> Record:
    """A batch that is yet to begin, with its own lines. Raises ApiError and Refused."""
    endpoint, now = check_path(body.endpoint, "endpoint"), int(time.time())
    source = _record_of(store, http, "file", body.input_file_id)
    data = io.BytesIO(b"".join(store.line(source.id, each) for each in store.numbers(source.id)))
    lines = list(scan(data, service.settings, endpoint))
    shown: Shown = {
        "id": f"batch_{token_hex(12)}",
        "object": "batch",
        "endpoint": endpoint,
        "errors": None,
        "input_file_id": source.id,
        "completion_window": body.completion_window,
        "status": "in_progress",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_S,
        **{f"{name}_at": None for name in _STAMPS},
        "in_progress_at": now,
        "request_counts": {"total": len(lines), "completed": 0, "failed": 0},
        "metadata": body.metadata,
    }
    record = Record(shown["id"], _owner(http), "batch", None, shown)
    store.put(record, lines)
    return record
