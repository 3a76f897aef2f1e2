"""How long a step takes by the number of threads and by how they wait for one another.

    .venv/bin/python -m benchmarks.waiting_threads [--models tiny embedded 180m] [--rounds 7]
        [--steps 4] [--busy N] [--waits default 10000 passive]

Each choice (threads, wait) is a process of its own, for OpenMP reads its environment once: wait is
a number for GOMP_SPINCOUNT, `passive` (OMP_WAIT_POLICY), `default` (300,000 spins, as GCC's
runtime has them unasked), or `ours`, what importing sfumato sets. The processes take turns, one
reply of so many steps at a time. --busy adds so many loops that take a core each. Prints medians of
the steps, and each one's ratio to the first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack

from benchmarks.turns import Contender, in_turns

_CHILD = """
import json, sys, time
import sfumato, torch
from sfumato.bench import subject
from sfumato.diffusion.limits import Limits
from sfumato.diffusion.sampler_config import fixed_steps
from sfumato.diffusion.canvas import Draft
from sfumato.tasks.alone import generate

name, threads, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)  # while the weights are made, whatever else runs
one = (
    subject.loaded(sfumato.load()) if name == "embedded" else subject.random_subject(name, "q4_k_m")
)
torch.set_num_threads(threads)
length = one.network.config.canvas_length
sampler = fixed_steps(steps).over(one.model.sampler_defaults)
prompt = one.prompt_ids(64, 0)
for line in sys.stdin:
    times, began = [], time.perf_counter()
    for event in generate(one.network, prompt, sampler, Limits(length, ()), seed=0):
        now = time.perf_counter()
        if isinstance(event, Draft):
            times.append(now - began)
        began = now
    print(json.dumps(times[1:]), flush=True)  # the first draft has the prompt in it
"""
_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def environment(wait: str) -> dict[str, str]:
    """What a process that waits so has in its environment."""
    clean = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    if wait == "ours":
        return clean
    if wait == "passive":
        return clean | {"OMP_WAIT_POLICY": "passive"}
    # What is set, sfumato leaves as it is: 300,000 is the runtime's own number.
    return clean | {"GOMP_SPINCOUNT": "300000" if wait == "default" else wait}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["tiny", "embedded", "180m"])
    parser.add_argument("--waits", nargs="+", default=["default", "ours"])
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--busy", type=int, default=0)
    args = parser.parse_args()
    for model in args.models:
        with ExitStack() as stack:
            choices = [(n, wait) for n in args.threads for wait in args.waits]
            children = [
                stack.enter_context(
                    Contender(_CHILD, model, n, args.steps, environment=environment(wait))
                )
                for n, wait in choices
            ]
            for child in children:
                child.measure()  # until the weights are made
            for _ in range(args.busy):
                loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                stack.callback(loop.kill)
            rounds = in_turns(children, args.rounds)
        times = [[each for taken in own[1:] for each in taken] for own in rounds]
        first = statistics.median(times[0])
        for (n, wait), taken in zip(choices, times, strict=True):
            middle = statistics.median(taken)
            low, _, high = statistics.quantiles(taken, n=4)
            print(
                f"{model:9} busy {args.busy}  {n} threads  {wait:8} {1e3 * middle:9.2f} ms "
                f"(quartiles {1e3 * low:.2f} to {1e3 * high:.2f})  {middle / first:.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
