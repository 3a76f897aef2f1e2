"""Batches: OpenAI's client, who sees what, what is refused, bounds, and another start."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.server.conftest import Served, serving
from tests.support.batch_files import CHAT, ask, line, texts_of

from sfumato.api import Model
from sfumato.refused import Refused
from sfumato.server import batch_routes, batches
from sfumato.server.batches import NoRoom, Record, Store, scan
from sfumato.server.settings import ServerSettings


def begun(client: openai.OpenAI, data: bytes, url: str = CHAT) -> Any:
    file = client.files.create(file=io.BytesIO(data), purpose="batch")
    how: Any = {"completion_window": "24h", "endpoint": url, "metadata": {"a": "b"}}
    return client.batches.create(input_file_id=file.id, **how)


def ended(client: openai.OpenAI, batch: Any) -> Any:
    until = time.monotonic() + 60
    while batch.status in ("in_progress", "cancelling"):
        assert time.monotonic() < until
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


@pytest.fixture(scope="module")
def on(embedded: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of two keys with batches."""
    folder = tmp_path_factory.mktemp("batches") / "new"
    with serving(embedded, ServerSettings(batch_dir=folder, api_keys=("a", "b"))) as served:
        yield served
        with pytest.raises(ValueError, match="another process may use it"):
            Store(folder / "batches.sqlite", 2**20)


def test_openai_client(on: Served) -> None:
    client, other = on.client("a"), on.client("b")
    data = b"".join(line(f"r{n}", **ask(n)) for n in range(3)) + b"\n" + line("wrong", n=0)
    batch = begun(client, data)
    assert batch.request_counts.total == 4 and batch.metadata == {"a": "b"}
    assert client.files.content(batch.input_file_id).content == data
    for call in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    for find in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            find(batch.input_file_id)
    assert not other.files.list().data and not other.batches.list().data
    assert client.files.delete(batch.input_file_id).deleted  # the batch has its own lines
    how = ask(2)
    own: Any = {"extra_body": {"max_steps": how.pop("max_steps")}, "model": "m"}
    live = client.chat.completions.create(**own, **how)  # beside the batch
    batch = ended(client, batch)
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", 3, 1)
    texts = texts_of(client.files.content(batch.output_file_id).text)
    assert list(texts) == [f"r{n}" for n in range(3)]
    assert texts["r2"] == live.choices[0].message.content
    (wrong,) = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(wrong)["response"]["status_code"] == 400
    newer = ended(client, begun(client, line("v", "/v1/embeddings", input="Hi"), "/v1/embeddings"))
    pages = client.batches.list(limit=1)
    assert [each.id for each in pages] == [newer.id, batch.id]
    assert {each.purpose for each in client.files.list()} == {"batch", "batch_output"}
    with pytest.raises(openai.BadRequestError, match="is completed already"):
        client.batches.cancel(batch.id)


def test_cancelled_and_expired(on: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client = on.client("b")
    slow = line("quick", **ask(1)) + line(
        "slow", **ask(2, max_tokens=400, max_steps=48, confidence=1e-9)
    )
    batch = begun(client, slow)
    while not client.batches.retrieve(batch.id).request_counts.completed:
        time.sleep(0.02)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled" and batch.error_file_id is None
    assert list(texts_of(client.files.content(batch.output_file_id).text)) == ["quick"]
    deadline = time.monotonic() + 60
    while on.engine.health().running:  # the line's request, which gives its slot back
        assert time.monotonic() < deadline
        time.sleep(0.02)
    monkeypatch.setattr(batch_routes, "WINDOW_S", 0)
    batch = ended(client, begun(client, slow))
    rows = client.files.content(batch.error_file_id).text.splitlines()
    assert batch.status == "expired" and len(rows) == 2
    assert json.loads(rows[0])["error"]["code"] == "batch_expired"


def test_without_a_folder(server: Served) -> None:
    for call in (server.client().batches.list, server.client().files.list):
        with pytest.raises(openai.NotFoundError, match="--batch-dir"):
            call()
    with pytest.raises(openai.NotFoundError, match="--batch-dir"):
        server.client().files.create(file=b"{}", purpose="batch")


GOOD = line("a", **ask(1))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "has no lines"),
        (GOOD + b"[]\n", r"line 2: the body must be a JSON object"),
        (GOOD + b"{\n", "line 2: the body is not JSON"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "line 1: the body"),
        (GOOD + b"\n" + GOOD, "line 3: custom_id: 'a' is that of line 1 too"),
        (line("a", "/v1/models"), "line 1: url: '/v1/models' is none of /v1/chat/completions"),
        (line("a", "/v1/embeddings"), "line 1: url: is not /v1/chat/completions"),
        (line("a", stream=True), "line 1: body.stream: a batch streams nothing"),
        (GOOD.replace(b"POST", b"GET"), "line 1: method"),
        (GOOD.replace(b'"a"', b'""'), "line 1: custom_id"),
        (GOOD.replace(b'"url"', b'"uri"'), "line 1: uri: unknown"),
        (b" " * 3000, "line 1: is over 2,048 bytes"),
        (line("a") + line("b") + line("c"), "line 3: is one over 2"),
    ],
)
def test_wrong_lines(data: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_LINES", 2)
    with pytest.raises(Refused, match=why):
        list(scan(io.BytesIO(data), ServerSettings(max_body=2048), CHAT))


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "s", 2**20)
    record = Record("file-1", "", "file", None, {})
    with pytest.raises(NoRoom, match="--batch-space"):
        store.put(record, [(1, b"x" * 2**21)])
    assert not store.records("file")  # nothing of it is kept
    monkeypatch.setattr(batches, "MOST_RECORDS", 1)
    store.put(record, [(1, b"x" * 2**19)])
    with pytest.raises(NoRoom, match="there are 1 already"):
        store.put(Record("file-2", "", "file", None, {}))
    store.put(Record("file-1", "", "file", 1, {}))  # expired
    assert not store.records("file") and not store.numbers("file-1")
    store.put(record, [(1, b"x" * 2**19)])  # there is room again
    store.close()


def test_refused_uploads(on: Served) -> None:
    client = on.client("a")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"{}", purpose="assistants")
    with pytest.raises(openai.APIStatusError, match="--max-body") as large:
        client.files.create(file=b"{}" * 2**22, purpose="batch")
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="line 1: custom_id: field required"):
        begun(client, b"{}")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        begun(client, GOOD, "/v1/models")


def test_a_server_goes_on_with_what_another_has_left(
    embedded: Model, server: Served, tmp_path: Path
) -> None:
    settings = ServerSettings(batch_dir=tmp_path)
    bodies = {f"r{n}": ask(n) for n in range(3)}
    data = b"".join(line(name, **how) for name, how in bodies.items())
    with serving(embedded, settings, slots=1) as served:
        client = served.client()
        batch = begun(client, data)
        deadline = time.monotonic() + 60
        while not client.batches.retrieve(batch.id).request_counts.completed:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        store = served.listener.config.app.state.batches.store  # type: ignore[union-attr]
    left = store.numbers(batch.id, "left")
    store.close()
    assert left, "the server has ended before the batch"
    with serving(embedded, settings, slots=1) as served:
        batch = ended(served.client(), served.client().batches.retrieve(batch.id))
        texts = texts_of(served.client().files.content(batch.output_file_id).text)
    assert batch.request_counts.completed == 3 and list(texts) == list(bodies)
    for name, how in bodies.items():
        body = server.post(CHAT, **how).json()
        assert texts[name] == body["choices"][0]["message"]["content"]
