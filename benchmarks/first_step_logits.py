"""First-step logits of tiny random GGUF files: Sfumato, llama.cpp, and the exact result.

    .venv/bin/python -m benchmarks.first_step_logits --eval llama-diffusion-gemma-eval [--seeds 8]

For every format and seed one file is written, with the shapes of the `tiny` preset (rows of 256,
attention windows shorter than the prompt, 24 experts of which 8 are chosen) and the canvas of the
published model. Three read it and its 20 + 256 random tokens: Sfumato, rounding activations in each
of its ways; the peer, which rounds them in its own; and, as exact, plain torch in float32 on the
dequantized weights. Prints a table of cosines, the worst and the median over seeds, and median
relative L2 distances, with one JSON line. Fails where a cosine to the peer is below 0.999, or where
an F32 file, which shows a wrong window or scalar, is off by more than 1e-3.

Rounding may decide a router's near tie for the last place otherwise than exact arithmetic does. The
preset's routers spread their scores, as random rows alone would not, so that the last place weighs
little; see `ROUTER_SPREAD` in `sfumato/bench/subject.py`. And of 256 positions none weighs
much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.random_checkpoint import header, outgoing
from torch import Tensor

from sfumato.bench.subject import random_checkpoint
from sfumato.convert.files import save_gguf
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import load_network
from sfumato.model.quantization import TARGETS, QuantRecipe
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.formats import QuantizedTensor

PROMPT, CANVAS = 20, 256  # tokens
LEAST = 0.999  # of cosines to the peer
MOST_F32 = 1e-3  # of L2 distances where neither rounds; the peer's GELU is a float16 table
CPU, FLOAT32 = torch.device("cpu"), torch.float32
FILES = TARGETS | {
    "q5_1": QuantRecipe("Q5_1", 9),
    "q4_0": QuantRecipe("Q4_0", 2),
    "iq4_nl": QuantRecipe("IQ4_NL", 25),
}
PEER = "llama.cpp"


@dataclass(frozen=True)
class Dequantized(Checkpoint):
    """A checkpoint whose tensors are read as float32, so that no product rounds a factor."""

    def read(self, name: str) -> Tensor:
        value = super().read(name)
        return value.dequantize() if isinstance(value, QuantizedTensor) else value.float()


def dequantized(checkpoint: Checkpoint) -> Dequantized:
    values = {field.name: getattr(checkpoint, field.name) for field in fields(Checkpoint)}
    tensors = {name: replace(info, format="F32") for name, info in checkpoint.tensors.items()}
    return Dequantized(**values | {"tensors": tensors})


def write(path: Path, target: QuantRecipe, seed: int) -> None:
    checkpoint = random_checkpoint("tiny", "f32", seed=seed)
    checkpoint.metadata["config"]["canvas_length"] = CANVAS
    save_gguf(path, header(checkpoint, target), outgoing(checkpoint, target), force=True)


def logits(
    checkpoint: Checkpoint, prompt: Tensor, canvas: Tensor, dtype: torch.dtype, activations: str
) -> Tensor:
    network = load_network(checkpoint, CPU, dtype, activations=activations)
    cache = network.new_cache(1, PROMPT)
    network.encode([prompt], cache)
    return network.head.logits(network.denoise([canvas], cache))


def peers(program: Path, model: Path, prompt: Tensor, canvas: Tensor) -> Tensor:
    ids, out = [model.with_suffix(end) for end in (".prompt", ".canvas")], model.with_suffix(".out")
    for path, tokens in zip(ids, (prompt, canvas), strict=True):
        path.write_bytes(tokens.numpy().astype("<i4").tobytes())
    done = subprocess.run([program, model, *ids, out], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{program}: {done.stderr[-1000:]}")
    return torch.from_numpy(np.fromfile(out, "<f4")).view(CANVAS, -1)


def ways(target: QuantRecipe) -> dict[str, tuple[torch.dtype, str]]:
    """By name, the dtypes and activations with which Sfumato runs such a file."""
    if target.base in ("F32", "F16"):
        return {"float32": (FLOAT32, "int8")}
    if target.base == "BF16":
        return {"float32": (FLOAT32, "int8"), "bfloat16": (torch.bfloat16, "int8")}
    return {"int8": (FLOAT32, "int8"), "bf16": (FLOAT32, "bf16")}


def everyones(program: Path, model: Path, target: QuantRecipe, seed: int) -> dict[str, Tensor]:
    """The logits [canvas, vocabulary] of each way, of the peer, and exact."""
    write(model, target, seed)
    checkpoint = open_checkpoint(model)
    vocabulary = checkpoint.tensors["embed_tokens.weight"].shape[0]
    random = torch.Generator().manual_seed(seed)
    prompt, canvas = (torch.randint(vocabulary, (n,), generator=random) for n in (PROMPT, CANVAS))
    return {
        "exact": logits(dequantized(checkpoint), prompt, canvas, FLOAT32, "int8"),
        PEER: peers(program, model, prompt, canvas),
        **{name: logits(checkpoint, prompt, canvas, *how) for name, how in ways(target).items()},
    }


def distances(ours: list[Tensor], others: list[Tensor]) -> dict[str, float]:
    pairs = [
        (a.double().flatten(), b.double().flatten()) for a, b in zip(ours, others, strict=True)
    ]
    cosines = [float(torch.cosine_similarity(a, b, dim=0)) for a, b in pairs]
    lengths = [float((a - b).norm() / b.norm()) for a, b in pairs]
    return {
        "cosine_worst": min(cosines),
        "cosine_median": statistics.median(cosines),
        "l2_median": statistics.median(lengths),
    }


def row(format: str, who: str, distances: dict[str, dict[str, float]]) -> str:
    cells = [
        "{cosine_worst:11.6f}{cosine_median:10.6f}{l2_median:10.1e}".format(**distances[other])
        if other in distances
        else " " * 31
        for other in (PEER, "exact")
    ]
    return f"{format:8}{who:10}" + "".join(cells)


def measured(
    program: Path, target: QuantRecipe, seeds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Who → to whom → distances over all seeds."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            runs.append(everyones(program, Path(folder) / "random.gguf", target, seed))
    them = {name: [run[name] for run in runs] for name in runs[0]}
    rows = {
        who: {other: distances(them[who], them[other]) for other in (PEER, "exact")}
        for who in ways(target)
    }
    return rows | {PEER: {"exact": distances(them[PEER], them["exact"])}}


def faults(results: dict[str, dict[str, dict[str, dict[str, float]]]]) -> list[str]:
    """What is further from the peer than rounding explains, in words."""
    lines = []
    for format, rows in results.items():
        for who, distances in rows.items():
            if PEER in distances and (worst := distances[PEER]["cosine_worst"]) < LEAST:
                lines.append(f"{format}, {who}: a cosine to {PEER} of {worst:.6f}, below {LEAST}")
    if "f32" in results and (l2 := results["f32"]["float32"][PEER]["l2_median"]) > MOST_F32:
        lines.append(f"f32: a median L2 distance to {PEER} of {l2:.1e}, above {MOST_F32}")
    return lines


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--eval", type=Path, required=True, help="llama-diffusion-gemma-eval")
    parser.add_argument("--seeds", type=int, default=8, help="files of each format (8)")
    parser.add_argument("--formats", nargs="+", choices=FILES, default=list(FILES), metavar="NAME")
    options = parser.parse_args()
    if not options.eval.is_file():
        parser.error(f"--eval: {options.eval} is no file; build llama.cpp's example of that name")
    print(f"{f'{options.seeds} seeds':18}{'to ' + PEER:>31}{'to exact':>31}")
    print(f"{'':18}" + 2 * f"{'cos, worst':>11}{'median':>10}{'L2':>10}")
    results = {}
    for format in options.formats:
        results[format] = measured(options.eval.resolve(), FILES[format], options.seeds)
        for who, distances in results[format].items():
            print(row(format, who, distances), flush=True)
    given = {"benchmark": "first_step_logits", "seeds": options.seeds}
    print(json.dumps(given | {"distances": results}))
    if lines := faults(results):
        raise SystemExit("\n".join(lines))


if __name__ == "__main__":
    main()
