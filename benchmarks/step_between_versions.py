"""A denoising step of two versions of the source, interleaved: is the newer one slower?

    .venv/bin/python -m benchmarks.step_between_versions --before OLD/src --after src MODEL ...

Both folders hold a version's `sfumato` package with its compiled library; a MODEL is a checkpoint,
or `embedded`. Each version runs in a process of its own, and the older one in a second
process too: the ratio of the older one to itself is the spread to hold the other ratio against.
The processes take turns, a round each; a round is some steps of an engine's rows. Figures are
medians over all steps, ratios medians over the rounds. With --prefixes it is the forward of rows
whose slots hold so many positions (of zeros: the time is the same), and no engine. Prints a table
and one JSON line.
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
import json, sys, time
import torch
import sfumato
try:
    from sfumato.diffusion.sampler import Never
except ImportError:  # where it stood before
    from sfumato.diffusion.stopping import Never
from sfumato.engine import Engine, EngineConfig, Request

path, dtype, threads, rows, steps = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
prefixes = [int(length) for length in sys.argv[6:]]
torch.set_num_threads(threads)
options = {} if dtype == "auto" else {"dtype": dtype}
model = sfumato.load(None if path == "embedded" else path, **options)

if prefixes:
    network, longest = model.network, max(prefixes)
    if hasattr(network, "new_slots"):  # one pool
        slots = network.new_slots(len(prefixes), longest)
    else:
        slots = [network.new_slot(longest) for _ in prefixes]
    for slot, length in zip(slots, prefixes):
        slot.length = length
    canvases = [torch.arange(model.config.canvas_length) % 100 for _ in slots]
    for _ in sys.stdin:
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            network.denoise(canvases, slots)
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)
    sys.exit()

engine = Engine(model, EngineConfig(slots=rows, context=1024))
sampler = sfumato.SamplerConfig(max_steps=steps, stopping=Never(), ignore_eos=True)
vocab = model.config.vocab_size
for number, line in enumerate(sys.stdin):
    for row in range(rows):
        ids = [(7 * row + 13 * i + number) % (vocab - 8) + 5 for i in range(64)]
        length = model.config.canvas_length
        engine.submit(Request(ids=ids, max_tokens=length, sampler=sampler, seed=row))
    engine.step()  # encodes, too
    times = []
    for _ in range(steps - 2):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    while engine.step():
        pass
    print(json.dumps(times), flush=True)
"""


class Version(Contender):
    """A version of the source, whose rounds are lists of seconds."""

    def __init__(self, source: Path, model: str, options: argparse.Namespace, rows: int) -> None:
        figures = (options.threads, rows, options.steps)
        environment = os.environ | {
            "PYTHONPATH": str(source),
            "OMP_NUM_THREADS": str(options.threads),
        }
        arguments = (model, options.dtype, *figures, *options.prefixes)
        super().__init__(WORKER, *arguments, environment=environment)


def compare(model: str, options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """The figures of one model with so many rows."""
    sources = (options.before, options.after, options.before)
    with ExitStack() as stack:
        versions = [
            stack.enter_context(Version(source, model, options, rows)) for source in sources
        ]
        taken = in_turns(versions, options.rounds)
    before, after, again = (
        [1e3 * statistics.median(times) for times in rounds[1:]] for rounds in taken
    )

    def ratio(one: list[float], other: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(one, other, strict=True))

    return {
        "model": model,
        "rows": rows,
        "before_ms": round(statistics.median(before + again), 2),
        "after_ms": round(statistics.median(after), 2),
        "after/before": round((ratio(after, before) + ratio(after, again)) / 2, 3),
        "before/itself": round(ratio(again, before), 3),
    }


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="checkpoints, or `embedded`")
    parser.add_argument("--before", type=Path, required=True, help="folder of the older package")
    parser.add_argument("--after", type=Path, required=True, help="folder of the newer package")
    parser.add_argument("--rows", default="1,8", help="rows of a step (%(default)s)")
    parser.add_argument(
        "--prefixes", type=_lengths, default=(), help="lengths of prefixes, as 32000,500,500"
    )
    parser.add_argument("--steps", type=int, default=12, help="steps of a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="of activations (%(default)s)")
    options = parser.parse_args()
    results = []
    print(f"{'model':32}{'rows':>5}{'before ms':>11}{'after ms':>10}{'ratio':>8}{'itself':>8}")
    for model in options.models:
        for rows in [len(options.prefixes)] if options.prefixes else _lengths(options.rows):
            figures = compare(model, options, rows)
            results.append(figures)
            print(
                "{:32}{:5}{:11.2f}{:10.2f}{:8.3f}{:8.3f}".format(
                    Path(model).name, *[*figures.values()][1:]
                )
            )
    setting = {
        "benchmark": "step_between_versions",
        "threads": options.threads,
        "dtype": options.dtype,
        "prefixes": options.prefixes,
    }
    print(
        json.dumps(
            {**setting, "steps": options.steps, "rounds": options.rounds, "results": results}
        )
    )


if __name__ == "__main__":
    main()
