"""How fast a checkpoint becomes ready to denoise, from the page cache.

    .venv/bin/python benchmarks/loading.py model.gguf --threads 2 [--rounds 5] [--device cpu]

The file, or every file of a folder, is read once first. Each round loads it in four fresh
processes: by `sfumato.load`, and by its parts one after another (opening: header, vocabulary,
shapes; the text side; the weights), both with memory as the system hands it out, and with memory at
hand: the process has just written as much as the load will take, and given it back. Where a virtual
machine's host takes free memory away, the first touch of every page waits for the host, and only
the second figure is the program's own. "user" and "system" are processor time. Prints a table of
medians and best times, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

PREPARE = """
import ctypes, json, resource, sys, time, torch, sfumato
from sfumato.api import load_text
from sfumato.model.loading import config_of, expected_shapes, load_network
from sfumato.model.placement import pick_device, pick_dtype
from sfumato.model.families import open_checkpoint
path, threads, device, count = *sys.argv[1:4], int(sys.argv[4])
torch.set_num_threads(int(threads))
if count:
    given = torch.empty(count, dtype=torch.uint8)
    start = given.data_ptr() + 4095 & ~4095
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(count - 8192), 14)  # huge
    given.fill_(1)
    del given
"""

LOAD = """
before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
sfumato.load(path, device=device)
took, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
print(json.dumps({"load": took, "user": user, "system": system}))
"""

PARTS = """
times = [time.perf_counter()]
checkpoint, target = open_checkpoint(path), pick_device(device)
checkpoint.check_tensors(expected_shapes(config_of(checkpoint)))
times.append(time.perf_counter())
load_text(checkpoint)
times.append(time.perf_counter())
load_network(checkpoint, target, pick_dtype("auto", checkpoint, target))
times.append(time.perf_counter())
names = "open", "text side", "weights"
print(json.dumps({name: b - a for name, a, b in zip(names, times, times[1:])}))
"""

ROOM = 1.4  # of the file's bytes: what a load takes at most


def read_through(path: Path) -> int:
    """Reads a file, or all files of a folder, into the page cache; how many bytes they have."""
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    size = 0
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while piece := stream.read(1 << 24):
                size += len(piece)
    return size


def run(program: str, options: argparse.Namespace, count: int) -> dict[str, float]:
    arguments = (str(options.path), str(options.threads), options.device, str(count))
    command = [sys.executable, "-c", PREPARE + program, *arguments]
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
    times: dict[str, dict[str, list[float]]] = {"as handed out": {}, "at hand": {}}
    for _ in range(options.rounds):
        for seconds_of, count in zip(times.values(), (0, int(ROOM * size)), strict=True):
            for program in (LOAD, PARTS):
                for name, seconds in run(program, options, count).items():
                    seconds_of.setdefault(name, []).append(seconds)
    print(
        f"{options.path.name}: {size / 1e9:.2f} GB, {options.threads} threads; "
        f"read from the page cache in {reading:.2f} s"
    )
    print(f"{'memory':15}{'seconds':11}{'median':>8}{'best':>8}{'GB/s of file, median':>23}")
    for memory, seconds_of in times.items():
        for name, values in seconds_of.items():
            median = statistics.median(values)
            speed = f"{size / median / 1e9:23.2f}" if name in ("load", "weights") else ""
            print(f"{memory:15}{name:11}{median:8.2f}{min(values):8.2f}{speed}")
    record = vars(options) | {"path": options.path.name, "bytes": size, "seconds": times}
    print(json.dumps({"benchmark": "loading", **record}))


if __name__ == "__main__":
    main()
