"""Attention of every level beside torch's: the table that says where which one serves.

    .venv/bin/python -m benchmarks.attention_levels [--threads 2] [--rounds 9]

Torch is limited to AVX2 where --torch-isa avx2 (the default) says so: what it would do on a
processor with AVX2 alone.  A canvas of 256 after a prefix of 512 and of 4,096 tokens (8 key heads
of 256, 2 key heads of 512; 16 heads), a chunk of a prompt, and a question of 16 tokens; keys in
float32, as a level without products of bfloat16 stores them.  Torch and the levels take turns;
figures are medians of wall time, and of the processor time of all threads, which other work on the
machine changes less.
A ratio over 1 is torch's time over the level's.  A line of JSON ends the output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

LIMITS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
"""What limits torch and its libraries; they read it when they are loaded."""

HEADS = 16
CASES = (
    ("canvas, sliding", 8, 256, 512, 256, False),
    ("canvas, full", 2, 512, 512, 256, False),
    ("canvas, sliding", 8, 256, 1023, 256, False),
    ("canvas, full", 2, 512, 4096, 256, False),
    ("canvas of 16, full", 2, 512, 512, 16, False),
    ("prompt, sliding", 8, 256, 1023, 512, True),
    ("prompt, full", 2, 512, 4096, 512, True),
    ("question, full", 2, 512, 600, 16, True),
)
"""A name; key heads, numbers of a head, keys before, tokens; whether none sees later ones."""


def times(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of each: on the wall, and of processor time."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            spent[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: (statistics.median(x for x, _ in each[1:]), statistics.median(x for _, x in each[1:]))
        for name, each in spent.items()
    }


def measured(case: tuple[Any, ...], levels: dict[str, Any], rounds: int) -> dict[str, Any]:
    import torch

    from sfumato.ops import registry
    from sfumato.ops.attention_reference import Causal
    from sfumato.ops.cpu import attention, library

    name, kv_heads, d, held, tokens, is_causal = case
    keys, values = ([torch.randn(kv_heads, n, d) for n in (held, tokens)] for _ in range(2))
    q, places = torch.randn(tokens, HEADS, d) * 0.1, torch.arange(held + tokens)
    window = 1024 if "sliding" in name else None
    arguments = q, keys, values, Causal.of(places[held:], places, window) if is_causal else None
    torchs = registry.choose("attend", q.device, registry.ANY, *arguments, below=registry.COMPILED)

    def by(level: library.Kernels) -> Callable[[], object]:
        def work() -> object:
            library.kernels = level
            return attention.attend(*arguments)

        return work

    works = {"torch": lambda: torchs(*arguments)} | {isa: by(x) for isa, x in levels.items()}
    spent = times(works, rounds)
    wall, cpu = spent["torch"]
    row: dict[str, Any] = {"case": name, "keys": held, "tokens": tokens, "torch_ms": 1e3 * wall}
    for isa in levels:
        row |= {f"{isa}_ms": 1e3 * spent[isa][0], f"{isa}_wall": wall / spent[isa][0]}
        row[f"{isa}_cpu"] = cpu / spent[isa][1]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (2)")
    parser.add_argument("--rounds", type=int, default=9, help="whose median counts (9)")
    parser.add_argument("--torch-isa", choices=("avx2", "best"), default="avx2")
    args = parser.parse_args()
    if args.torch_isa == "avx2" and not all(os.environ.get(key) for key in LIMITS):
        again = [sys.executable, "-m", "benchmarks.attention_levels", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | LIMITS)
    import torch

    from sfumato.ops.cpu.library import ISAS, choose

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    levels = {}
    for isa in ISAS:
        try:
            kernels = choose(isa)[0]
        except ValueError:
            continue
        if kernels is not None and kernels.attention == torch.float32:
            levels[isa] = kernels
    rows = [measured(case, levels, args.rounds) for case in CASES]
    for row in ([*rows[0]], *(row.values() for row in rows)):
        print(" | ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row))
    print(json.dumps({"threads": args.threads, "torch": args.torch_isa, "rows": rows}))


if __name__ == "__main__":
    main()
