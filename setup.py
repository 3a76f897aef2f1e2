"""Builds the compiled CPU operations; all else about the package is in pyproject.toml.

They are one shared library of plain C functions, without a symbol of Python's, so that one wheel
serves every Python of its platform.  Where it does not compile, the package installs without it.
SFUMATO_LEVELS=native compiles, of the levels of x86, the one alone that this machine would choose;
without it, and with SFUMATO_LEVELS=all, there are all of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

LOST = (
    "sfumato: installed without the compiled CPU operations: torch serves on the CPU, several "
    "times slower"
)

CSRC = Path("src/sfumato/ops/cpu/csrc")

KERNELS = Extension(
    "sfumato.ops.cpu._kernels",
    sources=sorted(str(path) for path in CSRC.glob("*.cpp")),
    depends=sorted(str(path) for path in CSRC.glob("*") if path.suffix != ".cpp"),
    # No contraction: a product and a sum become one rounding only where the source says so.
    # No code reads the exceptions of floats: where they count, GCC leaves loops with an exponential
    # to scalars.
    extra_compile_args=[
        *("-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off"),
        "-fno-trapping-math",
    ],
    language="c++",
    optional=True,
)

LEVELS = {0: "portable", 1: "avx2", 2: "avx_vnni", 4: "avx512", 5: "amx"}
"""Those of x86 by number (sfumato.h), the worst first: how the names of their files begin. The last
one is never chosen unasked; ARM's compile quickly."""


def levels() -> str:
    """What SFUMATO_LEVELS says. Raises SystemExit for what it cannot be."""
    given = os.environ.get("SFUMATO_LEVELS") or "all"
    if given not in ("all", "native"):
        raise SystemExit(f"sfumato: SFUMATO_LEVELS: {given!r} is neither all nor native")
    return given


def reason(error: Exception) -> str:
    """The first line of an error, in which a command is its program alone."""
    return re.sub(r"'\['(.*?)'.*\]'", r"'\1'", str(error).partition("\n")[0])


class BuildLibrary(build_ext):
    """Goes on without what does not compile, and names the result as `library.py` looks for it."""

    def build_extension(self, ext: Extension) -> None:
        if self.editable_mode:  # a library of older sources must not pass for these
            Path(CSRC.parent, "_kernels.so").unlink(missing_ok=True)
        if self.compiler.compiler_type == "msvc":
            print(f"{LOST} (they need GCC or clang, not MSVC)", file=sys.stderr)
            return
        is_native = levels() == "native"
        try:
            if is_native:
                self._leave_out(ext)
            self.compiler.compile = _at_once(self.compiler.compile)
            super().build_extension(ext)
            for beside in Path(self.get_ext_fullpath(ext.name)).parent.glob("*.lib"):
                beside.unlink()  # for linkers on Windows
        except (BaseError, CCompilerError, OSError) as error:
            why = f"the C++ compiler is missing or failed: {reason(error)}"
            print(f"{LOST} ({why})", file=sys.stderr)

    def _leave_out(self, ext: Extension) -> None:
        """The levels that this processor lacks or does not choose, which the sources ask it."""
        with tempfile.TemporaryDirectory() as folder:
            asks = [str(CSRC / "processor.cpp")]
            asks = self.compiler.compile(asks, output_dir=folder, extra_postargs=["-std=c++17"])
            self.compiler.link_shared_object(asks, f"{folder}/processor.so", target_lang="c++")
            runs = ctypes.CDLL(f"{folder}/processor.so").processor_runs
        chosen = [name for level, name in LEVELS.items() if runs(level) == 1 and name != "amx"]
        left_out = {*LEVELS.values()} - {chosen[-1]}
        kept = [
            path for path in ext.sources if Path(path).stem.removesuffix("_bf16") not in left_out
        ]
        ext.sources, ext.define_macros = kept, [(f"SF_NO_{name.upper()}", "1") for name in left_out]

    def get_ext_filename(self, fullname: str) -> str:
        wheel = self.distribution.get_option_dict("bdist_wheel")
        windows = wheel.get("plat_name", ("", sys.platform))[1].startswith("win")
        return fullname.replace(".", "/") + (".dll" if windows else ".so")


def _at_once(compile: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """The sources on all cores: each instruction set takes its time."""

    def every(sources: list[str], **options: Any) -> list[str]:
        with ThreadPool() as pool:
            return pool.map(lambda source: compile([source], **options)[0], sources)

    return every


class PlatformWheel(bdist_wheel):
    """For its platform and any Python 3, with a bill of materials (PEP 770)."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]

    def write_wheelfile(self, wheelfile_base: str, **options: Any) -> None:
        super().write_wheelfile(wheelfile_base, **options)
        path = Path(wheelfile_base, "sboms", "sfumato.cdx.json")
        path.parent.mkdir()
        path.write_text(json.dumps(self._materials(), indent=1))

    def _materials(self) -> dict[str, Any]:
        """The package, its compiler, and what this one links into the library; in CycloneDX. What
        pip installs beside the package is in the wheel's own metadata."""
        name, version = "sfumato", self.distribution.get_version()
        package = {"type": "library", "name": name, "version": version, "bom-ref": name}
        package |= {"purl": f"pkg:pypi/{name}@{version}", "licenses": _license("Apache-2.0")}
        compiler, linked = os.environ.get("CXX", ""), []
        if "ziglang" in compiler:
            command = [*shlex.split(compiler), "--version"]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            of_llvm = shown.split("\n")[0].split()[2]
            for part in ("libcxx", "libcxxabi", "libunwind", "compiler-rt"):
                linked.append(
                    {"type": "library", "name": part, "version": of_llvm, "bom-ref": part}
                )
                linked[-1]["licenses"] = _license("Apache-2.0 WITH LLVM-exception")
            compiler = f"zig c++ (clang {of_llvm})"
        tool = {"type": "application", "name": compiler or "the system's C++ compiler"}
        return {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": package, "tools": {"components": [tool]}},
            "components": linked,
            "dependencies": [{"ref": name, "dependsOn": [each["bom-ref"] for each in linked]}],
        }


def _license(expression: str) -> list[dict[str, str]]:
    return [{"expression": expression}]


setup(
    ext_modules=[KERNELS],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
