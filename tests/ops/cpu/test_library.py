"""Which library is chosen, and the message where it cannot be used."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.ops.cpu.forced import compiled, each_isa, forced, runs

import sfumato
from sfumato import ops
from sfumato.ops.cpu import library
from sfumato.ops.cpu.library import (
    ISAS,
    LIBRARY,
    ONLY_WHEN_ASKED,
    Kernels,
    choose,
    describe,
)

NAMES = "portable, avx2, avx_vnni, avx512_vnni, avx512, amx, neon, i8mm, torch"


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_with_a_compiler_there_is_a_library() -> None:
    assert LIBRARY.exists(), "the C++ did not compile: `pip install -v -e .` shows why"


@compiled
def test_the_best_is_chosen() -> None:
    kernels, reason = choose(None)
    assert kernels is not None and "best" in reason
    runs = {isa: kernels.code.sf_isa_available(level) for level, isa in enumerate(ISAS)}
    able = [isa for isa, answer in runs.items() if answer == 1]
    assert able[0] == "portable"
    assert 2 not in runs.values(), "levels are left out, whose tests are skipped: make test has all"
    assert kernels.isa == [isa for isa in able if isa not in ONLY_WHEN_ASKED][-1]


def test_the_build_knows_the_levels_of_x86() -> None:
    source = (Path(__file__).resolve().parents[3] / "setup.py").read_text(encoding="utf-8")
    levels = ast.literal_eval(re.findall(r"^LEVELS = (.*)$", source, re.MULTILINE)[0])
    # avx512_vnni is in the file of avx512; ARM's are compiled elsewhere.
    rest = ("avx512_vnni", "neon", "i8mm")
    assert levels == {ISAS.index(name): name for name in ISAS if name not in rest}


@compiled
def test_plain_code_is_only_taken_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slower than torch, also where it is the last of those that run."""
    for isas in (("portable",), ("portable", "portable")):
        monkeypatch.setattr(library, "ISAS", isas)
        kernels, reason = choose(None)
        assert kernels is None and "quicker here" in reason
    kernels, _ = choose("portable")
    assert kernels is not None and kernels.isa == "portable"


@compiled
def test_one_thread_is_only_taken_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where torch has no OpenMP, or another one; a copy of the library has threads of its own."""
    alone = Path(shutil.copy(LIBRARY, tmp_path))
    monkeypatch.setattr(library, "RUNTIMES", (("GOMP_parallel", "GOMP_of_none"),))
    kernels, reason = choose(None, alone)
    assert kernels is None and "torch has no OpenMP runtime" in reason
    kernels, _ = choose("avx2" if runs("avx2") else "portable", alone)
    assert kernels is not None and not kernels.code.sf_has_threads()
    monkeypatch.setattr(library, "kernels", kernels)
    assert describe()[0].endswith("without torch's OpenMP: one thread")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x, weight = torch.randn(40, 64), torch.randn(64)
    serial = ops.rms_norm(x, weight, 1e-6)
    monkeypatch.setattr(library, "kernels", choose(kernels.isa)[0])
    assert torch.equal(ops.rms_norm(x, weight, 1e-6), serial)


@compiled
def test_threads_are_those_of_torch_and_no_others() -> None:
    """The library names no OpenMP, and a product on several threads starts none that torch has
    not."""
    named = LIBRARY.read_bytes()
    assert not any(name in named for name in (b"libgomp", b"libomp", b"libiomp", b"GOMP_parallel"))
    threads = run(
        "",
        "import torch, os; torch.set_num_threads(3)\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "from sfumato import ops\n"
        "x = torch.randn(512, 512); torch.set_num_threads(3); x @ x; torch.exp(x)\n"
        "before = count(); ops.rms_norm(x, x[0], 1e-6); print(before, count())",
    )
    if sys.platform == "linux":
        before, after = threads.stdout.split()
        assert before == after, threads.stderr


def test_torch_can_be_asked_for() -> None:
    assert choose("torch") == (None, "SFUMATO_ISA asks for it")


@each_isa
def test_each_can_be_asked_for(isa: str) -> None:
    kernels, reason = choose(isa)
    assert kernels is not None and kernels.isa == isa and ISAS[kernels.level] == isa
    assert reason == "SFUMATO_ISA asks for it"
    with forced(isa):
        assert describe()[0].startswith(f"compiled, {isa}")


def test_a_name_that_there_is_not() -> None:
    message = f"SFUMATO_ISA: 'sse9' is none of {NAMES}"
    with pytest.raises(ValueError, match=message):
        choose("sse9")


def test_a_missing_library(tmp_path: Path) -> None:
    kernels, reason = choose(None, tmp_path / "none.so")
    assert kernels is None and "no C++ compiler" in reason
    with pytest.raises(ValueError, match="SFUMATO_ISA: avx2 cannot be had: the compiled op"):
        choose("avx2", tmp_path / "none.so")


def test_a_library_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "broken.so"
    path.write_bytes(b"no library")
    kernels, reason = choose(None, path)
    assert kernels is None and "broken.so" in reason


@compiled
def test_a_library_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "VERSION", -1)
    kernels, reason = choose(None)
    assert kernels is None and "another version" in reason


@compiled
def test_what_the_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ISAS", (*ISAS, "avx9000"))
    with pytest.raises(ValueError, match="avx9000 does not run here, but portable"):
        choose("avx9000")


@compiled
def test_a_refusal_is_an_error() -> None:
    with pytest.raises(ValueError, match="sf_pack: the compiled library refuses"):
        library.run("sf_pack", 2, None, 1, 16, 32, None)


def test_threads_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    code: Any = SimpleNamespace(sf_pack=lambda *given: 0 if given == (0, 1, 2, 7) else -1)
    Kernels(code, "portable").run("sf_pack", 1, 2)


def test_error_codes() -> None:
    """Those of the header: the code for no memory differs from the others."""
    header = LIBRARY.with_name("csrc").joinpath("sfumato.h").read_text()
    codes = {name: int(code) for name, code in re.findall(r"\b(SF_\w+) = (-\d+)", header)}
    assert set(codes) == {"SF_BAD_ARGUMENT", "SF_NO_MEMORY", "SF_UNSUPPORTED"}
    for name, number in codes.items():
        code: Any = SimpleNamespace(sf_linear=lambda *_, number=number: number)
        raised = MemoryError if name == "SF_NO_MEMORY" else ValueError
        with pytest.raises(raised, match="sf_linear: "):
            Kernels(code, "portable").run("sf_linear", 1)


def run(isa: str, code: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(sfumato.__file__).parents[1])
    environment = os.environ | {"SFUMATO_ISA": isa, "PYTHONPATH": source}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )


def test_the_environment_forces() -> None:
    done = run("torch", "from sfumato import ops; print(ops.backend, ops.reason)")
    assert (done.returncode, done.stdout) == (0, "torch SFUMATO_ISA asks for it\n"), done.stderr


def test_a_bad_value_is_one_line_on_the_command_line() -> None:
    done = run("sse9", "from sfumato.cli import main; raise SystemExit(main(['doctor']))")
    assert done.returncode == 2
    assert done.stderr == (f"sfumato: error: SFUMATO_ISA: 'sse9' is none of {NAMES}\n")


def test_the_choice_is_told() -> None:
    assert (ops.backend, ops.reason) == describe()
    best = choose(os.environ.get("SFUMATO_ISA") or None)[0]
    assert ops.backend.startswith(f"compiled, {best.isa}" if best else "torch")
