"""An emulated GPU of AMD: kernels that Triton compiled for it, run as machine code on a CPU.

The emulator is tinygrad's (`test/mockgpu/amd/emu.py`), which stays outside of this project; see
docs/kernels.md for where it comes from. It translates each kind of instruction into a function of
the host's processor, by LLVM, and runs waves one after another up to their barriers. Here stand
what it lacks (`repairs`), how a kernel is loaded (`code_object`) and run with every access checked
(`machine`), and the driver by which Triton launches kernels on tensors of the CPU (`driver`).

What it does not show: the code of other architectures, missing waits, races, and time.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from pathlib import Path

FOLDER = "SFUMATO_EMULATOR"
"""The environment variable that names the folder of the emulator."""
LLVM = "LLVM_PATH"
"""The one that names libLLVM, from 16 on; the emulator reads it too."""
ARCHITECTURE = "gfx1151"
WAVE = 32  # lanes


def why_absent() -> str:
    """Why the emulated device cannot be used in this process; empty where it can be."""
    folder = os.environ.get(FOLDER, "")
    if not folder:
        return f"{FOLDER} names no folder of the emulator"
    if not (Path(folder) / "test/mockgpu/amd/emu.py").is_file():
        return f"{folder} has no test/mockgpu/amd/emu.py"
    if "f16c" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        return "the processor has no float16 (F16C)"
    library = os.environ.get(LLVM) or ctypes.util.find_library("LLVM-16")
    if not library:
        return "libLLVM 16 is not installed, and LLVM_PATH names none"
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return f"libLLVM does not load: {error}"
    os.environ.setdefault(LLVM, library)
    return ""


def import_emulator() -> None:
    """Lets `test.mockgpu.amd.emu` be imported, with LLVM as its compiler."""
    assert not why_absent(), why_absent()
    os.environ["DEV"] = "CPU:LLVM"
    folder = os.environ[FOLDER]
    if folder not in sys.path:
        sys.path.insert(0, folder)  # its package `test` hides that of the standard library
