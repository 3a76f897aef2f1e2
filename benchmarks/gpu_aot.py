"""Compiles kernels for GPUs that are not there, and prints of each its shared memory, registers,
spilled bytes and matrix instructions: `make aot`, `python -m benchmarks.gpu_aot`.

The exit status is 1 where a kernel does not compile or needs more shared memory than its GPU has:
Triton compiles such a kernel without a word, and the launch fails.  So it is where sums would
differ from those that the sources name.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sfumato.ops.triton.ahead_of_time import (
    Job,
    Limits,
    compile_source,
    jobs,
    kernel_of,
    run_bounded,
    source_of,
)
from sfumato.ops.triton.kernel import FP_FUSION, all_kernels
from sfumato.ops.triton.planes import LAYOUTS
from sfumato.ops.triton.tiles import TARGETS, Target

_MATRIX = re.compile(
    r"\b(wgmma\.mma_async\S*?\.(m\d+n\d+k\d+)|mma\.sync\S*?\.(m\d+n\d+k\d+)"
    r"|tcgen05\.mma\S*?\.kind::(\S+)|v_w?mfma_\w+|v_wmma_\w+)"
)
_IN_SEQUENCE = re.compile(r"tt\.dot \S+, \S+, %(?!cst)[^:]*: \S*xf32> \* tensor")
"""A product of float32 numbers that begins with other sums than zeros: a GPU without matrix units
for such numbers adds all of them in one sequence, whose error grows with its length."""


@dataclass(frozen=True)
class Compiled(Job):
    """What one compilation gave; `error` is empty where it succeeded and fits."""

    shared: int = 0  # bytes
    registers: int = 0  # of a thread
    spilled: int = 0  # bytes of a thread (NVIDIA), registers (AMD)
    instructions: tuple[str, ...] = ()
    seconds: float = 0.0  # that the compilation took
    error: str = ""

    def __str__(self) -> str:
        name = super().__str__()
        if self.error:
            return f"{self.target:8} {name:32} {self.error}"
        figures = f"shared {self.shared:6}  registers {self.registers:3}  spilled {self.spilled:4}"
        how_long = f"{self.seconds:5.1f} s  {' '.join(self.instructions)}"
        return f"{self.target:8} {name:32} {figures}  {how_long}"


def measured(job: Job) -> Compiled:
    """Compiles, and measures what came out. Raises what the compilers raise."""
    target = TARGETS[job.target]
    made = compile_source(*source_of(*kernel_of(job), target), target)
    shared = int(made.metadata.shared)
    registers, spilled = _usage(made, target)
    excess = f"shared memory: {shared} bytes of {target.shared}" if shared > target.shared else ""
    return Compiled(**asdict(job), shared=shared, registers=registers, spilled=spilled,
                    instructions=_instructions(made), error=excess or _inexact(made))  # fmt: skip


def _inexact(made: Any) -> str:
    """Why sums would differ from those that the sources name; empty where they do not."""
    if made.metadata.enable_fp_fusion is not FP_FUSION:
        return f"enable_fp_fusion: is {made.metadata.enable_fp_fusion}"
    text = made.asm["ttir"]
    if re.search(r"tf32(?!x3)", text):
        return "tl.dot: multiplies float32 as TF32 once"
    return "tl.dot: adds float32 products one after another" if _IN_SEQUENCE.search(text) else ""


def _usage(made: Any, target: Target) -> tuple[int, int]:
    """Registers of a thread, and what it spills to memory."""
    if target.backend == "hip":
        text = made.asm["amdgcn"]
        return _number(r"\.vgpr_count:\s+(\d+)", text), _number(
            r"\.vgpr_spill_count:\s+(\d+)", text
        )
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    text = run.stdout + run.stderr
    return _number(r"\bREG:(\d+)", text), _number(r"\bSTACK:(\d+)", text)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"the compiler's report has no {pattern}")
    return int(match[1])


def _instructions(made: Any) -> tuple[str, ...]:
    """The kinds of matrix instructions, by which a change of a tile shows whether sums change."""
    text = made.asm.get("ptx") or made.asm["amdgcn"]
    kinds = set()
    for name, *details in _MATRIX.findall(text):
        named = zip(("wgmma", "mma", "tcgen05"), details, strict=True)
        kinds.add(next((f"{prefix}.{detail}" for prefix, detail in named if detail), name))
    return tuple(sorted(kinds))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles and prints; the number of failures decides the exit status."""
    parser = argparse.ArgumentParser(prog="gpu_aot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--kernel", action="append", default=[], help="default: all")
    parser.add_argument(
        "--every",
        action="store_true",
        help="all candidates of the table of tiles, and all shapes of the 26B-A4B",
    )
    parser.add_argument("--format", action="append", default=[], choices=list(LAYOUTS),
                        help="of weights in planes; default: one for each kernel")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=180, help="of one compilation")
    parser.add_argument("--memory", type=float, default=16, help="of one compilation, in GB")
    parser.add_argument("--json", action="store_true", help="one object a line")
    given = parser.parse_args(arguments)
    known = all_kernels()  # before processes are forked, so that each has them
    if unknown := sorted(set(given.kernel) - set(known)):
        parser.error(f"--kernel: {', '.join(unknown)}: is none of {', '.join(sorted(known))}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # ends the children too
    work = list(jobs(given.target or list(TARGETS), given.kernel, given.every, given.format))
    failures = 0
    limits = Limits(given.seconds, int(given.memory * 1e9))
    for outcome in run_bounded(measured, work, given.jobs, limits):
        made = outcome.result or Compiled(**asdict(outcome.item), error=outcome.failure)
        made = replace(made, seconds=outcome.seconds)
        print(json.dumps(asdict(made)) if given.json else made, flush=True)
        failures += bool(made.error)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
