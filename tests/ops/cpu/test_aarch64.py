"""The operations on ARM: cross-compiled, and the fuzz program run by an emulator."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.ops.cpu.test_build import CSRC

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        COMPILER is None or EMULATOR is None,
        reason="needs aarch64-linux-gnu-g++ and qemu-aarch64; on Debian: "
        "apt install g++-aarch64-linux-gnu qemu-user",
    ),
]

PROCESSORS = {"cortex-a72": "portable", "cortex-a76": "neon", "max": "i8mm"}
"""What qemu emulates, and the last level that such a processor runs."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fuzz program with the library, for ARM."""
    folder = tmp_path_factory.mktemp("aarch64")
    fuzz = Path(__file__).with_name("csrc") / "fuzz.cpp"

    def compile_(source: Path) -> Path:
        to = folder / f"{source.stem}.o"
        flags = (
            "-std=c++17",
            "-O2",
            "-g0",
            "-ffp-contract=off",
            "-fno-trapping-math",
            "-w",
            f"-I{CSRC}",
        )
        subprocess.run([str(COMPILER), *flags, "-c", source, "-o", to], check=True, timeout=600)
        return to

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_, (*sorted(CSRC.glob("*.cpp")), fuzz)))
    done = folder / "fuzz"
    subprocess.run([str(COMPILER), "-static", "-fopenmp", *objects, "-o", done], check=True)
    return done


@pytest.mark.parametrize("processor", PROCESSORS)
def test_fuzz(program: Path, processor: str) -> None:
    for seed in ("1", "2"):
        done = subprocess.run(
            [str(EMULATOR), "-cpu", processor, program, seed],
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr
        assert f"last level: {PROCESSORS[processor]}" in done.stdout
