"""A mapped file that is truncated: one line with its name, and what other handlers still get."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ops.cpu.forced import compiled

from sfumato.ops.cpu import library
from sfumato.weights.files.tensorfile import map_file

SRC = Path(__file__).resolve().parents[3] / "src"

FAULT = """
import faulthandler, os, signal, sys
from pathlib import Path
import numpy
from sfumato.ops.cpu.library import watch
from sfumato.weights.files.tensorfile import map_file

model, other, order, broken = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
maps = {{path: map_file(path) for path in (model, other)}}
if order == "before":
    faulthandler.enable()
address = numpy.frombuffer(maps[model], dtype=numpy.uint8).ctypes.data
watch(maps[model], address, len(maps[model]), model)
if order == "after":
    faulthandler.enable()
path = Path(broken)
os.truncate(path, 1)
{then}
"""


def _fault(
    folder: Path, order: str = "", broken: str = "model", then: str = "maps[path][-1]"
) -> tuple[int, str]:
    for name in ("model.gguf", "other.bin"):
        (folder / name).write_bytes(bytes(4 * mmap.PAGESIZE))
    paths = [str(folder / "model.gguf"), str(folder / "other.bin")]
    done = subprocess.run(
        [sys.executable, "-c", FAULT.format(then=then), *paths, order, paths[broken == "other"]],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


@compiled
@pytest.mark.parametrize("order", ["", "before", "after"])
def test_the_file_is_named_in_one_line(tmp_path: Path, order: str) -> None:
    code, stderr = _fault(tmp_path, order)
    report, line = stderr[: stderr.rfind("sfumato: ")], stderr[stderr.rfind("sfumato: ") :]
    assert code == library.EXIT_CODE
    assert line.startswith(f"sfumato: error: {tmp_path}/model.gguf: a part of this file cannot be ")
    assert line.endswith("start again\n") and line.count("\n") == 1
    assert ("Fatal Python error: Bus error" in report) == (order == "after")


@compiled
@pytest.mark.parametrize("order", ["", "before", "after"])
def test_a_fault_elsewhere_is_left_to_others(tmp_path: Path, order: str) -> None:
    code, stderr = _fault(tmp_path, order, "other")
    assert code == -signal.SIGBUS
    assert "sfumato: error" not in stderr
    assert ("Fatal Python error: Bus error" in stderr) == bool(order)


@compiled
@pytest.mark.parametrize("order", ["", "before", "after"])
def test_a_signal_that_is_sent_ends_the_process_as_before(tmp_path: Path, order: str) -> None:
    code, stderr = _fault(tmp_path, order, "other", then="os.kill(os.getpid(), signal.SIGBUS)")
    assert code == -signal.SIGBUS and "sfumato: error" not in stderr


@compiled
def test_a_file_is_watched_for_as_long_as_it_is_mapped(tmp_path: Path) -> None:
    """There is room for a thousand at a time."""
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(mmap.PAGESIZE))
    for _ in range(3000):
        assert library.watch(map_file(path), 4096, 1, path)


def test_without_the_library_nothing_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    library._code.cache_clear()
    try:
        assert not library.watch(object(), 4096, 1, tmp_path)
    finally:
        library._code.cache_clear()
