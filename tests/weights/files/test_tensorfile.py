"""Views over a mapped file."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path

import pytest
import torch

from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.tensorfile import TensorFile, TensorInfo, map_file
from sfumato.weights.formats import QuantizedTensor


def file_with(path: Path, *infos: TensorInfo) -> TensorFile:
    path.write_bytes(bytes(range(256)) * 64)
    return TensorFile(path, {}, {info.name: info for info in infos}, map_file(path))


def test_tensors_are_views_that_outlive_the_file_object(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    plain = TensorInfo("plain", (2, 8), "BF16", 32, path, 64)
    packed = TensorInfo("packed", (3, 2, 64), "Q8_0", 3 * 2 * 68, path, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = file_with(path, plain, packed)
        one, two = file.read("plain"), file.read("packed")
    assert isinstance(one, torch.Tensor) and isinstance(two, QuantizedTensor)
    assert two.data.data_ptr() - one.data_ptr() == 64, "both lie in the one mapping"
    assert (one.shape, one.dtype) == ((2, 8), torch.bfloat16)
    assert (two.shape, two.data.shape) == ((3, 2, 64), (3, 2, 68))
    expected = bytes(range(64, 96))
    del file
    gc.collect()
    assert bytes(one.view(torch.uint8).flatten().tolist()) == expected
    assert two.data[0, 0, :3].tolist() == [128, 129, 130]


def test_misaligned_data_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    file = file_with(path, TensorInfo("t", (2,), "F32", 8, path, 3))
    read = file.read("t")
    assert isinstance(read, torch.Tensor)
    assert read.view(torch.uint8).tolist() == list(range(3, 11))


def test_unsupported_formats_are_named(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    file = file_with(path, TensorInfo("t", (256,), "IQ2_XXS", 66, path, 0))
    with pytest.raises(CheckpointError, match=r"'t' is stored as IQ2_XXS.*use a file with .*Q6_K"):
        file.read("t")


def test_special_files_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        map_file(tmp_path / "pipe")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").write_bytes(b"x")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied\)"):
        map_file(tmp_path / "weights")
