"""How long a process takes until it can serve: from its start to a step that is a graph.

For `gpu_first.py`, with an empty cache of compiled kernels and with a full one.  The making of
random weights, which stands for the reading of a file, is timed apart.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu_step import canvases, filled_slots, timed_steps
from benchmarks.gpu_timing import synchronize

from sfumato import ops
from sfumato.bench.subject import random_subject
from sfumato.diffusion.step.graphs import RUNS
from sfumato.model.placement import pick_device

STEPS = RUNS + 2  # those without a graph, after which one is captured, and two replays
GOALS = {"cold": 60.0, "warm": 20.0}  # s, weights aside


def start(
    kind: str, device: str, sizes: str, format: str, prefix: int, began: float
) -> dict[str, Any]:
    """Seconds of each part. kind: of the cache, "cold" or "warm"; began: when the process was
    started, by the system's clock."""
    imported = time.time()
    target = pick_device(device)
    if target.type == "cuda":
        ops.prepare(target)  # tests the kernels; loading does it otherwise, beside the weights
    synchronize(target)
    prepared = time.time()
    network = random_subject(sizes, format, device=device).network
    synchronize(target)
    made = time.time()
    slots = filled_slots(network, 1, prefix)
    synchronize(target)
    filled = time.time()
    steps = timed_steps(network, canvases(network, 1, STEPS), slots, STEPS, graphs=True)
    ended = time.time()
    ready = ended - began - (made - prepared)
    return {
        "cache": kind,
        "ready_s": ready,
        "goal": GOALS[kind],
        "reached": ready <= GOALS[kind],
        "import_s": imported - began,
        "kernels_s": prepared - imported,
        "weights_s": made - prepared,
        "prompt_s": filled - made,
        "steps_s": ended - filled,
        "step_ms": steps.times,
        "graphs": steps.captured,
    }
