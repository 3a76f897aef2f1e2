"""What published narrow formats cost the embedded model: its tasks, exact answers and steps.

    PYTHONPATH=src:. .venv/bin/python -m benchmarks.narrow_tasks [--count 200]

The matrices of the layers are rounded as the publishers round them and computed as on a GPU: INT4
and NVFP4 unpacked to bfloat16, FP8, INT8 and NVFP4 by FP4 with activations rounded a token at a
time; everything else in bfloat16. All on a CPU in torch; no GPU is asked. Prints a table and one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable

import torch
from benchmarks.format_error import BOTH, PUBLISHED, changed, placed
from benchmarks.fp8_choices import ALL

import sfumato
from sfumato.ops.reference import Weight
from sfumato.train.embedded_data import evaluation_sets
from sfumato.train.evaluate import evaluate
from sfumato.weights.scaled import Kind, round_rows


def of_codes(kind: Kind) -> dict[str, Weight]:
    """The embedded model's matrices as codes with a scale a row."""
    network = sfumato.load(device="cpu").network.transformer
    parameters = network.named_parameters()
    return {at: round_rows(x.detach(), kind) for at, x in parameters if re.fullmatch(ALL, at)}


FORMATS: dict[str, Callable[[], dict[str, Weight]]] = {
    "bfloat16": dict,
    "FP8": lambda: of_codes("FP8"),
    "INT8": lambda: of_codes("INT8"),
    **{name: lambda name=name: changed(name) for name in (*PUBLISHED, BOTH)},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    count = parser.parse_args().count
    torch.set_num_threads(1)
    sets = {name: tasks[:count] for name, tasks in evaluation_sets(0, count).items()}
    print(f"| format | {' | '.join(f'{name}: exact, steps' for name in sets)} |")
    print(f"|---|{'---|' * len(sets)}")
    rows = []
    for name, make in FORMATS.items():
        model = placed(make(), "bfloat16")
        scores = {at: evaluate(model, tasks) for at, tasks in sets.items()}
        cells = [f"{score.exact:.1%}, {score.steps:.2f}" for score in scores.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        exact = {at: [score.tasks, score.exact, score.steps] for at, score in scores.items()}
        rows.append({"format": name, "tasks, exact, steps": exact})
    print(json.dumps({"benchmark": "narrow_tasks", "formats": rows}))


if __name__ == "__main__":
    with torch.no_grad():
        main()
