"""Error of the blocks that narrow matrices become, and of the narrow formats themselves; bytes.

    PYTHONPATH=src:. .venv/bin/python benchmarks/narrow_blocks.py

On normal and on heavy-tailed random numbers, rounded as the tests' writers do: the root mean square
of the difference over that of the numbers. The bytes are those of the 26B-A4B, from its shapes.
"""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from tests.support.narrow_files import LAYOUTS, Layout
from torch import Tensor

from sfumato.bench.subject import random_config
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.loading import expected_shapes
from sfumato.ops.triton.planes import plane_bytes
from sfumato.weights import formats
from sfumato.weights.files.narrow import Kind, Scheme, read_scheme
from sfumato.weights.files.safetensors import read_safetensors
from sfumato.weights.formats import QuantizedTensor, quantize
from sfumato.weights.joined import NarrowMatrix, group_pieces, nearest

FORMATS = ("fp8", "int8", "int4", "nvfp4")
KINDS: dict[str, Kind] = {"fp8": "FP8", "int8": "INT8", "int4": "INT4", "nvfp4": "NVFP4"}
KINDS |= {"modelopt-nvfp4": "NVFP4", "modelopt-fp8": "FP8"}
OTHERS = ("Q8_0", "Q6_K", "Q5_0", "Q4_0")


def main() -> None:
    torch.manual_seed(0)
    print("columns numbers format blocks: error of blocks, of the format; blocks found by search")
    for columns in (2816, 704):
        shape = (1024, columns)
        heavy = torch.distributions.StudentT(4.0).sample(shape)
        for label, numbers in (("normal", torch.randn(shape)), ("heavy", heavy)):
            for name in FORMATS:
                _report(columns, label, name, numbers * 0.02)
    print("format: GB of the narrow tensors and all others in the files; GB as blocks; in planes")
    for name, layout in LAYOUTS.items():
        print(name, *(f"{size / 1e9:.2f}" for size in _sizes(layout, KINDS[name])))


def _report(columns: int, label: str, name: str, numbers: Tensor) -> None:
    with TemporaryDirectory() as folder:
        matrix = matrix_of(LAYOUTS[name], numbers, Path(folder))
        values, format = matrix.dequantize(), nearest(matrix.format, columns)
        assert format is not None
        blocks = matrix.in_format(format)
        assert isinstance(blocks, QuantizedTensor)

    def error(other: Tensor, exact: Tensor) -> float:
        return ((other - exact).norm() / exact.norm()).item()

    searched = {
        other: f"{error(quantize(values, formats.FORMATS[other]).dequantize(), values):.5f}"
        for other in OTHERS
        if columns % formats.FORMATS[other].block_size == 0
    }
    own = f"{error(blocks.dequantize(), values):.5f} {error(values, numbers):.4f}"
    print(columns, label, name, f"{blocks.format.name}:", own, searched)


def _scheme(layout: Layout, folder: Path) -> Scheme:
    scheme = read_scheme({"quantization_config": layout.config}, folder)
    assert scheme is not None
    return scheme


def matrix_of(layout: Layout, numbers: Tensor, folder: Path) -> NarrowMatrix:
    file = folder / "m.safetensors"
    save_file({f"m.{leaf}": part for leaf, part in layout.encode(numbers).items()}, file)
    opened = read_safetensors(file)
    (piece,) = group_pieces(opened.tensors.values(), _scheme(layout, folder))
    matrix = piece.read({file: opened})
    assert isinstance(matrix, NarrowMatrix)
    return matrix


def _sizes(layout: Layout, kind: Kind) -> tuple[float, float, float]:
    """Bytes in the files, of the blocks and bfloat16 that loading makes, and of those with NVFP4 in
    planes of its own."""
    tile = layout.encode(torch.randn(256, 2816))
    share = sum(part.nbytes for part in tile.values()) / (256 * 2816)
    stored = loaded = in_planes = 0.0
    shapes = expected_shapes(DIFFUSION_GEMMA.config.from_hf(random_config("26b-a4b"), {}))
    for name, shape in shapes.items():
        narrow = layout.narrows.fullmatch(name) is not None
        block = nearest(formats.FORMATS[kind], shape[-1]) if narrow else None
        count = math.prod(shape)
        stored += count * (share if block else 2)
        made = count // block.block_size * block.block_bytes if block else 2 * count
        loaded += made
        in_planes += plane_bytes(kind, shape) if block and kind == "NVFP4" else made
    return stored, loaded, in_planes


if __name__ == "__main__":
    main()
