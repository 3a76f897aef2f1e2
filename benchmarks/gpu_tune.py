"""Measures the candidates of tiles on this device, and writes the fastest into the table.

    python -m benchmarks.gpu_tune --out tiles.json                  # shows the lines of the table
    python -m benchmarks.gpu_tune --out tiles.json --table src/sfumato/ops/triton/tiles.toml

Each case of `gpu_cases.py` is a process of its own, which a candidate may end: at most six
candidates of a kernel, with the tokens of one row and of all rows.  The fastest candidates are then
checked against float64 and timed against torch. An operation that torch serves faster is listed,
and so are the shapes of products that the vendor's library makes faster, in products of a fixed
shape that keep a row's bits. A case that is wrong with its fastest tiles keeps the first.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_cases import CASES, Sizes
from benchmarks.gpu_kernel import TRITON, check_kernel
from benchmarks.gpu_options import new_parser, run_part, sizes_of
from benchmarks.gpu_tiles import Use, first_tiles
from benchmarks.gpu_tiles_table import section, with_section
from benchmarks.gpu_timing import device_limits

from sfumato.bench.environment import environment
from sfumato.model.placement import pick_device
from sfumato.ops.triton import tiles
from sfumato.ops.triton.tiles import Tile, architecture

FREE = ("OUT", "PROGRAMS")
"""Constants in which tiles of one kernel may differ between uses: they change no sum."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.file:
        findings = measure(options.case[0], sizes_of(options), options.seconds)
        Path(options.file).write_text(json.dumps(findings), encoding="utf-8")
        return 0
    device = pick_device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this cpu"
    cases = []
    for case in options.case or CASES:
        cases.append(_measured_apart(case, options))
        print(f"{case}: {_shown(cases[-1])}", flush=True)
    chosen = _tiles(fastest(cases, candidates_of(device)), device)
    lines = section(name, chosen, slower(cases), library(cases))
    summary = {"product": name, "environment": environment(), "cases": cases, "lines": lines}
    Path(options.out).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(lines, end="")
    if options.table is not None:
        text = options.table.read_text(encoding="utf-8")
        options.table.write_text(with_section(text, name, lines), encoding="utf-8")
    return int(any("failed" in case for case in cases))


def measure(name: str, sizes: Sizes, seconds: float) -> dict[str, Any]:
    """The findings for a case: the times of all candidates, and the check with the fastest."""
    small = sizes.device.type == "cpu"
    limits = device_limits(sizes.device, 256 if small else 4096, 1 << (22 if small else 30))
    first = check_kernel(name, sizes, limits, seconds)
    findings = {"case": name, "operation": first["case"], "served_by": first["served_by"]}
    if first["served_by"] != TRITON:
        return findings
    choice = fastest([{"tiles": first["tiles"]}], candidates_of(sizes.device))
    with first_tiles(choice):
        second = check_kernel(name, sizes, limits, seconds)
    kept = second if second["passed"] else first
    times = {key: kept[key]["median_ms"] for key in ("time", "torch_time")}
    times |= {key: kept[key]["median_ms"] for key in ("row_time", "row_torch_time")}
    measured = first["tiles"] if second["passed"] else []
    more = {"passed": kept["passed"], "tiles": measured, "library": first.get("library")}
    return findings | more | times


Candidates = Mapping[str, Mapping[str, Sequence[Tile]]]


def candidates_of(device: torch.device) -> Candidates:
    """The candidates of a device by kernel and use."""
    target = architecture(device)
    assert target is not None, f"{device}: kernels have no tiles for it"
    return {name: tiles.candidates(name, target) for name in tiles.table()["kernels"]}


