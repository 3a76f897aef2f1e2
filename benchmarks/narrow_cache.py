"""A forward and a prompt's chunk over a cache of each type, interleaved: time and memory.

    .venv/bin/python -m benchmarks.narrow_cache [--before OLD/src] [--preset 180m] [--dtype bf16]
        [--isa avx2] [--prefix 4096] [--rounds 7]

Each version of the source (that of --before with its compiled library, and this one) and each cache
type has a process of its own with random weights; the processes take turns. A round of one is some
forwards of a canvas behind the prefix (of one byte over and over: the time is the same), and one
chunk of a prompt that follows it. Times are medians of the processor's time, of all threads in ms,
so that other work on the machine counts little. Memory is a process's peak, in the forwards and
with the chunk, over what it had with its weights and its slot, in MB; the slot's own bytes stand
beside it. Linux only. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.turns import Contender, in_turns

WORKER = """
import ctypes, json, sys, time
from pathlib import Path
import torch
from sfumato.bench.subject import random_checkpoint
from sfumato.model.loading import load_network

preset, dtype, cache, threads, prefix, chunk, steps = sys.argv[1:4] + [int(x) for x in sys.argv[4:]]
torch.set_num_threads(threads)
names = {"bf16": torch.bfloat16, "f32": torch.float32}
checkpoint = random_checkpoint(preset, "bf16")
network = load_network(checkpoint, torch.device("cpu"), names[dtype],
                       cache_type=None if cache == "wide" else cache)
slot, = network.new_slots(1, prefix + chunk)
ids = torch.arange(prefix + chunk) * 7 % (network.config.vocab_size - 8) + 5
canvas = torch.arange(network.config.canvas_length)

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

def spent(function):
    start = time.process_time()
    function()
    return 1e3 * (time.process_time() - start)

for held in (*slot.pool.keys, *slot.pool.values):
    held.view(torch.uint8).fill_(0x30)
slot.length = prefix
ctypes.CDLL(None).malloc_trim(0)  # what loading has left
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
for line in sys.stdin:
    forwards = [spent(lambda: network.denoise([canvas], [slot])) for _ in range(steps)]
    peaks = [status("VmHWM") - before]
    encoded = spent(lambda: network.encode([ids[prefix:]], [slot]))
    slot.length = prefix
    peaks.append(status("VmHWM") - before)
    print(json.dumps([forwards, encoded, peaks, slot.nbytes()]), flush=True)
"""


class Case(Contender):
    """One version and cache type."""

    def __init__(self, version: str, source: Path, cache: str, options: argparse.Namespace) -> None:
        self.version, self.cache = version, cache
        isa = {"SFUMATO_ISA": options.isa} if options.isa else {}
        sizes = options.threads, options.prefix, options.chunk, options.steps
        environment = os.environ | {"PYTHONPATH": str(source), "OMP_WAIT_POLICY": "passive"} | isa
        super().__init__(
            WORKER, options.preset, options.dtype, cache, *sizes, environment=environment
        )

    def figures(self, rounds: list[Any]) -> dict[str, Any]:
        """rounds: of which the first warms up, and has the peaks."""
        forwards, chunks, _, _ = zip(*rounds[1:], strict=True)
        _, _, peaks, slot = rounds[0]
        return {
            "version": self.version,
            "cache": self.cache,
            "forward_ms": round(statistics.median(map(statistics.median, forwards)), 1),
            "chunk_ms": round(statistics.median(chunks), 1),
            "forward_mb": round(peaks[0] / 1e6, 1),
            "chunk_mb": round(peaks[1] / 1e6, 1),
            "slot_mb": round(slot / 1e6, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, help="folder of an older package")
    parser.add_argument("--preset", default="180m")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16", help="of activations")
    parser.add_argument("--isa", help="the level of the compiled operations")
    for name, default in (("prefix", 4096), ("chunk", 1024), ("steps", 5), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    sources = {"after": Path(__file__).resolve().parents[1] / "src"}
    if options.before:
        sources = {"before": options.before} | sources
    kinds = [(version, source, cache) for version, source in sources.items()
             for cache in ("wide", "fp8", "q8_0")]  # fmt: skip
    with ExitStack() as stack:
        cases = [stack.enter_context(Case(*kind, options)) for kind in kinds]
        taken = in_turns(cases, options.rounds)
    rows = [case.figures(rounds) for case, rounds in zip(cases, taken, strict=True)]
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(map(str, row.values())))
    print(json.dumps({**vars(options), "before": bool(options.before), "rows": rows}))


if __name__ == "__main__":
    main()
