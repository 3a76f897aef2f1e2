"""Bodies that are compressed with zstd: bounded by what comes out of them."""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.support.fake_engine import FakeEngine

from sfumato.server.app import create_app
from sfumato.server.http.errors import ApiError
from sfumato.server.http.middleware import BodyTooLarge
from sfumato.server.http.request_body import expanded, is_zstd
from sfumato.server.models import Models
from sfumato.server.settings import ServerSettings

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MOST = 2**20
PATH = "/v1/systemone"
CHAT = "/v1/chat/completions"


def body(size: int = 0) -> bytes:
    question = {"type": "noul", "instructions": "?"}
    return json.dumps({"state": "x" * size, "questions": {"a": question}}).encode()


def bomb(nbytes: int, declared: bool = True) -> bytes:
    """A few bytes for each mebibyte."""
    compressor = zstd.ZstdCompressor()
    if declared:
        compressor.set_pledged_input_size(nbytes)
    parts = [compressor.compress(bytes(2**20)) for _ in range(nbytes >> 20)]
    return b"".join([*parts, compressor.flush()])


@pytest.fixture
def http() -> TestClient:
    app = create_app(Models("sfumato", FakeEngine()), ServerSettings(max_body=MOST))
    return TestClient(app, headers={"content-encoding": "zstd"})


@pytest.mark.parametrize("size", [10, 60_000, 70_000, 900_000])
def test_small_and_large_bodies(http: TestClient, size: int) -> None:
    assert http.post(PATH, content=zstd.compress(body(size))).status_code == 200


def test_any_route_takes_them(http: TestClient) -> None:
    text = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    assert http.post(CHAT, content=zstd.compress(text)).status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_a_bomb_is_refused_at_once(http: TestClient, declared: bool) -> None:
    data = bomb(2**27, declared)
    assert len(data) < 2**17
    http.post(PATH, content=zstd.compress(body()))  # imports and threads are there
    tracemalloc.start()
    began = time.perf_counter()
    answer = http.post(PATH, content=data)
    seconds = time.perf_counter() - began
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answer.status_code == 413
    assert answer.json()["detail"]["error_type"] == "request_too_large_error"
    assert seconds < 0.5 and most < 8 * MOST


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{}", "not zstd"),
        (b"", "not zstd"),
        (zstd.compress(b"{}" * 100)[:-4], "cut short"),
        (zstd.compress(b"{}") + b"more", "more than one"),
        (zstd.compress(b"{}") * 2, "more than one"),
        (zstd.compress(b"{"), "not JSON"),
    ],
)
def test_what_is_no_zstd(http: TestClient, data: bytes, words: str) -> None:
    answer = http.post(PATH, content=data)
    assert answer.status_code == 422 and words in answer.text
    assert answer.json()["detail"][0]["loc"] == ["body"]


def test_a_frame_may_not_ask_for_a_large_window() -> None:
    large = {zstd.CompressionParameter.window_log: 27}
    compressor = zstd.ZstdCompressor(options=large)
    data = compressor.compress(b"x" * 100) + compressor.flush()
    with pytest.raises(ApiError, match="not zstd"):
        expanded(bytearray(data), MOST)


def test_the_limit_is_exact() -> None:
    data = bytearray(zstd.compress(bytes(1000)))
    with pytest.raises(BodyTooLarge):
        expanded(data, 999)
    assert expanded(data, 1000) == bytes(1000) and not data


@pytest.mark.parametrize(
    ("encoding", "expected"), [("", False), ("identity", False), (" ZSTD ", True)]
)
def test_encodings(encoding: str, expected: bool) -> None:
    assert is_zstd(encoding) is expected


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd, zstd"])
def test_other_encodings_are_refused(http: TestClient, encoding: str) -> None:
    fields: dict[str, Any] = {"headers": {"content-encoding": encoding}, "content": body()}
    answer = http.post(PATH, **fields)
    assert answer.status_code == 415 and answer.headers["accept-encoding"] == "zstd"
    assert http.post(CHAT, **fields).json()["error"]["code"] == "unsupported_encoding"
