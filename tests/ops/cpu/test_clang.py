"""The operations compiled by clang: the fuzz program, and the tests of the operations.

The fuzz program's threads are those of LLVM's OpenMP runtime. Clang knows fewer names of a
processor's features than GCC does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.ops.cpu.test_build import CSRC

ROOT = Path(__file__).resolve().parents[3]
COMPILER = shutil.which("clang++")
SEEDS = {"first": range(1, 2), "others": range(2, 21)}
"""`.ci/run` takes the first one, where there is clang."""

PASSIVE = os.environ | {"OMP_WAIT_POLICY": "passive"}
"""Threads that wait leave the processor to other programs."""

OPERATIONS = (
    *("kernels", "panels", "columns", "row_operations"),
    *("attention_and_softmax", "narrow_keys"),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        COMPILER is None or sys.platform != "linux",
        reason="needs clang++ and its OpenMP on Linux; on Debian: apt install clang libomp-dev",
    ),
]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The sources of the library, compiled; the fuzz program is the last."""
    folder = tmp_path_factory.mktemp("clang")
    empty = folder / "empty.cpp"
    empty.write_text(
        'extern "C" int omp_get_max_threads();\nint main() { return !omp_get_max_threads(); }\n'
    )
    tried = [str(COMPILER), "-fopenmp", empty, "-o", folder / "empty"]
    if subprocess.run(tried, capture_output=True, timeout=60).returncode:
        pytest.skip(f"{COMPILER} finds no OpenMP; on Debian: apt install libomp-dev")
    fuzz = Path(__file__).with_name("csrc") / "fuzz.cpp"

    def compile_(source: Path) -> Path:
        to = folder / f"{source.stem}.o"
        flags = (
            "-std=c++17",
            "-O2",
            "-g0",
            "-fPIC",
            "-ffp-contract=off",
            "-fno-trapping-math",
            "-w",
        )
        command = [str(COMPILER), *flags, f"-I{CSRC}", "-c", source, "-o", to]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return to

    with ThreadPoolExecutor() as pool:
        return list(pool.map(compile_, (*sorted(CSRC.glob("*.cpp")), fuzz)))


def _link(objects: list[Path], to: Path, flag: str) -> Path:
    subprocess.run([str(COMPILER), flag, *objects, "-o", to], check=True)
    return to


@pytest.mark.parametrize("which", SEEDS)
def test_fuzz(objects: list[Path], which: str) -> None:
    program = _link(objects, objects[-1].with_name("fuzz"), "-fopenmp")
    for seed in SEEDS[which]:
        done = subprocess.run(
            [program, str(seed)], env=PASSIVE, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"seed {seed}: {done.stderr}"
        assert "last level: " in done.stdout


def test_operations(objects: list[Path], tmp_path: Path) -> None:
    """In a process whose package is a tree of links to this one, but for the library."""
    source, package = ROOT / "src" / "sfumato", tmp_path / "src" / "sfumato"
    ignored = shutil.ignore_patterns("_kernels.so", "__pycache__")
    shutil.copytree(source, package, ignore=ignored, copy_function=os.symlink)
    library = _link(objects[:-1], package / "ops" / "cpu" / "_kernels.so", "-shared")
    tests = [f"tests/ops/cpu/test_{name}.py" for name in OPERATIONS]
    environment = PASSIVE | {"PYTHONPATH": os.pathsep.join((str(package.parent), str(ROOT)))}
    used = "from sfumato.ops.cpu import library; print(library.LIBRARY, library.kernels is None)"
    shown = subprocess.run(
        [sys.executable, "-c", used], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == [str(library), "False"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stdout[-3000:]
