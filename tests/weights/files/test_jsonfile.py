"""JSON objects from sound and malformed files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.jsonfile import parse_object, read_object


def test_reads_an_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": [1, {"b": "ü"}]}', encoding="utf-8")
    assert read_object(path) == {"a": [1, {"b": "ü"}]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\x80\x02}q\x00.", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"n": ' + b"9" * 10_000 + b"}", "is not JSON"),
        (b"null", "NoneType instead of an object"),
        (b'"text"', "str instead of an object"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' occurs twice"),
        (b"{" + b'"a": 1, ' * 100_000 + b'"b": 2}', "'a' occurs twice"),
    ],
    ids=range(9),
)
def test_malformed_json_is_refused_soon(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    started = time.process_time()
    with pytest.raises(CheckpointError, match=words) as caught:
        read_object(path)
    assert time.process_time() - started < 5
    assert str(path) in str(caught.value)


def test_absent_and_oversized_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_object(tmp_path / "config.json")
    (tmp_path / "big.json").touch()
    os.truncate(tmp_path / "big.json", 1 << 40)  # sparse
    with pytest.raises(CheckpointError, match="larger than"):
        read_object(tmp_path / "big.json")


def test_the_message_says_where() -> None:
    with pytest.raises(CheckpointError, match=r"^file: header: "):
        parse_object(b"1", "file: header")
