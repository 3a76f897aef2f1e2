"""A model file that is truncated while `sfumato serve` has it open, and while a library does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.ops.cpu.forced import compiled
from tests.server.test_serve import ALONE, SRC, Program, wait_until_running

from sfumato.catalog import EMBEDDED
from sfumato.convert import convert


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The embedded model with quantized weights: the blocks of its embedding are used in place."""
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    convert(EMBEDDED, path, "q8_0")
    return path.read_bytes()


def _ended(program: Program) -> str:
    _, stderr = program.process.communicate(timeout=120)
    assert program.process.returncode == 70, stderr
    return stderr


def test_an_idle_server_says_so_and_ends(gguf: bytes, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf)
    program = Program(ALONE, "-m", str(path), "--context", "256")
    try:
        os.truncate(path, 4096)
        last = _ended(program).splitlines()[-1]
    finally:
        program.process.kill()
    assert "the engine has stopped: small.gguf was made shorter while the model is in use" in last
    assert last.endswith("start it again")


@compiled
def test_a_server_at_work_ends_with_the_name_of_the_file(gguf: bytes, tmp_path: Path) -> None:
    """By the check between two steps, or in the middle of one."""
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf)
    program = Program(ALONE, "-m", str(path), "--slots", "1", "--context", "4096")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
    body |= {"max_tokens": 3000}
    answers: list[int] = []

    def ask() -> None:
        try:
            url = f"{program.url}/v1/chat/completions"
            answers.append(httpx.post(url, json=body, timeout=120).status_code)
        except httpx.TransportError:
            answers.append(500)

    thread = threading.Thread(target=ask)
    try:
        thread.start()
        wait_until_running(program)
        os.truncate(path, 4096)
        stderr = _ended(program)
        thread.join(60)
    finally:
        program.process.kill()
    assert "small.gguf" in stderr.splitlines()[-1] and answers == [500]


@compiled
def test_a_library_ends_with_the_name_of_the_file(gguf: bytes, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf)
    code = (
        "import os, sys, sfumato\n"
        "model = sfumato.load(sys.argv[1])\n"
        "assert model.network.files.truncated() is None\n"
        "os.truncate(sys.argv[1], 4096)\n"
        "assert model.network.files.truncated() is not None\n"
        "model.generate('Hi')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (70, "")
    assert done.stderr.startswith(f"sfumato: error: {path}: ") and done.stderr.count("\n") == 1
