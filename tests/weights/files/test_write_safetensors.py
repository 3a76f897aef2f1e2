from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sfumato.weights.checkpoint import INDEX, locate
from sfumato.weights.files.jsonfile import read_object
from sfumato.weights.files.safetensors import read_safetensors, write_safetensors
from sfumato.weights.files.tensorfile import TensorStream, recoded

VALUES = {f"t{i}": torch.randn(i + 1, 7) for i in range(6)}


def _tensors(format: str) -> list[TensorStream]:
    return [
        TensorStream(name, tuple(value.shape), format, lambda value=value: recoded(value, format))
        for name, value in VALUES.items()
    ]


@pytest.mark.parametrize(
    ("format", "dtype"),
    [("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16)],
)
def test_one_file(tmp_path: Path, format: str, dtype: torch.dtype) -> None:
    written: list[int] = []
    write_safetensors(tmp_path, _tensors(format), written.append)
    assert sum(written) == sum(tensor.nbytes for tensor in _tensors(format))
    assert {item.name for item in tmp_path.iterdir()} == {"model.safetensors"}
    loaded = load_file(tmp_path / "model.safetensors")
    file = read_safetensors(tmp_path / "model.safetensors")
    assert list(file.tensors) == list(VALUES)
    for name, value in VALUES.items():
        assert torch.equal(loaded[name], value.to(dtype))
        assert torch.equal(file.read(name), value.to(dtype))


def test_shards(tmp_path: Path) -> None:
    """As many tensors in a file as its limit takes, and one alone that is larger."""
    write_safetensors(tmp_path, _tensors("F32"), shard=28 * 6)
    index = read_object(tmp_path / INDEX)
    groups = [["t0", "t1", "t2"], ["t3"], ["t4"], ["t5"]]
    names = [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]
    assert index["weight_map"] == {
        t: name for name, group in zip(names, groups, strict=True) for t in group
    }
    assert index["metadata"]["total_size"] == 28 * 21
    kind, files = locate(tmp_path)
    assert (kind, [file.name for file in files]) == ("safetensors", names)
    loaded = {name: value for file in files for name, value in load_file(file).items()}
    assert all(torch.equal(loaded[name], value) for name, value in VALUES.items())
