"""Builds the compiled CPU operations; all else about the package is in pyproject.toml.

They are one shared library of plain C functions, without a symbol of Python's, so that one wheel
serves every Python of its platform.  Where it does not compile, the package installs without it.
"""

from __future__ import annotations

import sys
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


class BuildLibrary(build_ext):
    """Goes on without what does not compile, and names the result as `library.py` looks for it."""

    def build_extension(self, ext: Extension) -> None:
        if self.editable_mode:  # a library of older sources must not pass for these
            Path(CSRC.parent, "_kernels.so").unlink(missing_ok=True)
        if self.compiler.compiler_type == "msvc":
            print(f"{LOST} (they need GCC or clang, not MSVC)", file=sys.stderr)
            return
        self.compiler.compile = _at_once(self.compiler.compile)
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError, OSError) as error:
            reason = str(error).partition("\n")[0]
            print(f"{LOST} (the C++ compiler is missing or failed: {reason})", file=sys.stderr)

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"


def _at_once(compile: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """The sources on all cores: each instruction set takes its time."""

    def every(sources: list[str], **options: Any) -> list[str]:
        with ThreadPool() as pool:
            return pool.map(lambda source: compile([source], **options)[0], sources)

    return every


class PlatformWheel(bdist_wheel):
    """For this platform, and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[KERNELS],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
