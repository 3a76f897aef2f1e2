"""Compiled attention after long prefixes: time, packing's share, and page faults.

    .venv/bin/python benchmarks/long_prefix.py [--keys 4096 32768 131072] [--queries 256]
        [--threads 1] [--rounds 3]

One canvas over one prefix, 16 heads. Full layers have 2 key heads of 512 and see the whole prefix;
the sliding one has 8 of 256 and sees 1023 keys. Packing is what a call of a single query takes: its
products are 1/256 of a canvas's. Seconds are the process's own (user and system), so that other
work on the machine counts little, but for the rate by the wall clock; figures are medians. Prints a
table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time

import torch

from sfumato import ops

HEADS = 16
SLIDING = 1023


def spent(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> list[float]:
    """CPU seconds, page faults, and wall seconds of a call."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    ops.attend(q, keys, values)
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [seconds, after.ru_minflt - before.ru_minflt, time.perf_counter() - began]


def measured(kv_heads: int, d: int, held: int, queries: int, rounds: int) -> dict[str, float]:
    sizes = (held, queries)
    keys, values = ([torch.randn(kv_heads, n, d).bfloat16() for n in sizes] for _ in range(2))
    canvas = torch.randn(queries, HEADS, d).bfloat16()
    for _ in range(2):  # one to find what a call needs, and one to take the memory that is kept
        spent(canvas, keys, values)
    canvases = [spent(canvas, keys, values) for _ in range(rounds)]
    packing = [spent(canvas[:1], keys, values)[0] for _ in range(rounds)]
    canvas_seconds = statistics.median(seconds for seconds, _, _ in canvases)
    products = 4 * queries * HEADS * d * (held + queries)
    return {
        "head_dim": d,
        "keys": held,
        "ms": 1e3 * canvas_seconds,
        "gflops": products / canvas_seconds / 1e9,
        "wall_gflops": products / statistics.median(wall for _, _, wall in canvases) / 1e9,
        "packing_ms": 1e3 * statistics.median(packing),
        "packing_share": statistics.median(packing) / canvas_seconds,
        "faults": statistics.median(faults for _, faults, _ in canvases),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    shapes = [(8, 256, SLIDING), *((2, 512, keys) for keys in given.keys)]
    rows = [measured(*shape, given.queries, given.rounds) for shape in shapes]
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(f"{value:.4g}" for value in row.values()))
    print(json.dumps({"threads": given.threads, "queries": given.queries, "rows": rows}))


if __name__ == "__main__":
    main()
