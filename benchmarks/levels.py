"""Every level's rate by format, beside torch's: the table that says which level is the better one.

    .venv/bin/python -m benchmarks.levels --threads 1
    .venv/bin/python -m benchmarks.levels --beside LIBRARY     such as a wheel's

Torch computes with the best that this processor has: MKL_ENABLE_INSTRUCTIONS=AVX2 limits it to what
it would do on a processor with AVX2 alone.
Rates are in 10⁹ operations (two for each product) a second of processor time, the best of several
rounds in which the levels take turns; torch multiplies the same matrix in float32.  A line of JSON
ends the output.  A level that is slower than the one before it, or than torch where it is taken
without being asked for, is named.

Beside another library: this one's median seconds over the other's, whose calls take turns. Over 1
the other one is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sfumato.ops.cpu import kernels, library
from sfumato.ops.cpu.library import ISAS, SLOWER_THAN_TORCH, Kernels, choose
from sfumato.ops.cpu.panels import PackedTensor, panels
from sfumato.weights.formats import FORMATS, of_files, quantize

WRITTEN = tuple(name for name, each in of_files("blocks").items() if each.encode)
SHAPE = (1024, 2816)
ROWS = (256, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    parser.add_argument("--rounds", type=int, default=7, help="the best of which counts (7)")
    parser.add_argument("--formats", nargs="+", default=WRITTEN, choices=WRITTEN)
    parser.add_argument("--beside", type=Path, metavar="LIBRARY", help="compiled in another way")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    levels = {isa: loaded for isa in ISAS if (loaded := _available(isa)) is not None}
    if args.beside:
        return _beside(levels, args)
    print(f"{'format':8}{'rows':>6}{'torch':>10}" + "".join(f"{isa:>10}" for isa in levels))
    rates: dict[str, dict[str, float]] = {}
    for name in args.formats:
        values = torch.randn(SHAPE)
        weight = panels(quantize(values, FORMATS[name]).data, name, SHAPE, "int8")
        for rows in ROWS:
            rate = _rates(levels, weight, values, torch.randn(rows, SHAPE[1]), args.rounds)
            rates[f"{name} {rows}"] = rate
            print(f"{name:8}{rows:>6}" + "".join(f"{each:>10.0f}" for each in rate.values()))
    for line in _slower(rates):
        print(line)
    print(json.dumps({"threads": args.threads, "shape": SHAPE, "gops": rates}))


def _beside(levels: dict[str, Kernels], args: argparse.Namespace) -> None:
    """The median seconds of this library over those of the other one, which takes turns with it."""
    print(f"{'format':8}{'rows':>6}" + "".join(f"{isa:>13}" for isa in levels))
    ratios: dict[str, dict[str, float]] = {}
    for name in args.formats:
        values = torch.randn(SHAPE)
        weight = panels(quantize(values, FORMATS[name]).data, name, SHAPE, "int8")
        for rows in ROWS:
            x, ratio = torch.randn(rows, SHAPE[1]), ratios.setdefault(f"{name} {rows}", {})
            for isa, own in levels.items():
                other = choose(isa, args.beside)[0]
                seconds: dict[Kernels | None, list[float]] = {own: [], other: []}
                for _ in range(args.rounds):
                    for chosen, taken in seconds.items():
                        library.kernels = chosen
                        start = time.process_time()
                        kernels.linear(x, weight)
                        taken.append(time.process_time() - start)
                mine, theirs = (statistics.median(taken) for taken in seconds.values())
                ratio[isa] = round(mine / theirs, 3)
            print(f"{name:8}{rows:>6}" + "".join(f"{each:>13.2f}" for each in ratio.values()))
    for isa in levels:
        middle = statistics.median(each[isa] for each in ratios.values())
        print(f"{isa}: {middle:.2f}, the median of all")
    print(json.dumps({"threads": args.threads, "shape": SHAPE, "ratios": ratios}))


def _available(isa: str) -> Kernels | None:
    try:
        return choose(isa)[0]
    except ValueError:
        return None


def _rates(
    levels: dict[str, Kernels], weight: PackedTensor, values: Tensor, x: Tensor, rounds: int
) -> dict[str, float]:
    """10⁹ operations a second of torch and of each level."""
    best: dict[str, float] = {}

    def measure(name: str, work: Callable[[], Tensor]) -> None:
        start = time.process_time()
        work()
        best[name] = min(best.get(name, float("inf")), time.process_time() - start)

    for _ in range(rounds):
        measure("torch", lambda: x @ values.T)
        for isa, chosen in levels.items():
            library.kernels = chosen
            measure(isa, lambda: kernels.linear(x, weight))
    operations = 2e-9 * x.numel() * len(values) * torch.get_num_threads()
    return {name: round(operations / seconds, 1) for name, seconds in best.items()}


def _slower(rates: dict[str, dict[str, float]]) -> list[str]:
    """What the table of levels does not promise: a level slower than the one before it."""
    lines = []
    for name, rate in rates.items():
        before = "torch"
        for isa in rate:
            if isa == "torch" or isa in SLOWER_THAN_TORCH:
                continue
            # With AMX experts' products of int8 are AVX-512's own: within the noise the same.
            if rate[isa] < 0.9 * rate[before]:
                lines.append(f"{name}: {isa} is slower than {before}")
            before = isa
    return lines


if __name__ == "__main__":
    main()
