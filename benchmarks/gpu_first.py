"""First contact with a GPU: is each operation right, how fast are the kernels and the step.

    python -m benchmarks.gpu_first --out gpu          # again, until nothing is left
    python -m benchmarks.gpu_first --out gpu --part operations --part step
    python -m benchmarks.gpu_first --out gpu --device cpu --sizes tiny --rows 2    # stand-ins

A command takes ten minutes at most and goes on where the one before stopped; half an hour does all.
Each part runs in a process of its own, which a wrong kernel may end, and each finding is a line of
`results.jsonl`, written at once:
  1. operations: each at the model's widths, in children, with weights of all usual formats;
  2. ceilings: copies and products of this device;
  3. layers: two real-size layers and the head, eager, captured, and on one stream, bit for bit;
  4. step: in torch alone and with the operations that passed, and a profile of one step, which
     gives the times of all kernels;
  5. compile and kernel:NAME: candidates of tiles, each case against float64, in poisoned memory, in
     three runs, alone against beside other rows, against torch and the roofline;
  6. serve: the embedded model, served; figures: of a release, with random weights; graph: the whole
     step captured; texts: beside those of the CPU; start:warm and start:cold; transformers, with
     the same weights.
`report.md` says what failed, and has a table of goals, floors, predictions and measurements, to be
pasted into an issue.  Compiled kernels are in the folder --cache, which may be brought along: `make
aot AOT='--target sm_90 --every'` with TRITON_CACHE_DIR set to its `kernels` fills it.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_parts
from benchmarks.gpu_options import new_parser, run_part
from benchmarks.gpu_parts import OPERATIONS, Results

SECONDS = 570  # of one command
COLD = "start:cold"
TAIL = 2000  # characters of a failed part's output that are kept


@dataclass(frozen=True)
class Part:
    """A process: its name, and the seconds that it may take."""

    name: str
    seconds: float


def all_parts(kernel_seconds: float) -> list[Part]:
    """In their order."""
    kernels = [Part(f"kernel:{name}", kernel_seconds + 30) for name in gpu_parts.CASES]
    return [
        *(Part(OPERATIONS, 500), Part("ceilings", 60), Part("layers", 120), Part("step", 150)),
        *(Part("compile", 300), *kernels, Part("serve", 120), Part("figures", 150)),
        *(Part("graph", 60), Part("texts", 60), Part("start:warm", 60), Part(COLD, 150)),
        Part("transformers", 200),
    ]


class Run:
    """The parts of a run, one after another."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.cache = Path(options.cache or f"{options.out}-cache").resolve()
        for folder in (Path(options.out), self.cache):
            folder.mkdir(parents=True, exist_ok=True)
        self.results = Results(Path(options.out) / "results.jsonl")
        self._end = time.monotonic() + options.seconds

    def has_time(self, part: Part) -> bool:
        """Whether enough is left of the command's time for a part to be worth beginning."""
        return self._end - time.monotonic() > part.seconds / 2

    def part(self, part: Part) -> dict[str, Any]:
        """Runs a part; its findings, those before a failure too."""
        began = time.monotonic()
        limit = min(part.seconds, self._end - began)
        # Operations that have been tried stay so.
        self.results.add(part.name, begins=part.name != OPERATIONS)
        if part.name == COLD:
            shutil.rmtree(self.cache / "kernels-cold", ignore_errors=True)
        cache = self.cache / ("kernels-cold" if part.name == COLD else "kernels")
        own = [
            *("--part", part.name, "--steps", str(self.options.steps)),
            *("--kernel-seconds", str(self.options.kernel_seconds), "--began", str(time.time())),
        ]
        variables = {"TRITON_CACHE_DIR": str(cache)}
        file = self.results.path
        failed, output = run_part("benchmarks.gpu_first", self.options, file, own, limit, variables)
        text = output.decode("utf-8", "replace")[-TAIL:] if failed else ""
        seconds = round(time.monotonic() - began, 1)
        self.results.add(part.name, failed=failed, output=text, seconds=seconds)
        return self.results.read()[part.name]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.file:
        gpu_parts.run(options)
        return 0
    run = Run(options)
    parts = all_parts(options.kernel_seconds)
    if unknown := set(options.part) - {part.name for part in parts}:
        names = ", ".join(part.name for part in parts)
        raise SystemExit(f"--part: {', '.join(sorted(unknown))}: is none of {names}")
    known, left = run.results.read(), list[str]()
    for part in parts:
        is_done = not known.get(part.name, {}).get("failed", True)
        if part.name not in options.part if options.part else is_done:
            continue
        if run.has_time(part):
            _say(part.name, run.part(part))
        else:
            left.append(part.name)
    results = run.results.read()
    text = report(results)
    (Path(options.out) / "report.md").write_text(text, encoding="utf-8")
    print(text, end="")
    if left:
        print(f"left for the next command: {', '.join(left)}")
    return int(bool(wrong(results)))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(str(__doc__).splitlines()[0], "a folder for the results")
    parser.add_argument("--steps", type=int, default=48, help="of a canvas, timed")
    parser.add_argument("--kernel-seconds", type=float, default=20)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of this command")
    parser.add_argument("--part", action="append", default=[], help="this part alone, anew")
    parser.add_argument("--cache", help="a folder for compiled kernels; default: OUT-cache")
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def wrong(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What failed, and why, a line each."""
    lines = [
        f"{name}: {findings['failed']}" if findings.get("failed") else f"{name}: is wrong"
        for name, findings in results.items()
        if findings.get("failed") or findings.get("passed") is False
    ]
    tried = gpu_parts.tried(results)
    return [f"{name}: {why}" for name, why in tried.items() if why] + lines


def report(results: Mapping[str, Mapping[str, Any]]) -> str:
    """What failed, and the table, in Markdown."""
    ceilings = results.get("ceilings", {})
    device = ceilings.get("limits", {}).get("name", "a device")
    tried = gpu_parts.tried(results)
    passed = sum(not why for why in tried.values())
    lines = [f"# {device}", "", f"{passed} of {len(tried)} operations passed."]
    lines += ["", *(f"- {line}" for line in wrong(results))]
    lines += [
        "",
        "| figure | unit | goal | floor | predicted | measured |",
        "|---|---|---|---|---|---|",
    ]
    for row in _rows(results):
        numbers = (f"{each:.4g}" if isinstance(each, float | int) else "" for each in row[2:])
        lines.append(f"| {row[0]} | {row[1]} | {' | '.join(numbers)} |")
    return "\n".join([*lines, "", f"`{ceilings.get('environment', {})}`", ""])


def _rows(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Name, unit, goal, floor, prediction and measurement."""
    rows: list[tuple[Any, ...]] = []
    for name, findings in results.items():
        if "time" in findings:
            times = findings["floor_ms"], findings["predicted_ms"], findings["time"]["median_ms"]
            rows.append((name, "ms", None, *times))
        if "ready_s" in findings:
            rows.append((name, "s", findings.get("goal"), None, None, findings["ready_s"]))
        for key in ("default", "compiled"):
            own = findings.get(key)
            if isinstance(own, Mapping) and "times_as_fast" in own:
                row = f"{name}, {key}", "times", own["goal"], None, None, own["times_as_fast"]
                rows.append(row)
        for figure in findings.get("figures", ()):
            given = (figure.get(key) for key in ("goal", "floor", "predicted", "measured"))
            rows.append((figure["figure"], figure["unit"], *given))
    return rows


def _say(name: str, findings: Mapping[str, Any]) -> None:
    """A line for each part: numbers and verdicts, no nested findings."""
    shown = {
        key: round(value, 4) if isinstance(value, float) else value
        for key, value in findings.items()
        if isinstance(value, str | int | float | bool) and value != "" and key != "output"
    }
    if "time" in findings:
        shown["time_ms"] = round(findings["time"]["median_ms"], 4)
    print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
    if findings.get("output"):
        print(findings["output"].strip()[-500:], flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
