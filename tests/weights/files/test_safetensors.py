"""The safetensors parser: against files of the `safetensors` package, and against damaged ones."""

from __future__ import annotations

import gc
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.safetensors import read_safetensors

SOUND = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def file_of(header: Any, data: int = 32) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


def changed(**fields: Any) -> bytes:
    """A file whose tensor "b" has other fields."""
    return file_of({**SOUND, "b": {**SOUND["b"], **fields}})


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        return path

    return write


@pytest.fixture
def refused(write: Callable[[bytes], Path]) -> Callable[[bytes, str], None]:
    """Asserts that a file is refused soon, with a message that names the file and has `words`."""

    def refused(content: bytes, words: str) -> None:
        path = write(content)
        gc.freeze()  # what the collector would walk through is the whole test run's, not a user's
        started = time.process_time()
        with pytest.raises(CheckpointError, match=words) as caught:
            read_safetensors(path)
        taken = time.process_time() - started
        assert taken < 5
        assert str(path) in str(caught.value)
        assert len(str(caught.value)) < 600 + len(str(path))

    return refused


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {
        "f32": torch.randn(3, 5),
        "f16": torch.randn(7).half(),
        "bf16": torch.randn(2, 3, 4).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    file = read_safetensors(path)
    assert file.metadata == {"format": "pt"}
    assert set(file.tensors) == set(tensors)
    for name, tensor in tensors.items():
        read = file.read(name)
        assert isinstance(read, torch.Tensor)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_only_when_read(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"odd": torch.ones(4).to(dtype), "fine": torch.ones(2)}, path)
    file = read_safetensors(path)
    assert torch.equal(file.read("fine"), torch.ones(2))
    with pytest.raises(CheckpointError, match=r"'odd' is stored as .* not supported; .*BF16"):
        file.read("odd")


def test_unaligned_data_is_read(write: Callable[[bytes], Path]) -> None:
    """Older writers do not pad the header."""
    for padding in range(4):
        header = json.dumps({"a": SOUND["a"]}).encode() + b" " * padding
        content = file_of(header, 0) + struct.pack("<6f", *range(6))
        assert read_safetensors(write(content)).read("a").flatten().tolist() == list(range(6))


def test_bad_header_length(refused: Callable[[bytes, str], None]) -> None:
    refused(b"", "empty")
    refused(b"1234567", "header length")
    refused(struct.pack("<Q", 2**63) + b"{}", "header length")
    refused(
        struct.pack("<Q", 3) + b"{}", "header length: 3 bytes do not fit into a file of 10 bytes"
    )
    refused(file_of(b" " * (17 << 20)), "header length: 17825792 .* the limit of 16 MiB")
    refused(b"Not a model, only a page of text.\n" * 99, "header length")


def test_bad_json(refused: Callable[[bytes, str], None]) -> None:
    refused(file_of(b""), "header: is not JSON")
    refused(file_of(b'{"a": '), "header: is not JSON")
    refused(file_of(b"\xff\xfe"), "header: is not JSON")
    refused(file_of([1, 2]), "JSON list instead of an object")
    refused(file_of(b"[" * 100_000), "header: is not JSON")
    refused(file_of(b'{"a":' * 100_000), "header: is not JSON")
    refused(file_of(b'{"a": 1' + b"0" * 5000 + b"}"), "header: is not JSON")
    refused(file_of(b'{"a": {}, "a": {}}'), "'a' occurs twice")
    refused(file_of({"__metadata__": {"n": 1}}), "__metadata__")


def test_json_made_to_be_slow_is_refused_soon(refused: Callable[[bytes, str], None]) -> None:
    refused(file_of(b'{"a": [' + b"[]," * 500_000 + b"[]]}"), "tensor 'a': its header entry")


def test_bad_entries(refused: Callable[[bytes, str], None]) -> None:
    for entry in (None, 1, "x", [], {}, {"dtype": "F32"}, {**SOUND["b"], "more": 1}):
        refused(file_of({"b": entry}), "tensor 'b': its header entry")
    refused(changed(dtype="F128"), "tensor 'b': unknown dtype 'F128'")
    refused(changed(dtype=["F32"]), "tensor 'b': unknown dtype")
    for shape in (4, [-4], [4.0], ["4"], [True], [[4]], [2**60], [1] * 99, None):
        refused(changed(shape=shape), "tensor 'b': shape")
    for offsets in ([24], [24, 32, 40], [24, -32], [24.0, 32], "2432", None):
        refused(changed(data_offsets=offsets), "tensor 'b': .* data_offsets")
    refused(changed(shape=[5]), r"\[5\] of BF16 does not fill data_offsets \[24, 32\]")
    refused(changed(data_offsets=[32, 24]), "does not fill")
    refused(changed(shape=[2**40, 2**40]), "does not fill")


def test_bad_layout(refused: Callable[[bytes, str], None]) -> None:
    refused(changed(data_offsets=[16, 24]), "'b': its data overlaps the tensor before it")
    refused(changed(data_offsets=[28, 36]), "'b': its data follows a hole")
    refused(file_of(SOUND, data=31), "truncated")
    refused(file_of(SOUND, data=33), "truncated or damaged")
    refused(file_of({}, data=1), "truncated or damaged")


def test_every_truncation_is_refused(refused: Callable[[bytes, str], None]) -> None:
    content = file_of(SOUND)
    for size in range(len(content)):
        refused(content[:size], ".")


@settings(
    max_examples=10 * settings.default.max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_mutated_headers_open_or_are_refused(
    write: Callable[[bytes], Path], data: st.DataObject
) -> None:
    content = bytearray(file_of({**SOUND, "__metadata__": {"format": "pt"}}))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "digit"]))
        if kind == "flip":
            content[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del content[at : at + data.draw(st.integers(1, 4))]
        else:
            content[at : at + 1] = data.draw(st.sampled_from([b"-", b"9" * 30, b"[", b"{", b","]))
        if not content:
            break
    path = write(bytes(content))
    started = time.process_time()
    try:
        file = read_safetensors(path)
        for name in file.tensors:
            file.read(name)
    except CheckpointError as error:
        assert str(path) in str(error)
    assert time.process_time() - started < 5
