"""How fast a checkpoint becomes ready to denoise, from the page cache.

    .venv/bin/python benchmarks/loading.py model.gguf --threads 2 [--rounds 5] [--device cpu]

The file, or every file of a folder, is read once first. Each round starts two fresh processes: one
times `sfumato.load`, as a whole; the other its parts one after another, which the load does partly
side by side: opening (header, vocabulary, shapes), the text side, the weights. Figures are the
median and the best; "system" is the processor time that the kernel took for the load, most of it
to supply memory. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

LOAD = """
import json, resource, sys, time, torch, sfumato
path, threads, device = sys.argv[1:]
torch.set_num_threads(int(threads))
before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
sfumato.load(path, device=device)
took, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "load": took,
    "user": after.ru_utime - before.ru_utime,
    "system": after.ru_stime - before.ru_stime,
}))
"""

PARTS = """
import json, sys, time, torch
from sfumato.api import load_text
from sfumato.model.loading import config_of, expected_shapes, load_network
from sfumato.model.placement import pick_device, pick_dtype
from sfumato.weights.checkpoint import open_checkpoint
path, threads, device = sys.argv[1:]
torch.set_num_threads(int(threads))
times = [time.perf_counter()]
checkpoint, target = open_checkpoint(path), pick_device(device)
checkpoint.account(expected_shapes(config_of(checkpoint)))
times.append(time.perf_counter())
load_text(checkpoint)
times.append(time.perf_counter())
load_network(checkpoint, target, pick_dtype("auto", checkpoint, target))
times.append(time.perf_counter())
print(json.dumps(dict(zip(
    ("open", "text side", "weights"), (b - a for a, b in zip(times, times[1:]))
))))
"""


def read_through(path: Path) -> int:
    """Reads a file, or all files of a folder, into the page cache; how many bytes they have."""
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    size = 0
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while piece := stream.read(1 << 24):
                size += len(piece)
    return size


def run(program: str, options: argparse.Namespace) -> dict[str, float]:
    arguments = (str(options.path), str(options.threads), options.device)
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    read_through(options.path)
    start = time.perf_counter()
    size = read_through(options.path)
    reading = time.perf_counter() - start
    times: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for program in (LOAD, PARTS):
            for name, seconds in run(program, options).items():
                times.setdefault(name, []).append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = {name: min(values) for name, values in times.items()}
    print(
        f"{options.path.name}: {size / 1e9:.2f} GB, {options.threads} threads; "
        f"read from the page cache in {reading:.2f} s"
    )
    print(f"{'seconds':12}{'median':>8}{'best':>8}{'GB/s of file, best':>22}")
    for name, median in medians.items():
        speed = f"{size / best[name] / 1e9:22.2f}" if name in ("load", "weights") else ""
        print(f"{name:12}{median:8.2f}{best[name]:8.2f}{speed}")
    told = vars(options) | {"path": options.path.name, "bytes": size}
    print(json.dumps({"benchmark": "loading", **told, "median_s": medians, "best_s": best}))


if __name__ == "__main__":
    main()
