"""Instructions that a product executes for each weight that it unpacks, counted in machine code.

Compiles the product of a format's planes for GPUs that need not be here, and counts what the body
of its loop has, a thread: `python -m benchmarks.gpu_unpack --target sm_90 --format Q4_K`.  Of one
weight a thread executes the loop's instructions over the weights of a block, times threads.
Nothing is run.  Q8_0 shows what the loop has beside the unpacking.  `tiles.toml` has the counts.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from sfumato.ops.triton.ahead_of_time import Job, compile_source, kernel_of, source_of
from sfumato.ops.triton.planes import LAYOUTS
from sfumato.ops.triton.tiles import TARGETS, Target

_LABEL = re.compile(r"^\s*(\.L\w+):")
_INSTRUCTION = re.compile(r"^\s+(?:/\*[0-9a-f]+\*/\s+)?(?:@!?U?P\w+\s+)?([A-Za-z][\w.]+)\b(.*)")
_BRANCHES = ("BRA", "s_cbranch", "s_branch")
_CONDITION = re.compile(r"@!?U?P|BRA\S*\s+!?U?P|s_cbranch")
_MATRIX = re.compile("MMA|mfma|wmma")


def machine_code(made: Any, target: Target) -> str:
    """The text of a compiled kernel."""
    if target.backend == "hip":
        return str(made.asm["amdgcn"])
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(tool), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def inner_loop(text: str) -> Counter[str]:
    """The instructions of the body of the loop that multiplies, by their first word: the shortest
    that ends with a condition, if any does. Code that stands apart, as where a wait fails, leads
    back into it without one, past other code."""
    labels: dict[str, int] = {}
    names: list[str] = []
    loops: list[tuple[bool, int, int]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif (matched := _INSTRUCTION.match(line)) and not line.strip().startswith("."):
            names.append(matched[1].split(".")[0])
            target = re.search(r"\.L\w+", matched[2])
            if names[-1].startswith(_BRANCHES) and target and target[0] in labels:
                start = labels[target[0]]
                if any(map(_MATRIX.search, names[start:])):
                    loops.append((not _CONDITION.search(line), len(names) - start, start))
    _, length, start = min(loops)
    return Counter(names[start : start + length])


def counted(kernel: str, target: str, format: str, rows: str = "OUT", columns: str = "IN") -> Any:
    """Plain values. rows and columns: the constants of the tile that are those of a block."""
    job, where = Job(kernel, target, "few", 0, format), TARGETS[target]
    named, tile = kernel_of(job)
    made = compile_source(*source_of(named, tile, where), where)
    loop = inner_loop(machine_code(made, where))
    weights = tile[rows] * tile[columns] / (tile.warps * where.warp)  # of a thread
    if "gate" in kernel:
        weights *= 2
    each = round(loop.total() / weights, 2)
    return {
        "kernel": kernel, "target": target, "format": format, "each": each,
        "barriers": sum(count for name, count in loop.items() if "BAR" in name.upper()),
        "most": dict(loop.most_common(8)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--target", action="append", choices=list(TARGETS), required=True)
    parser.add_argument("--format", action="append", choices=list(LAYOUTS), required=True)
    parser.add_argument("--kernel", action="append", help="default: linear_planes")
    given = parser.parse_args()
    for kernel in given.kernel or ["linear_planes"]:
        for target in given.target:
            for format in given.format:
                print(json.dumps(counted(kernel, target, format)), flush=True)


if __name__ == "__main__":
    main()
