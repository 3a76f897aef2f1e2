from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from sfumato.weights import formats
from sfumato.weights.files.gguf import ALIGNMENT, read_gguf, write_gguf
from sfumato.weights.files.tensorfile import TensorStream, recoded
from sfumato.weights.formats import quantize

METADATA: dict[str, Any] = {
    "general.architecture": "anything",
    "a.text": "Zürich ▁",
    "a.flag": True,
    "a.count": 262144,
    "a.large": 1 << 40,
    "a.negative": -3,
    "a.huge": 2**64 - 1,
    "a.number": 1e-6,
    "a.infinite": -np.inf,
    "a.denormal": 2.0**-149,
    "a.exact": np.float64(0.1),
    "a.enormous": np.float64(1e300),
    "a.minute": np.float64(1e-300),
    "a.texts": ["", "one", "二"],
    "a.none": [],
    "a.flags": np.array([True, False]),
    "a.integers": np.array([8, 2, 8], np.int32),
    "a.numbers": np.array([0.5, -1000], np.float32),
}


def _tensor(name: str, value: torch.Tensor, format: str) -> TensorStream:
    return TensorStream(name, tuple(value.shape), format, lambda: recoded(value, format))


@pytest.fixture(scope="module")
def values() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {"odd": (7,), "matrix": (5, 256), "experts": (3, 2, 256), "last": (1,)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


FORMATS = {"odd": "F32", "matrix": "Q4_K", "experts": "BF16", "last": "F16"}


@pytest.fixture(scope="module")
def path(values: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    written: list[int] = []
    with path.open("xb") as stream:
        tensors = [_tensor(name, value, FORMATS[name]) for name, value in values.items()]
        write_gguf(stream, METADATA, tensors, written.append)
    assert sum(written) == sum(tensor.nbytes for tensor in tensors)
    return path


def test_our_reader_reads_it(path: Path, values: dict[str, torch.Tensor]) -> None:
    file = read_gguf(path)
    assert list(file.metadata) == list(METADATA)
    for key, value in METADATA.items():
        read = file.metadata[key]
        if isinstance(value, np.ndarray):
            assert read.dtype == value.dtype and np.array_equal(read, value)
        elif isinstance(value, float) and not isinstance(value, np.float64):
            assert (type(read), read) == (float, np.float32(value))
        elif key != "a.none":
            assert (type(read), read) == (type(value), value)
    for name, value in values.items():
        info = file.tensors[name]
        assert (info.shape, info.format) == (tuple(value.shape), FORMATS[name])
        assert info.offset % ALIGNMENT == 0
    matrix = file.read("matrix")
    assert torch.equal(matrix.data, quantize(values["matrix"], formats.FORMATS["Q4_K"]).data)
    assert torch.equal(file.read("experts"), values["experts"].bfloat16())
    assert torch.equal(file.read("odd"), values["odd"])


def test_the_gguf_package_reads_it(path: Path, values: dict[str, torch.Tensor]) -> None:
    reader = gguf.GGUFReader(path)
    for key, value in METADATA.items():
        read = reader.get_field(key).contents()
        if isinstance(value, list | np.ndarray):
            assert list(read) == list(value)
        else:
            assert read == (np.float32(value) if type(value) is float else value)
    kinds = {key.removeprefix("a."): reader.get_field(key).types[0].name for key in METADATA}
    expected = {
        "count": "UINT32", "large": "INT64", "negative": "INT32", "huge": "UINT64",
        "number": "FLOAT32", "infinite": "FLOAT32", "denormal": "FLOAT32",
        "exact": "FLOAT64", "enormous": "FLOAT64", "minute": "FLOAT64",
    }  # fmt: skip
    assert {key: kinds[key] for key in expected} == expected
    assert [tensor.name for tensor in reader.tensors] == list(values)
    for tensor in reader.tensors:
        value = values[tensor.name]
        assert tensor.tensor_type.name == FORMATS[tensor.name]
        assert tuple(tensor.shape.tolist()) == tuple(value.shape[::-1])
        back = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        assert (back.view(value.shape) - value).abs().max() < 0.3


@pytest.mark.parametrize("value", [1e300, -1e300, 1e-300])
def test_a_float_that_float32_cannot_hold_stays(tmp_path: Path, value: float) -> None:
    with (tmp_path / "x.gguf").open("xb") as stream:
        write_gguf(stream, {"a.key": value}, [])
    assert read_gguf(tmp_path / "x.gguf").metadata == {"a.key": value}


def test_what_gguf_cannot_hold_is_named(tmp_path: Path) -> None:
    with (tmp_path / "x").open("xb") as stream, pytest.raises(TypeError, match=r"a\.key: .*dict"):
        write_gguf(stream, {"a.key": {}}, [])
