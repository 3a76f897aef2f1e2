"""What a format of weights costs the embedded model, and what a GPU's roundings add: errors of
logits, and argmaxes that agree.

    PYTHONPATH=src:. .venv/bin/python -m benchmarks.format_error [--tasks 40]

The matrices of the layers become blocks, or codes of published checkpoints, row by row; rows that
do not divide are filled with zeros meanwhile. "Kernels" compares two networks of the same numbers:
one computes in bfloat16 as kernels do (weights unpacked and rounded once, products of bfloat16
with sums of float32, activations in bfloat16), the other in float32 from dequantized weights.
"Format" compares that one with the model before. The steps, and what a clear argmax is, are those
of `fp8_choices.py`. No GPU is asked. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from benchmarks.fp8_choices import ALL, Step, logits_of, steps
from benchmarks.narrow_blocks import matrix_of
from tests.support.narrow_files import LAYOUTS
from torch import Tensor
from torch.nn.functional import pad

import sfumato
from sfumato.model.loading import place
from sfumato.weights.formats import FORMATS, Weight, of_files, quantize

PUBLISHED = {"INT4": "int4", "NVFP4": "nvfp4"}
WIDTH = 256  # of the widest blocks


def dequantized(format: str, matrix: Tensor) -> Tensor:
    """float32 [rows, columns] in a format and back."""
    wide = pad(matrix, (0, -matrix.shape[-1] % WIDTH))
    if format in PUBLISHED:
        with TemporaryDirectory() as folder:
            values = matrix_of(LAYOUTS[PUBLISHED[format]], wide, Path(folder)).values()
    else:
        values = quantize(wide, FORMATS[format]).dequantize()
    return values[:, : matrix.shape[-1]].contiguous()


def changed(format: str, only: int | None = None) -> dict[str, Weight]:
    """The embedded model's matrices in a format, by name; only: of one layer."""
    network = sfumato.load(device="cpu").network.transformer
    made: dict[str, Weight] = {}
    for name, value in network.named_parameters():
        if re.fullmatch(ALL, name) and (only is None or name.startswith(f"layers.{only}.")):
            rows = value.detach().flatten(0, -2)
            made[name] = dequantized(format, rows).view(value.shape)
    return made


def placed(matrices: dict[str, Weight], dtype: str) -> sfumato.Model:
    """The embedded model with other matrices, which computes in a dtype."""
    model = sfumato.load(device="cpu", dtype=dtype)
    network = model.network
    for name, value in matrices.items():
        path, _, leaf = name.rpartition(".")
        given = value.to(network.dtype) if isinstance(value, Tensor) else value
        place(network.transformer.get_submodule(path), leaf, given)
    return model


def difference(ours: Tensor, right: Tensor) -> dict[str, float]:
    """Of logits [n, vocab], their means taken off: relative error, the share of argmaxes that agree
    where the two best are further apart than twice the error, how many these are, and of all."""
    centred = right - right.mean(-1, keepdim=True)
    off = ours - ours.mean(-1, keepdim=True) - centred
    best = right.topk(2, dim=-1).values
    apart = best[:, 0] - best[:, 1] > 2 * float(off.square().mean().sqrt())
    same = (ours.argmax(-1) == right.argmax(-1)).double()
    return {
        "error": float(off.norm() / centred.norm()),
        "agree": float(same[apart].mean()),
        "clear": int(apart.sum()),
        "agree_of_all": float(same.mean()),
    }


def all_logits(model: sfumato.Model, given: list[Step]) -> Tensor:
    return torch.cat([logits_of(model, *step) for step in given])


def figures(format: str, given: list[Step], before: Tensor, layers: int) -> dict[str, object]:
    matrices = changed(format)
    exact = all_logits(placed(matrices, "float32"), given)
    ours = all_logits(placed(matrices, "bfloat16"), given)
    by_layer = [
        difference(all_logits(placed(changed(format, layer), "float32"), given), before)["error"]
        for layer in range(layers)
    ]
    kernels, own = difference(ours, exact), difference(exact, before)
    return {"format": format, "kernels": kernels, "of_format": own, "by_layer": by_layer}


def row(made: dict[str, object]) -> str:
    cells = [str(made["format"])]
    for name in ("kernels", "of_format"):
        part = made[name]
        assert isinstance(part, dict)
        cells += [f"{part['error']:.4f}", f"{part['agree']:.2%} of {part['clear']:,}"]
    layers = made["by_layer"]
    assert isinstance(layers, list)
    return "| " + " | ".join([*cells, ", ".join(f"{error:.3f}" for error in layers)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=40)
    tasks = parser.parse_args().tasks
    torch.set_num_threads(1)
    model = sfumato.load(device="cpu")
    given = steps(model, tasks)
    before = all_logits(model, given)
    print("| format | kernels: error | argmax | format: error | argmax | of each layer alone |")
    print("|---|---|---|---|---|---|")
    made = []
    written = [name for name, each in of_files("blocks").items() if each.encode]
    for format in (*written, *PUBLISHED):
        made.append(figures(format, given, before, len(model.config.layers)))
        print(row(made[-1]), flush=True)
    print(json.dumps({"benchmark": "format_error", "formats": made}))


if __name__ == "__main__":
    with torch.no_grad():
        main()
