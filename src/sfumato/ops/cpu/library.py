"""The compiled library: where it lies, whether it fits, and with which instructions it runs.

The choice is made once, at import: the best instruction set that the processor has, or the one that
the environment variable SFUMATO_ISA names (one of ISAS; with torch the library rests).  Which is
the best is a table and never timed, for what is rounded otherwise may become another text.

Every call takes as many threads as torch has at that time (`torch.get_num_threads()`), so that one
setting governs both.  They are the same threads, too: the library is linked to no OpenMP runtime,
and is given the functions of the one that torch is linked to.  Knows C types, and neither weights
nor operations.

The library also says which mapped file was truncated, in one line in place of a silent death.  A
page of a mapped file that is not there any more is a fault of the machine (SIGBUS), which no
exception of Python's can be.  The library handles that signal for the addresses that `watch`
registers, and passes on others; without it the process ends as the system does it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

VARIABLE = "SFUMATO_ISA"
ISAS = ("portable", "avx2", "avx_vnni", "avx512_vnni", "avx512", "amx", "neon", "i8mm")
"""The instruction sets by number in the library, of a family of processors the worst first.
avx512_vnni is avx512 without BF16's instructions, as it is on a processor that lacks them."""

SLOWER_THAN_TORCH = ("portable",)
"""`make levels` measures all."""

ONLY_WHEN_ASKED = (*SLOWER_THAN_TORCH, "amx")
"""Levels that are never chosen: amx rounds otherwise than avx512, and few machines have run it."""

ATTEND_FASTER = ("avx2", "avx_vnni", "avx512_vnni", "avx512")
"""Levels whose attention in float32 is faster than torch's, by `benchmarks.attention_levels`;
avx512 is avx512_vnni where the processor has no BF16.  That of neon and i8mm was measured on no
processor: it serves where the level is asked for."""

LIBRARY = Path(__file__).with_name(f"_kernels.{'dll' if sys.platform == 'win32' else 'so'}")
_NO_MEMORY, _LEFT_OUT = -2, 2  # SF_NO_MEMORY and SF_LEFT_OUT of csrc/sfumato.h

RUNTIMES = (
    ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads"),
    (
        *("__kmpc_fork_call", "__kmpc_barrier", "omp_get_thread_num", "omp_get_num_threads"),
        *("__kmpc_push_num_threads", "__kmpc_global_thread_num"),
    ),
)
"""What `sf_use_threads` takes of GCC's runtime, and of LLVM's and Intel's, which may have both."""

TORCHS_RUNTIME = {"darwin": "libomp.dylib", "win32": "libiomp5md.dll"}
"""The file beside torch's libraries; elsewhere the runtime has many names, and is found by way of
torch's own library, which is linked to it."""

VERSION = 17

_LEVEL = _MODE = _KIND = _TYPE = _GATING = _THREADS = c_int
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "sf_version": (),
    "sf_isa_available": (_LEVEL,),
    "sf_use_threads": (c_int, c_void_p),
    "sf_has_threads": (),
    "sf_has_bf16": (),
    "sf_workspace_bytes": (),
    "sf_watch": (c_void_p, c_int64, c_char_p, c_int),
    "sf_unwatch": (c_int,),
    "sf_kind": (_TYPE,),
    "sf_panel_bytes": (_KIND, c_int64, c_int64),
    "sf_pack": (_LEVEL, _TYPE, c_void_p, *[c_int64] * 3, c_void_p, _THREADS),
    "sf_pack_columns": (_LEVEL, _TYPE, c_void_p, *[c_int64] * 2, c_void_p, _THREADS),
    "sf_unpack": (_KIND, c_void_p, *[c_int64] * 3, c_void_p, _THREADS),
    "sf_linear": (
        *(_LEVEL, _MODE, _KIND, c_void_p, c_int64, c_int64),
        *(c_void_p, _TYPE, c_int64, c_void_p, _TYPE, _THREADS),
    ),
    "sf_experts": (
        *(_LEVEL, _MODE, _KIND, c_void_p, _KIND, c_void_p, *[c_int64] * 3),
        *(c_void_p, _TYPE, c_int64, c_void_p, c_void_p, c_int64, _GATING, c_void_p, _TYPE),
        _THREADS,
    ),
    "sf_dequantize": (_LEVEL, _TYPE, c_void_p, c_int64, c_void_p, _TYPE, _THREADS),
    "sf_softmax_update": (_LEVEL, c_void_p, _THREADS),
    "sf_gated": (
        *(_LEVEL, c_void_p, c_int64, c_void_p, c_int64, _TYPE, _GATING, c_int64, c_int64),
        *(c_void_p, _THREADS),
    ),
    "sf_rms_norm": (
        *(_LEVEL, c_void_p, _TYPE, c_int64, c_int64, c_void_p, _TYPE, c_float),
        *(c_void_p, _THREADS),
    ),
    "sf_rotate": (_LEVEL, c_void_p, _TYPE, *[c_int64] * 3, *[c_void_p] * 3, _THREADS),
    "sf_attends": (_LEVEL,),
    "sf_canvas_attention": (_LEVEL, c_void_p, _THREADS),
    "sf_shared_attention": (_LEVEL, c_void_p, _THREADS),
}


