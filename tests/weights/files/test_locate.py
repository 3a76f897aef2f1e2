"""Which files a path stands for."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sfumato.model.families import open_checkpoint
from sfumato.weights.checkpoint import INDEX, locate
from sfumato.weights.errors import CheckpointError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"x")


def index(folder: Path, value: Any) -> None:
    (folder / INDEX).write_text(json.dumps(value))


def refused(path: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        locate(path)
    assert str(path) in str(caught.value)


def test_single_files(tmp_path: Path) -> None:
    touch(tmp_path, "a.gguf", "b.safetensors")
    assert locate(tmp_path / "a.gguf") == ("gguf", [tmp_path / "a.gguf"])
    assert locate(tmp_path / "b.safetensors") == ("safetensors", [tmp_path / "b.safetensors"])


def test_folder_prefers_index_then_safetensors_then_gguf(tmp_path: Path) -> None:
    touch(tmp_path, "a.gguf", "mmproj-F16.gguf", "model.bin", "README.md")
    assert locate(tmp_path) == ("gguf", [tmp_path / "a.gguf"])
    touch(tmp_path, "other.safetensors")
    assert locate(tmp_path) == ("safetensors", [tmp_path / "other.safetensors"])
    touch(tmp_path, "model.safetensors")
    assert locate(tmp_path) == ("safetensors", [tmp_path / "model.safetensors"])
    touch(tmp_path, "one.safetensors", "two.safetensors")
    weights = {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    index(tmp_path, {"weight_map": weights})
    shards = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    assert locate(tmp_path) == locate(tmp_path / INDEX) == ("safetensors", shards)


def test_what_is_passed_over_is_said_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    touch(tmp_path, "a.gguf", "README.md", "model.bin")
    locate(tmp_path)
    assert not caplog.records  # nothing else could have been meant
    touch(tmp_path, "mmproj-F16.gguf", "model.safetensors")
    locate(tmp_path)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: reads model.safetensors and passes over a.gguf, mmproj-F16.gguf; "
        "give a file's path to choose another"
    ]
    index(tmp_path, {"weight_map": {"a": "model.safetensors"}})
    (tmp_path / "a.gguf").unlink()
    (tmp_path / "mmproj-F16.gguf").unlink()
    caplog.clear()
    locate(tmp_path)
    assert not caplog.records


def test_an_empty_path_is_not_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "a.gguf")
    monkeypatch.chdir(tmp_path)
    assert locate(".") == ("gguf", [Path("a.gguf")])
    for enter in (locate, open_checkpoint):
        with pytest.raises(CheckpointError, match="path: is empty; give a weight file"):
            enter("")


def test_several_are_listed(tmp_path: Path) -> None:
    touch(tmp_path, "a.gguf", "b.gguf")
    refused(tmp_path, r"2 GGUF files \(a.gguf, b.gguf\); give the path of one")
    touch(tmp_path, *(f"{n}.safetensors" for n in range(10, 30)))
    refused(
        tmp_path,
        r"20 safetensors files \(10.safetensors, .*17.safetensors and 12 more\) and no model",
    )


def test_who_has_no_model_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist.*`sfumato pull` lists models"):
        locate(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match="`sfumato pull hf:a/b` does so and prints the path"):
        locate("hf:a/b")


def test_nothing_to_read(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "does not exist")
    refused(tmp_path, "holds no weights")
    touch(tmp_path, "mmproj.gguf", "config.json")
    refused(tmp_path, "holds no weights")
    touch(tmp_path, "pytorch_model.bin")
    refused(tmp_path, "pickles only .pytorch_model.bin.*convert them to safetensors")
    refused(tmp_path / "config.json", "neither .gguf nor .safetensors")
    refused(tmp_path / ("x" * 5000), "cannot be opened|does not exist")


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt", "pkl", "PT"])
def test_pickles_are_refused_by_name(tmp_path: Path, suffix: str) -> None:
    touch(tmp_path, f"model.{suffix}")
    refused(tmp_path / f"model.{suffix}", "is a pickle.*convert it to safetensors")


def test_index_faults(tmp_path: Path) -> None:
    for value in ({}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": None}):
        index(tmp_path, value)
        refused(tmp_path, "weight_map: is not a map")
    for name in ("../model.safetensors", "/etc/passwd", "a/b.safetensors", "", ".", 3, None, ["a"]):
        index(tmp_path, {"weight_map": {"a": name}})
        refused(tmp_path, "weight_map: .* is not the name of a file beside the index")
    (tmp_path / INDEX).write_text("[]")
    refused(tmp_path, "list instead of an object")
    (tmp_path / INDEX).write_text("{")
    refused(tmp_path, "is not JSON")


def test_absent_shards_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "one.safetensors")
    index(tmp_path, {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": ".."}})
    refused(tmp_path, r"2 of 3 shards are absent \(.*two.safetensors\); download them")
