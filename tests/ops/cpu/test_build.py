"""The build: what a wheel holds, an installation without a compiler, and the fuzz program."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "src/sfumato/ops/cpu/csrc"
COMPILER = shutil.which("c++")
FUZZ_SEED, MORE_SEEDS = 3, range(1, 21)

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def build(tmp_path: Path, from_sdist: bool = False, **environment: str) -> tuple[str, Path]:
    """What pip says, and the wheel that it builds of a copy of the sources, or of the source
    distribution that is made of that copy."""
    pytest.importorskip("setuptools", minversion="77")  # tests download nothing
    project = tmp_path / "project"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "embedded")
    shutil.copytree(ROOT / "src", project / "src", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    if from_sdist:
        code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
        command = [sys.executable, "-c", code, str(tmp_path)]
        subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=120)
        (project,) = tmp_path.glob("*.tar.gz")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"),
            *("--no-cache-dir", "--wheel-dir", str(tmp_path / "dist"), str(project)),
        ],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    return done.stdout + done.stderr, wheel


@pytest.mark.slow
@needs_compiler
def test_a_wheel_has_the_library_and_none_of_its_sources(tmp_path: Path) -> None:
    _, wheel = build(tmp_path)
    platform, abi, python = wheel.stem.split("-")[::-1][:3]
    assert (python, abi) == ("py3", "none") and platform != "any"
    names = zipfile.ZipFile(wheel).namelist()
    assert "sfumato/ops/cpu/_kernels.so" in names
    assert not [name for name in names if name.endswith((".cpp", ".h", ".o")) or "csrc" in name]


@pytest.mark.slow
@pytest.mark.parametrize("from_sdist", [False, True])
def test_without_a_compiler_it_installs_and_torch_serves(tmp_path: Path, from_sdist: bool) -> None:
    """In one line of what pip says with -v, and in the reason that `sfumato doctor` shows."""
    output, wheel = build(tmp_path, from_sdist, CC="false", CXX="false")
    lost = [line for line in output.splitlines() if "without the compiled CPU operations" in line]
    assert len(lost) == 1 and "torch serves on the CPU, several times slower" in lost[0]
    if from_sdist:  # which has all that a compiler would have needed
        (sdist,) = tmp_path.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            packed = {Path(name).name for name in archive.getnames() if "/csrc/" in name}
        assert packed == {path.name for path in CSRC.iterdir()}
    place = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(place)
    assert not list(place.rglob("*.so"))
    code = "from sfumato import ops; print(ops.__file__); print(ops.backend); print(ops.reason)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(place), "SFUMATO_ISA": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    where, backend, reason = done.stdout.splitlines()
    assert where.startswith(str(place)) and backend == "torch"
    assert "no C++ compiler" in reason


def test_wheels_of_every_platform() -> None:
    """cibuildwheel's configuration: the images, and a wheel that brings no second OpenMP and is
    tried where there is none but torch's."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    # The library has no symbol of Python's: a wheel of one Python serves all.
    assert tool["build"].startswith("cp3") and "musllinux" in tool["skip"]
    linux, mac = tool["linux"], tool["macos"]
    for machine in ("x86_64", "aarch64"):
        assert linux[f"manylinux-{machine}-image"] == "manylinux_2_28"
    repair = linux["repair-wheel-command"].split()
    assert repair[:2] == ["auditwheel", "repair"] and "{wheel}" in repair
    assert repair[repair.index("--exclude") + 1] == "libgomp.so.1"
    assert "rpm -e --nodeps libgomp" in linux["before-test"]
    assert mac["archs"] == "arm64" and tool["archs"] == "native"
    (command,) = tool["test-command"]
    python, code = shlex.split(command)[1:]
    assert python == "-c"
    # In a process where torch serves, the command fails as it must.
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"SFUMATO_ISA": "torch", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "AssertionError" in done.stderr


@needs_compiler
@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fuzz(tmp_path: Path, everywhere: bool) -> None:
    """Every function with arguments of all sorts, under the address sanitizer and the
    undefined-behaviour sanitizer.

    everywhere: both of them in the AVX files too, which takes half of the whole time, and with more
    seeds. Their scalar code is that of portable.cpp, which always has both.
    """
    # AMX's tiles by plain C++, so that they run where AVX-512 does.
    flags = (
        "-std=c++17",
        "-g1",
        "-ffp-contract=off",
        "-fno-trapping-math",
        "-w",
        "-DSF_EMULATE_TILES",
    )
    flags += (f"-I{CSRC}",)
    both = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    # -Og compiles twice as fast as -O1; of the program itself, whose plain loops take longer than
    # the operations, nothing is checked but the memory that it gives to them.
    fuzz = Path(__file__).with_name("csrc") / "fuzz.cpp"
    parts = []
    for source in sorted(CSRC.glob("*.cpp")):
        address_only = source.stem.startswith("avx") and not everywhere
        parts.append((source, "-Og", *(("-fsanitize=address",) if address_only else both)))
    for source, *how in (*parts, (fuzz, "-O2")):
        to = tmp_path / f"{source.stem}.o"
        compile_ = [str(COMPILER), *flags, *how, "-c", source, "-o", to]
        subprocess.run(compile_, check=True, timeout=120)
    program = tmp_path / "fuzz"
    link = [str(COMPILER), "-fopenmp", *both, *tmp_path.glob("*.o"), "-o", program]
    subprocess.run(link, check=True, timeout=60)
    for seed in MORE_SEEDS if everywhere else (FUZZ_SEED,):
        done = subprocess.run(
            [program, str(seed)],
            env=os.environ | {"OMP_WAIT_POLICY": "passive"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"seed {seed}: " + done.stdout[-2000:] + done.stderr[-4000:]
