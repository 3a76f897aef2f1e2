"""First contact with a GPU: is each kernel right, how fast are the kernels and the step.

    python -m benchmarks.gpu_first --out gpu            # under 8 minutes, the real sizes
    python -m benchmarks.gpu_first --out gpu --device cpu --sizes tiny --rows 2    # stand-ins

Each part runs in a process of its own, which a wrong kernel may end, and leaves a JSON file:
  1. ceilings: copies and products of this device; all kernels with all candidates of their tiles
     compiled ahead of time, on all cores, into a cache that the later parts use;
  2. kernels, the most valuable first: a float64 reference, poisoned memory, three runs, alone
     against beside other rows, time against torch and the roofline, candidates of tiles;
  3. the step in torch alone, and with the kernels that passed, one after another;
  4. the step as a graph against the step without one, bit for bit;
  5. the figures of a release, each beside its goal and its prediction;
  6. the embedded model's texts beside those of the CPU; a start with a full cache, and
     one with an empty cache of its own; a step of `transformers`, as it is and compiled, with the
     same weights.
A part that fails or takes too long is reported, and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_parts
from benchmarks.gpu_options import new_parser, run_part

SECONDS = 470  # of all parts together
FOR_STEPS = 0.5  # of all seconds, what the kernels leave for the step and the figures
START_S = 25  # of a process that imports torch and reaches the device
COLD = "start:cold"
STEPS = (
    # Name, file, seconds at most, and the share of all seconds that is left for those after it.
    ("step", "3-step", 60, 0.38),
    ("graph", "4-graph", 40, 0.31),
    ("figures", "5-figures", 90, 0.18),
    ("texts", "6-texts", 45, 0.13),
    ("start:warm", "6-start-warm", 40, 0.10),
    (COLD, "6-start-cold", 100, 0.08),
    ("transformers", "7-transformers", 200, 0.0),
)
TAIL = 2000  # characters of a failed part's output that are kept


@dataclass(frozen=True)
class Part:
    """A process: its name, its file, the seconds that it may take, and those of the whole run that
    it must leave for later parts."""

    name: str
    file: str
    seconds: float
    leaves: float = 0.0


class Run:
    """The parts of a run, one after another, and what they found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, Path(options.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._end = time.monotonic() + options.seconds
        for name in ("kernels", "kernels-cold"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def part(self, part: Part) -> dict[str, Any]:
        """Runs a part; its findings, which are in its file too."""
        path = self.folder / f"{part.file}.json"
        path.unlink(missing_ok=True)
        began = time.monotonic()
        limit = min(part.seconds, self._end - began - part.leaves)
        findings: dict[str, Any] = {"failed": "no time was left"}
        if limit > 1:
            findings = self._ran(part, path, limit)
        findings |= {"part": part.name, "seconds": round(time.monotonic() - began, 1)}
        path.write_text(json.dumps(findings, indent=1) + "\n", encoding="utf-8")
        return findings

    def _ran(self, part: Part, path: Path, limit: float) -> dict[str, Any]:
        options = self.options
        cache = self.folder / ("kernels-cold" if part.name == COLD else "kernels")
        own = [
            *("--part", part.name, "--steps", str(options.steps)),
            *("--kernel-seconds", str(options.kernel_seconds), "--began", str(time.time())),
        ]
        variables = {"TRITON_CACHE_DIR": str(cache.resolve())}
        failed, output = run_part("benchmarks.gpu_first", options, path, own, limit, variables)
        findings: dict[str, Any] = {}
        if path.exists():  # what a part found before it failed counts
            findings = json.loads(path.read_text(encoding="utf-8"))
        elif not failed:
            failed = "left no findings"
        if not failed:
            return findings
        return findings | {"failed": failed, "output": output.decode("utf-8", "replace")[-TAIL:]}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.part:
        gpu_parts.run(options)
        return 0
    run = Run(options)
    results = [run.part(Part("ceilings", "1-ceilings", 60))]
    _say("ceilings", results[0])
    leaves = options.seconds * FOR_STEPS
    results.append(run.part(Part("compile", "1-compile", 120, leaves)))
    _say("compile", results[-1])
    names = gpu_parts.kernel_names()
    parts = [
        Part(
            *(f"kernel:{name}", f"2-{number:02}-{_plain(name)}"),
            *(options.kernel_seconds + START_S, leaves),
        )
        for number, name in enumerate(names)
    ]
    parts += [Part(*part[:3], part[3] * options.seconds) for part in STEPS]
    for part in parts:
        results.append(run.part(part))
        _say(part.name, results[-1])
    figures = _figures(results)
    for figure in figures:
        _say(figure["figure"], figure)
    summary = {"options": vars(options), "figures": figures, "parts": results}
    text = json.dumps(summary, indent=1) + "\n"
    (run.folder / "summary.json").write_text(text, encoding="utf-8")
    return int(any("failed" in each or each.get("passed") is False for each in results))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(str(__doc__).splitlines()[0], "a folder for the JSON files")
    parser.add_argument("--steps", type=int, default=48, help="of a canvas, timed")
    parser.add_argument("--kernel-seconds", type=float, default=20)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole run")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of a process of the run
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _plain(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def _figures(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All figures of a release, those of parts of their own too."""
    by_part = {each["part"]: each for each in results}
    figures = list(by_part.get("figures", {}).get("figures", ()))
    for name in ("default", "compiled"):
        own = by_part.get("transformers", {}).get(name, {})
        if "times_as_fast" in own:
            figures.append({
                "figure": f"against transformers, {name}", "unit": "times", "goal": own["goal"],
                "goal_is": "at least", "measured": own["times_as_fast"], "predicted": None,
                "reached": own["reached"],
            })  # fmt: skip
    for kind in ("cold", "warm"):
        own = by_part.get(f"start:{kind}", {})
        if "ready_s" in own:
            figures.append({
                "figure": f"ready with a {kind} cache, weights aside", "unit": "s",
                "goal": own["goal"], "goal_is": "at most", "measured": own["ready_s"],
                "predicted": None, "reached": own["reached"],
            })  # fmt: skip
    return figures


def _say(name: str, findings: dict[str, Any]) -> None:
    """A line for each part: numbers and verdicts, no nested findings."""
    shown = {
        key: round(value, 4) if isinstance(value, float) else value
        for key, value in findings.items()
        if isinstance(value, str | int | float | bool) and key not in ("part", "output")
    }
    if "time" in findings:
        shown["time_ms"] = round(findings["time"]["median_ms"], 4)
    print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
    if "output" in findings:
        print(findings["output"].strip()[-500:], flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
