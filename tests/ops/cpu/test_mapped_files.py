"""A mapped file that is truncated: one line with its name, and what other handlers still get."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.ops.cpu.forced import compiled

from sfumato.ops.cpu import library
from sfumato.weights.files.tensorfile import map_file

SRC = Path(__file__).resolve().parents[3] / "src"

# Each in a process of its own, which begins with all that is imported.
FAULTS = """
import faulthandler, json, os, signal, sys
from pathlib import Path
import numpy
from sfumato.ops.cpu.library import watch
from sfumato.weights.files.tensorfile import map_file

def fault(folder, order, broken):
    model, other = folder / "model.gguf", folder / "other.bin"
    maps = {path: map_file(path) for path in (model, other)}
    if order == "before":
        faulthandler.enable()
    address = numpy.frombuffer(maps[model], dtype=numpy.uint8).ctypes.data
    watch(maps[model], address, len(maps[model]), model)
    if order == "after":
        faulthandler.enable()
    if broken == "sent":
        os.kill(os.getpid(), signal.SIGBUS)
    path = {"model": model, "other": other}[broken]
    os.truncate(path, 1)
    maps[path][-1]

codes = []
for folder, order, broken in json.load(sys.stdin):
    if (child := os.fork()) == 0:
        os.dup2(os.open(f"{folder}/stderr", os.O_WRONLY | os.O_CREAT), 2)
        fault(Path(folder), order, broken)
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""

ORDERS = "", "before", "after"  # when another handler was installed, relative to ours
each_order = pytest.mark.parametrize("order", ORDERS)


@dataclass(frozen=True)
class Ended:
    folder: Path
    code: int
    stderr: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Ended]:
    """How processes ended, by the order of the handlers and what was broken."""
    cases = list(itertools.product(ORDERS, ("model", "other", "sent")))
    folders = [tmp_path_factory.mktemp("mapped") for _ in cases]
    for folder in folders:
        for name in ("model.gguf", "other.bin"):
            (folder / name).write_bytes(bytes(4 * mmap.PAGESIZE))
    done = subprocess.run(
        [sys.executable, "-c", FAULTS],
        input=json.dumps([[str(f), *case] for f, case in zip(folders, cases, strict=True)]),
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return {
        case: Ended(folder, code, (folder / "stderr").read_text())
        for case, folder, code in zip(cases, folders, json.loads(done.stdout), strict=True)
    }


@compiled
@each_order
def test_the_file_is_named_in_one_line(ended: dict[tuple[str, str], Ended], order: str) -> None:
    one = ended[order, "model"]
    at = one.stderr.rfind("sfumato: ")
    report, line = one.stderr[:at], one.stderr[at:]
    assert one.code == library.EXIT_CODE
    assert line.startswith(f"sfumato: error: {one.folder}/model.gguf: a part of this file cannot ")
    assert line.endswith("start again\n") and line.count("\n") == 1
    assert ("Fatal Python error: Bus error" in report) == (order == "after")


@compiled
@each_order
def test_a_fault_elsewhere_is_left_to_others(
    ended: dict[tuple[str, str], Ended], order: str
) -> None:
    one = ended[order, "other"]
    assert one.code == -signal.SIGBUS
    assert "sfumato: error" not in one.stderr
    assert ("Fatal Python error: Bus error" in one.stderr) == bool(order)


@compiled
@each_order
def test_a_signal_that_is_sent_ends_the_process_as_before(
    ended: dict[tuple[str, str], Ended], order: str
) -> None:
    one = ended[order, "sent"]
    assert one.code == -signal.SIGBUS and "sfumato: error" not in one.stderr


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