@dataclass(frozen=True)
class Kernels:
    """The loaded library and the instruction set that it uses."""

    code: ctypes.CDLL
    isa: str
    by_name: bool = False  # it was asked for

    @property
    def level(self) -> int:
        return ISAS.index(self.isa)

    @property
    def bf16(self) -> bool:
        """Whether the processor's bfloat16 instructions are used."""
        return self.isa in ("avx512", "amx") and self.code.sf_has_bf16() == 1

    @property
    def attention(self) -> torch.dtype | None:
        """What the library's attention multiplies; None where torch attends."""
        if self.bf16:
            return torch.bfloat16
        serves = self.by_name or self.isa in ATTEND_FASTER
        return torch.float32 if serves and self.code.sf_attends(self.level) else None

    @property
    def tiles(self) -> bool:
        """Whether products of bfloat16 run on AMX's tiles."""
        return self.isa == "amx"

    def run(self, name: str, *arguments: int | float | None) -> None:
        """Calls a function with the instruction set first, but for `sf_unpack`, which has none, and
        torch's number of threads last.

        Raises ValueError where the library refuses an argument, MemoryError where it finds no
        memory for its buffers.
        """
        level = () if name == "sf_unpack" else (self.level,)
        code = getattr(self.code, name)(*level, *arguments, torch.get_num_threads())
        if code == _NO_MEMORY:
            raise MemoryError(f"{name}: no memory for the buffers of the compiled library")
        if code != 0:
            raise ValueError(f"{name}: the compiled library refuses its arguments (code {code})")


def choose(wanted: str | None, path: Path = LIBRARY) -> tuple[Kernels | None, str]:
    """The kernels with the instruction set `wanted`, or the best for None, and why, for people.

    No kernels where "torch" is wanted, and where nothing is and the library cannot be used.
    Raises ValueError for another name, and for what this machine lacks.
    """
    names = (*ISAS, "torch")
    if wanted is not None and wanted not in names:
        raise ValueError(f"{VARIABLE}: {wanted!r} is none of {', '.join(names)}")
    if wanted == "torch":
        return None, f"{VARIABLE} asks for it"
    try:
        code = load(path)
    except OSError as error:
        if wanted is not None:
            raise ValueError(f"{VARIABLE}: {wanted} cannot be had: {error}") from error
        return None, str(error)
    able = [isa for level, isa in enumerate(ISAS) if code.sf_isa_available(level) == 1]
    if wanted is None:
        quick = [isa for isa in able if isa not in ONLY_WHEN_ASKED]
        if quick and not code.sf_has_threads():
            return None, "torch has no OpenMP runtime that the compiled operations know: one thread"
        if not quick:
            return None, "quicker here than the plain C++ of the compiled operations"
        return Kernels(code, quick[-1]), "the best that this processor can run"
    if code.sf_isa_available(ISAS.index(wanted)) == _LEFT_OUT:
        raise ValueError(
            f"{VARIABLE}: {wanted} is left out of this library, which was compiled for this "
            "machine alone: install again (`pip install -e .`)"
        )
    if wanted not in able:
        raise ValueError(f"{VARIABLE}: {wanted} does not run here, but {', '.join(able)} would")
    return Kernels(code, wanted, True), f"{VARIABLE} asks for it"


def load(path: Path) -> ctypes.CDLL:
    """Raises OSError, saying in one line what is wrong and what to do."""
    if not path.exists():
        raise OSError(
            "the compiled operations are missing: there was no C++ compiler (GCC 11, clang 14 or "
            "later) when sfumato was installed, or it failed; with one, install again (pip -v says "
            "more)"
        )
    code = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(code, name, None)
        if function is None or (name == "sf_version" and code.sf_version() != VERSION):
            raise OSError(f"{path.name} is of another version of sfumato: install sfumato again")
        function.argtypes = arguments
        function.restype = c_int64 if name.endswith("_bytes") else c_int
    _use_torchs_threads(code)
    return code


def _use_torchs_threads(code: ctypes.CDLL) -> None:
    """Gives the library the functions of the OpenMP runtime that torch is linked to; where there is
    none, every call runs on the thread that makes it."""
    name = TORCHS_RUNTIME.get(sys.platform, "libtorch_cpu.so")
    try:
        runtime = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    except OSError:
        return
    for kind, names in enumerate(RUNTIMES):
        if torch.backends.openmp.is_available() and all(hasattr(runtime, each) for each in names):
            functions = [ctypes.cast(getattr(runtime, each), c_void_p) for each in names]
            code.sf_use_threads(kind, (c_void_p * len(functions))(*functions))
            return


kernels, reason = choose(os.environ.get(VARIABLE) or None)


def loaded() -> Kernels:
    """The kernels where there must be some."""
    assert kernels is not None, f"no compiled operations: {reason}"
    return kernels


def run(name: str, *arguments: int | float | None) -> None:
    """`Kernels.run` of the kernels, where there must be some."""
    loaded().run(name, *arguments)


def refusal(device: torch.device) -> str:
    """Why the kernels serve no operation on a CPU; empty where they do."""
    return "" if kernels is not None else reason


def describe() -> tuple[str, str]:
    """Who computes on the CPU, in a word or two, and why it is them."""
    if kernels is None:
        return "torch", reason
    threads = "" if kernels.code.sf_has_threads() else ", without torch's OpenMP: one thread"
    return f"compiled, {kernels.isa}{' with bf16' if kernels.bf16 else ''}{threads}", reason


EXIT_CODE = 70
"""The exit code of a server whose engine has stopped too; sysexits.h: internal error."""


@cache
def _code() -> ctypes.CDLL | None:
    """The library, also where its operations are not chosen."""
    try:
        return load(LIBRARY)
    except OSError:
        return None


def watch(mapping: object, address: int, nbytes: int, path: Path) -> bool:
    """Registers a mapped file for as long as the `mapping` lives. False where a fault of it would
    end the process without a line."""
    code = _code()
    number = code.sf_watch(address, nbytes, os.fsencode(path), EXIT_CODE) if code else -1
    if code is None or number < 0:
        return False
    # Not at the exit, when threads may still compute.
    weakref.finalize(mapping, code.sf_unwatch, number).atexit = False
    return True
