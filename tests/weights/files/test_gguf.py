"""The GGUF parser: against files of the `gguf` package, and against damaged and hostile ones."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.gguf_files import SIMPLE_FORMATS

from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.gguf import read_gguf, tensor_types
from sfumato.weights.formats import QuantizedTensor

FIXTURE = Path(__file__).parents[2].parent / "shared" / "fixtures" / "ggml-vocab-gemma-4.gguf"
U32, F32, STRING, ARRAY = 4, 6, 8, 9


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    """A tensor's header entry; `shape` in GGUF order."""
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    entries: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: int = 16,
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    entries, tensors = entries or [], tensors or []
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    head += b"".join(entries + tensors)
    return head + bytes(-len(head) % alignment) + bytes(data)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write


@pytest.fixture
def refused(write: Callable[[bytes], Path]) -> Callable[[bytes, str], None]:
    """Asserts that a file is refused soon, with a message that names the file and has `words`."""

    def refused(content: bytes, words: str) -> None:
        path = write(content)
        started = time.process_time()
        with pytest.raises(CheckpointError, match=words) as caught:
            read_gguf(path)
        assert time.process_time() - started < 5
        assert str(path) in str(caught.value)
        assert len(str(caught.value)) < 600 + len(str(path))

    return refused


def test_metadata_of_every_type(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "test")
    scalars = {
        "uint8": 250,
        "int8": -3,
        "uint16": 65000,
        "int16": -300,
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "über\n",
    }
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("words", ["", "a", "日本"])
    writer.add_array("flags", [True, False])
    writer.add_array("numbers", [1, -2])
    writer.add_array("reals", [0.5, 1.5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf(path).metadata
    assert {key: metadata[key] for key in scalars} == scalars
    assert type(metadata["bool"]) is bool and type(metadata["uint8"]) is int
    assert metadata["words"] == ["", "a", "日本"]
    assert metadata["flags"].dtype == bool and metadata["flags"].tolist() == [True, False]
    assert metadata["numbers"].tolist() == [1, -2]
    assert metadata["reals"].tolist() == [0.5, 1.5]


@pytest.mark.parametrize("name", SIMPLE_FORMATS)
def test_tensors_of_every_format(tmp_path: Path, name: str) -> None:
    """Shapes come in torch order, values as the `gguf` package reads them."""
    path, kind = tmp_path / "model.gguf", gguf.GGMLQuantizationType[name]
    random = np.random.default_rng(0)
    arrays = {
        "a": random.normal(size=(64,)).astype(np.float32),
        "b": random.normal(size=(3, 96)).astype(np.float32),
        "c": random.normal(size=(2, 5, 32)).astype(np.float32),
    }
    writer = gguf.GGUFWriter(path, "test")
    for key, array in arrays.items():
        writer.add_tensor(key, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    for key, array in arrays.items():
        assert file.tensors[key].shape == array.shape
        assert file.tensors[key].format == name
        read = file.read(key)
        values = read.dequantize() if isinstance(read, QuantizedTensor) else read.float()
        reference = gguf.dequantize(gguf.quantize(array, kind), kind).reshape(array.shape)
        assert torch.equal(values, torch.from_numpy(reference))


def test_type_table_is_ggmls() -> None:
    ours = {kind: sizes for kind, (_, *sizes) in tensor_types().items()}
    theirs = {int(kind): list(sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: theirs.get(kind) for kind in ours} == ours
    for kind, (name, *_) in tensor_types().items():
        assert gguf.GGMLQuantizationType(kind).name == name


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_versions_and_alignments(
    write: Callable[[bytes], Path], version: int, alignment: int
) -> None:
    key = entry("general.alignment", U32, struct.pack("<I", alignment))
    tensors = [tensor("a", (2,), 0, 0), tensor("b", (2,), 0, alignment)]
    content = gguf_bytes([key], tensors, 0, alignment, version)
    content += struct.pack("<2f", 1, 2).ljust(alignment, b"\0") + struct.pack("<2f", 3, 4)
    file = read_gguf(write(content))
    assert file.read("a").tolist() == [1, 2]
    assert file.read("b").tolist() == [3, 4]


def test_no_entries_and_no_tensors(write: Callable[[bytes], Path]) -> None:
    file = read_gguf(write(gguf_bytes(data=0)[:24]))
    assert (dict(file.metadata), dict(file.tensors)) == ({}, {})


@pytest.mark.skipif(not FIXTURE.exists(), reason="needs ../shared/fixtures")
def test_real_vocabulary_opens_quickly(note: Callable[[str], None]) -> None:
    started = time.perf_counter()
    metadata = read_gguf(FIXTURE).metadata
    seconds = time.perf_counter() - started
    note(f"gguf: 262144 tokens and 514906 merges parsed in {seconds:.2f} s")
    assert seconds < 10
    assert metadata["general.architecture"] == "gemma4"
    assert len(metadata["tokenizer.ggml.tokens"]) == 262144
    assert len(metadata["tokenizer.ggml.merges"]) == 514906
    assert metadata["tokenizer.ggml.tokens"][106] == "<turn|>"
    assert metadata["gemma4.attention.head_count_kv"].tolist() == [8, 8, 8, 8, 8, 2] * 5


def test_not_gguf(refused: Callable[[bytes, str], None]) -> None:
    refused(b"{}", "begins with b'{}' instead of b'GGUF'")
    refused(b"Not a model, only a page of text.\n" * 99, "begins with b'Not '")
    refused(b"", "empty")
    refused(gguf_bytes(version=1), "version 1 is not supported")
    refused(gguf_bytes(version=0), "version 0 is not supported")
    refused(gguf_bytes(version=4), "version 4 is not supported")
    refused(b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian")


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_gguf(tmp_path)


@pytest.mark.parametrize("count", [2, 2**16, 2**32, 2**63, 2**64 - 1])
def test_absurd_counts(refused: Callable[[bytes, str], None], count: int) -> None:
    big = struct.pack("<Q", count)
    refused(b"GGUF" + struct.pack("<I", 3) + big + bytes(8), "number of tensors")
    refused(b"GGUF" + struct.pack("<I", 3) + bytes(8) + big, "number of metadata entries")
    for kind in (U32, STRING):
        array = entry("key", ARRAY, struct.pack("<I", kind) + big)
        refused(gguf_bytes([array], data=0, alignment=1), "'key'")
    refused(gguf_bytes([entry("key", STRING, big)], data=0, alignment=1), "'key'")
    shape = (count, count, count, count)
    refused(gguf_bytes(tensors=[tensor("t", shape)]), "'t': ends")


def test_a_header_of_many_empty_strings_is_refused_soon(
    refused: Callable[[bytes, str], None],
) -> None:
    count = (1 << 21) + 1
    array = entry("key", ARRAY, struct.pack("<IQ", STRING, count) + bytes(8 * count))
    refused(gguf_bytes([array]), "'key': an array of 2097153 strings")


def test_metadata_faults(refused: Callable[[bytes, str], None]) -> None:
    one = entry("key", U32, bytes(4))
    refused(gguf_bytes([one, one]), "'key': occurs twice")
    refused(gguf_bytes([entry("key", 13, bytes(8))]), "unknown value type 13")
    refused(gguf_bytes([entry("", U32, bytes(4))]), "a name of 0 bytes")
    refused(gguf_bytes([entry("key", STRING, text(b"\xff"))]), "'key': is not UTF-8")
    strings = struct.pack("<IQ", STRING, 2) + text("a") + text(b"\xff")
    refused(gguf_bytes([entry("key", ARRAY, strings)]), "'key': string 1 is not UTF-8")
    strings = struct.pack("<IQ", STRING, 2) + text("a") + struct.pack("<Q", 2**63)
    refused(gguf_bytes([entry("key", ARRAY, strings)]), "'key': string 1 runs past the end")
    nested = struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", U32, 0)
    refused(gguf_bytes([entry("key", ARRAY, nested)]), "array of arrays")


@pytest.mark.parametrize("alignment", [0, 1, 24, 2**31])
def test_bad_alignment(refused: Callable[[bytes, str], None], alignment: int) -> None:
    key = entry("general.alignment", U32, struct.pack("<I", alignment))
    refused(gguf_bytes([key]), "general.alignment: .* power of two")


def test_alignment_of_another_type(refused: Callable[[bytes, str], None]) -> None:
    refused(gguf_bytes([entry("general.alignment", STRING, text("32"))]), "general.alignment")
    refused(gguf_bytes([entry("general.alignment", F32, bytes(4))]), "general.alignment")


def test_tensor_faults(refused: Callable[[bytes, str], None]) -> None:
    def one(entry: bytes, words: str) -> None:
        refused(gguf_bytes(tensors=[entry], data=64), words)

    one(tensor("t", (1, 1, 1, 1, 1)), "'t': 5 dimensions")
    one(tensor("t", ()), "'t': 0 dimensions")
    one(tensor("t", kind=4), "'t': unknown tensor type 4")
    one(tensor("t", kind=99), "'t': unknown tensor type 99")
    one(tensor("t", (4, 0)), "no elements")
    one(tensor("t", (33,), kind=8), "rows of 33 are no multiple of Q8_0's 32")
    one(tensor("t", (1,), kind=8), "rows of 1 are no multiple of Q8_0's 32")
    one(tensor("t", offset=4), "offset 4 is not aligned to 32")
    one(tensor("t", offset=64), "ends 16 bytes past the end of the file: it is truncated")
    one(tensor("t", offset=2**64 - 32), "past the end")
    refused(gguf_bytes(tensors=[tensor("t"), tensor("t", offset=32)], data=64), "occurs twice")
    both = [tensor("s", (16,), offset=0), tensor("t", offset=32)]
    refused(gguf_bytes(tensors=both, data=64), "'t'.* overlaps tensor 's'")


def test_long_names_are_cut_in_messages(refused: Callable[[bytes, str], None]) -> None:
    refused(gguf_bytes(tensors=[tensor("x" * 60000, kind=99)]), "'xxx.*…: unknown tensor type")


def sound_file() -> bytes:
    entries = [
        entry("general.architecture", STRING, text("diffusion-gemma")),
        entry("general.alignment", U32, struct.pack("<I", 32)),
        entry("words", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("bc") + text("")),
        entry("reals", ARRAY, struct.pack("<IQ3f", F32, 3, 1, 2, 3)),
    ]
    tensors = [
        tensor("a", (32, 2), 8, 0),
        tensor("b", (3, 2), 0, 96),
        tensor("c", (256,), 12, 128),
    ]
    return gguf_bytes(entries, tensors, 272)


def test_every_truncation_is_refused(refused: Callable[[bytes, str], None]) -> None:
    content = sound_file()
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
    content = bytearray(sound_file())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 8))
        if data.draw(st.booleans()):
            content[at] ^= data.draw(st.integers(1, 255))
        else:
            width = data.draw(st.sampled_from([4, 8]))
            edges = [0, 1, 2**31, 2 ** (8 * width) - 1]
            value = data.draw(st.sampled_from(edges) | st.integers(0, 300))
            content[at : at + width] = value.to_bytes(width, "little")
    path = write(bytes(content))
    started = time.process_time()
    try:
        file = read_gguf(path)
        for name in file.tensors:
            file.read(name)
    except CheckpointError as error:
        assert str(path) in str(error)
    assert time.process_time() - started < 5
