"""Checkpoints in several GGUF files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.support.gguf_files import gguf_config, random_state, write_gguf

from sfumato.model.families import open_checkpoint
from sfumato.weights.checkpoint import fingerprint, locate
from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.gguf import part_names, read_gguf
from sfumato.weights.files.gguf import write_gguf as write
from sfumato.weights.files.tensorfile import TensorFile, TensorStream

CONFIG = gguf_config()


def divided(folder: Path, wrong: Mapping[str, int] = {}) -> list[Path]:
    """One file, and the parts that gguf-split makes of it; `wrong` is what the second part says."""
    single = folder / "whole.gguf"
    write_gguf(single, random_state(CONFIG), CONFIG)
    file = read_gguf(single)
    names = list(file.tensors)
    paths = [folder / "parts" / name for name in part_names("m-00001-of-00003.gguf")]
    paths[0].parent.mkdir()
    for number, path in enumerate(paths):
        own = names[number::3]
        numbers = {"split.no": number, "split.count": 3, "split.tensors.count": len(names)}
        if number == 1:
            numbers |= {f"split.{key}": value for key, value in wrong.items()}
        metadata = (dict(file.metadata) if number == 0 else {}) | numbers
        with path.open("wb") as stream:
            write(stream, metadata, [stored(file, name) for name in own])
    return paths


def stored(file: TensorFile, name: str) -> TensorStream:
    return TensorStream.of(name, file.read(name), file.tensors[name].format)


def test_parts_hold_what_the_one_file_holds(tmp_path: Path) -> None:
    paths = divided(tmp_path)
    one = open_checkpoint(tmp_path / "whole.gguf")
    for given in (paths[0], paths[2], paths[0].parent):
        parts = open_checkpoint(given)
        assert parts.metadata.keys() >= one.metadata.keys()
        assert parts.tensors.keys() == one.tensors.keys()
        for name in one.tensors:
            assert torch.equal(_bytes(parts.read(name)), _bytes(one.read(name)))
    assert fingerprint(open_checkpoint(paths[0])) == fingerprint(open_checkpoint(paths[1]))


def _bytes(value: object) -> torch.Tensor:
    data = value if isinstance(value, torch.Tensor) else value.data  # type: ignore[attr-defined]
    return data.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"no": 2}, "00002-of-00003.gguf: split.no: is 2, and .* it is 1; download all parts"),
        ({"count": 4}, "split.count: is 4, and .* it is 3"),
    ],
)
def test_parts_of_different_files_are_refused(
    tmp_path: Path, wrong: dict[str, int], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(divided(tmp_path, wrong)[0])


@pytest.mark.parametrize("numbers", [{"split.count": 0}, {"split.count": 1, "split.no": 0}])
def test_a_file_that_was_merged_is_one_file(tmp_path: Path, numbers: dict[str, int]) -> None:
    divided(tmp_path)
    file = read_gguf(tmp_path / "whole.gguf")
    with (tmp_path / "merged.gguf").open("wb") as stream:
        write(stream, dict(file.metadata) | numbers, [stored(file, name) for name in file.tensors])
    merged = open_checkpoint(tmp_path / "merged.gguf")
    assert len(merged.tensors) == len(open_checkpoint(tmp_path / "whole.gguf").tensors)


def test_an_absent_part_is_named(tmp_path: Path) -> None:
    paths = divided(tmp_path)
    paths[1].unlink()
    for given in (paths[0], paths[0].parent):
        with pytest.raises(CheckpointError, match=r"3 parts, of which 1 are absent \(m-00002-of"):
            locate(given)


def test_a_name_of_many_parts_costs_nothing(tmp_path: Path) -> None:
    for name in ("m-00001-of-99999.gguf", "m-00000-of-00002.gguf", "m-00003-of-00002.gguf"):
        path = tmp_path / name
        path.write_bytes(b"GGUF")
        start = time.perf_counter()
        with pytest.raises(CheckpointError, match=r"numbered from 1, .* at most 512"):
            locate(path)
        assert time.perf_counter() - start < 1
