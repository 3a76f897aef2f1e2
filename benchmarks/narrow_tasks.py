"""What published narrow formats cost the embedded model: its tasks, exact answers and steps.

    PYTHONPATH=src:. .venv/bin/python -m benchmarks.narrow_tasks [--count 200] [--seeds 3]

The matrices that a publication narrows are rounded as its publisher rounds them, and computed as on
a GPU: INT4 and NVFP4 unpacked to bfloat16, FP8 and INT8 with activations rounded a
token at a time; everything else in bfloat16. A seed draws the tasks and the noise that they are
answered with; what is right is counted over all seeds. All on a CPU in torch; no GPU is asked.
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable

import torch
from benchmarks.format_error import changed, placed
from benchmarks.fp8_choices import ALL

import sfumato
from sfumato.bench.evaluate import Score, evaluate
from sfumato.model.quantization import takes_int4
from sfumato.train.embedded_data import evaluation_sets
from sfumato.weights.formats import Kind, Weight, round_rows


def of_codes(kind: Kind) -> dict[str, Weight]:
    """The embedded model's matrices as codes with a scale a row."""
    network = sfumato.load(device="cpu").network.transformer
    parameters = network.named_parameters()
    return {at: round_rows(x.detach(), kind) for at, x in parameters if re.fullmatch(ALL, at)}


def of_experts(format: str) -> dict[str, Weight]:
    return {name: value for name, value in changed(format).items() if ".experts." in name}


def of_int4() -> dict[str, Weight]:
    """Attention and experts; rows that do not divide into groups of 32 stay."""
    made = changed("INT4").items()
    return {name: value for name, value in made if takes_int4(name, tuple(value.shape))}


FORMATS: dict[str, Callable[[], dict[str, Weight]]] = {
    "bfloat16": dict,
    "FP8": lambda: of_codes("FP8"),
    "INT8": lambda: of_codes("INT8"),
    "INT4, attention and experts": of_int4,
    "NVFP4": lambda: changed("NVFP4"),
    "NVFP4, experts alone": lambda: of_experts("NVFP4"),
}
NAMES = ("sudoku", "sudoku_hard", "questions", "chat")


def pooled(scores: list[Score]) -> tuple[int, int, float]:
    """Tasks, right ones, and the steps of a canvas on average."""
    tasks = sum(score.tasks for score in scores)
    right = sum(round(score.exact * score.tasks) for score in scores)
    return tasks, right, sum(score.steps for score in scores) / len(scores)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    sets = [evaluation_sets(seed, given.count) for seed in range(given.seeds)]
    print(f"| format | {' | '.join(f'{name}: exact, steps' for name in NAMES)} |")
    print(f"|---|{'---|' * len(NAMES)}")
    rows = []
    for name in given.formats:
        model, cells, figures = placed(FORMATS[name](), "bfloat16"), [], {}
        for at in NAMES:
            scores = [
                evaluate(model, tasks[at][: given.count], seed=seed)
                for seed, tasks in enumerate(sets)
            ]
            figures[at] = tasks, right, steps = pooled(scores)
            cells.append(f"{right / tasks:.1%} of {tasks}, {steps:.2f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        rows.append({"format": name, "tasks, right, steps": figures})
    print(json.dumps({"benchmark": "narrow_tasks", "formats": rows}))


if __name__ == "__main__":
    with torch.no_grad():
        main()
