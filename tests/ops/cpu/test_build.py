"""The build: what a wheel holds, an installation without a compiler, and the fuzz program."""

from __future__ import annotations

import importlib
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tests.ops.cpu.forced import runs

from sfumato.ops.cpu import library

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "src/sfumato/ops/cpu/csrc"
COMPILER = shutil.which("c++")
FUZZ_SEED, MORE_SEEDS = 3, range(1, 21)
ROUNDS, MORE_ROUNDS = "12", "60"  # of a seed

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
@pytest.mark.skipif(library.kernels is None, reason=library.reason)
def test_a_build_for_this_machine_has_the_level_that_it_chooses(tmp_path: Path) -> None:
    """And the others are left out, which asking for one says; their files are not compiled."""
    _, wheel = build(tmp_path, SFUMATO_LEVELS="native")
    path = Path(zipfile.ZipFile(wheel).extract("sfumato/ops/cpu/_kernels.so", tmp_path))
    assert path.stat().st_size < 0.7 * library.LIBRARY.stat().st_size
    chosen, best = library.choose(None, path)[0], library.choose(None)[0]
    assert chosen and best and (chosen.isa, chosen.bf16) == (best.isa, best.bf16)
    left_out = [n for n, _ in enumerate(library.ISAS) if chosen.code.sf_isa_available(n) == 2]
    for level in left_out:
        with pytest.raises(ValueError, match="left out of this library"):
            library.choose(library.ISAS[level], path)
        assert chosen.code.sf_rms_norm(level, None, 0, 1, 1, None, 0, 0.0, None, 1) < 0


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


def test_levels_have_two_values_and_a_failure_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("setuptools"), "setup", lambda **how: None)
    script = runpy.run_path(str(ROOT / "setup.py"))
    for given, read in (("", "all"), ("all", "all"), ("native", "native")):
        monkeypatch.setenv("SFUMATO_LEVELS", given)
        assert script["levels"]() == read
    monkeypatch.setenv("SFUMATO_LEVELS", "avx2")
    with pytest.raises(SystemExit, match="SFUMATO_LEVELS: 'avx2' is neither all nor native"):
        script["levels"]()
    failed = subprocess.CalledProcessError(1, ["/usr/bin/g++", "-I/a", "-c", "x.cpp"])
    assert script["reason"](failed) == ("Command '/usr/bin/g++' returned non-zero exit status 1.")


def test_wheels_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make wheels` refuses a wheel that lacks something, brings an OpenMP or is too large."""
    monkeypatch.syspath_prepend(str(ROOT / "deploy"))
    wheels = importlib.import_module("wheels")
    wheel = tmp_path / "sfumato-1-py3-none-win_amd64.whl"

    def write(code: bytes, *names: str, linked: str = "[{}]") -> None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("sfumato/ops/cpu/_kernels.dll", code)
            archive.writestr(
                "sfumato-1.dist-info/sboms/sfumato.cdx.json", f'{{"components": {linked}}}'
            )
            for name in names:
                archive.writestr(name, "")

    models, licence = wheels.MODELS, "sfumato-1.dist-info/licenses/LICENSE"
    write(b"MZ", *models, licence)
    assert "bytes" in wheels.check(wheel, "win_amd64")
    for code, names, linked, fault in (
        (b"\x7fELF", (*models, licence), "[{}]", "another platform"),
        (b"MZ libiomp5md.dll", (*models, licence), "[{}]", "OpenMP"),
        (b"MZ", (models[0], licence), "[{}]", "model"),
        (b"MZ", models, "[{}]", "licence"),
        (b"MZ", (*models, licence), "[]", "materials"),
        (b"MZ" + os.urandom(wheels.LIMIT), (*models, licence), "[{}]", "more than"),
    ):
        write(code, *names, linked=linked)
        with pytest.raises(SystemExit, match=fault):
            wheels.check(wheel, "win_amd64")


@needs_compiler
@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fuzz(tmp_path: Path, everywhere: bool) -> None:
    """Every function with arguments of all sorts, under the address sanitizer and the
    undefined-behaviour sanitizer.

    everywhere: all levels, both of them in the AVX files too, and with more seeds. Else the plain
    level, which has the scalar code of all and both sanitizers, and the widest of AVX that runs.
    """
    wide = [level for level in ("avx2", "avx512") if runs(level)][-1:]
    left_out = set() if everywhere else {"avx2", "avx_vnni", "avx512", "amx"} - {*wide}
    # AMX's tiles by plain C++, so that they run where AVX-512 does.
    flags = (
        "-std=c++17",
        "-g1",
        "-ffp-contract=off",
        "-fno-trapping-math",
        "-w",
        "-DSF_EMULATE_TILES",
    )
    flags += (f"-I{CSRC}", *(f"-DSF_NO_{level.upper()}" for level in left_out))
    both = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    # Nearly all of the time goes to the compiler: -Og takes half of the time of -O1, and -O0 half
    # of that, but for many seeds too long to run; of the program itself, whose plain loops take
    # longer than the operations, nothing is checked but the memory that it gives to them.
    fuzz = Path(__file__).with_name("csrc") / "fuzz.cpp"
    parts = []
    for source in sorted(CSRC.glob("*.cpp")):
        if source.stem.removesuffix("_bf16") in left_out:
            continue
        address_only = source.stem.startswith("avx") and not everywhere
        how = ("-fsanitize=address",) if address_only else both
        parts.append((source, "-Og" if everywhere else "-O0", *how))
    for source, *how in (*parts, (fuzz, "-O2" if everywhere else "-O1")):
        to = tmp_path / f"{source.stem}.o"
        compile_ = [str(COMPILER), *flags, *how, "-c", source, "-o", to]
        subprocess.run(compile_, check=True, timeout=120)
    program = tmp_path / "fuzz"
    link = [str(COMPILER), "-fopenmp", *both, *tmp_path.glob("*.o"), "-o", program]
    subprocess.run(link, check=True, timeout=60)
    for seed in MORE_SEEDS if everywhere else (FUZZ_SEED,):
        done = subprocess.run(
            [program, str(seed), MORE_ROUNDS if everywhere else ROUNDS],
            env=os.environ | {"OMP_WAIT_POLICY": "passive"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"seed {seed}: " + done.stdout[-2000:] + done.stderr[-4000:]