def fastest(cases: Iterable[Mapping[str, Any]], known: Candidates) -> dict[Use, int]:
    """The candidates of each kernel of which several were measured: the fastest over the cases that
    use them. Of several uses, tiles differ in FREE alone, since a token's sums must not depend on
    how many tokens there are.
    """
    slowness: dict[str, dict[str, list[float]]] = {}
    for finding in (each for case in cases for each in case.get("tiles", ())):
        ran = [ms for ms in finding["ms"] if ms is not None]
        if ran:
            uses = slowness.setdefault(finding["kernel"], {})
            total = uses.setdefault(finding["use"], [0.0] * len(finding["ms"]))
            for index, ms in enumerate(finding["ms"]):
                total[index] += math.inf if ms is None else math.log(ms / min(ran))
    choice: dict[Use, int] = {}
    for kernel, uses in slowness.items():
        choice |= _of_kernel(kernel, uses, known[kernel])
    return choice


def _of_kernel(
    kernel: str, uses: Mapping[str, Sequence[float]], known: Mapping[str, Sequence[Tile]]
) -> dict[Use, int]:
    """uses: the logarithm of each candidate's time over the least; one that was not measured keeps
    the first candidate where it can."""
    slowness = {use: uses.get(use, [1e-6 * n for n in range(len(known[use]))]) for use in known}
    totals = {
        numbers: sum(slowness[use][number] for use, number in zip(known, numbers, strict=True))
        for numbers in product(*(range(len(known[use])) for use in known))
        if len({_sums(known[use][n]) for use, n in zip(known, numbers, strict=True)}) == 1
    }
    # Where instructions do not depend on a tile's tokens, uses may differ in these: the first ones.
    best = min(totals, key=totals.__getitem__, default=(0,) * len(known))
    return {(kernel, use): number for use, number in zip(known, best, strict=True)}


def _sums(tile: Tile) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, size) for name, size in tile.constants.items() if name not in FREE))


def slower(cases: Iterable[Mapping[str, Any]]) -> list[str]:
    """The operations whose cases take longer with kernels than with torch, all of them together;
    and those of which a case is wrong."""
    ours: dict[str, float] = {}
    torchs: dict[str, float] = {}
    for case in cases:
        if case.get("served_by") != TRITON:
            continue
        operation = case["operation"]
        wrong = 0.0 if case["passed"] else math.inf
        ours[operation] = ours.get(operation, 0.0) + case["time"] + case["row_time"] + wrong
        times = case["torch_time"] + case["row_torch_time"]
        torchs[operation] = torchs.get(operation, 0.0) + times
    return sorted(operation for operation, time in ours.items() if time > torchs[operation])


FASTER = 0.97
"""Of a kernel's time, at most that which the vendor's library takes where it serves: a choice that
is within a timing's noise would make texts depend on it."""


def library(cases: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """The shapes of products that the vendor's library makes faster than kernels, for one row and
    for all, since a row must have the same sums among any number of others."""
    return [
        case["library"]["shape"]
        for case in cases
        if case.get("library")
        and case["library"]["keeps_bits"]
        and all(case["library"][key] < FASTER * case[key] for key in ("time", "row_time"))
    ]


def _tiles(choice: Mapping[Use, int], device: torch.device) -> dict[Use, Tile]:
    known = candidates_of(device)
    return {(kernel, use): known[kernel][use][n] for (kernel, use), n in choice.items()}


def _measured_apart(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """The findings of a process that measures a case; what ended it where it has none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "findings.json"
        own = ["--case", case, "--seconds", str(options.seconds)]
        failed, output = run_part("benchmarks.gpu_tune", options, path, own, options.limit)
        if not (failed or path.exists()):
            failed = "left no findings"
        if failed:
            shown = output.decode("utf-8", "replace")[-2000:]
            return {"case": case, "failed": failed, "output": shown}
        findings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return findings


def _shown(findings: Mapping[str, Any]) -> str:
    if "failed" in findings:
        return f"failed: {findings['failed']}"
    if findings["served_by"] != TRITON:
        return f"not measured: served by {findings['served_by']}"
    right = "right" if findings["passed"] else "WRONG"
    return f"{right}, {findings['time']:.4f} ms, torch {findings['torch_time']:.4f} ms"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(str(__doc__).splitlines()[0], "a JSON file for all findings")
    parser.add_argument("--table", type=Path, help="tiles.toml, where the lines are written to")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each timing")
    parser.add_argument("--limit", type=float, default=180, help="seconds of a case")
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
