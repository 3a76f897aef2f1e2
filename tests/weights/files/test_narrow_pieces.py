"""What narrow codes stand for, against compressed-tensors, and the blocks that are nearest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file
from tests.support.narrow_files import LAYOUTS, Tensors
from torch import Tensor

from sfumato.weights.files.narrow import read_scheme
from sfumato.weights.files.safetensors import read_safetensors
from sfumato.weights.formats import FORMATS, QuantizedTensor, quantize
from sfumato.weights.joined import NarrowMatrix, group_pieces, nearest

ROWS, COLUMNS = 48, 512


def weight(columns: int = COLUMNS, seed: int = 0) -> Tensor:
    """Normal numbers; rows and columns differ in size, as a network's do."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.rand(ROWS, 1, generator=random).mul(3).exp()
    widths = torch.rand(1, columns, generator=random).mul(2).exp()
    return torch.randn(ROWS, columns, generator=random) * rows * widths * 1e-3


def blocks_of(matrix: NarrowMatrix) -> QuantizedTensor:
    """The nearest blocks of a matrix."""
    format = nearest(matrix.format, matrix.shape[1])
    assert format is not None
    blocks = matrix.in_format(format)
    assert isinstance(blocks, QuantizedTensor)
    return blocks


def written(folder: Path, name: str, tensors: Tensors) -> NarrowMatrix:
    """The tensors of one matrix, in a file, as they are read back."""
    layout = LAYOUTS[name]
    save_file({f"m.{leaf}": value for leaf, value in tensors.items()}, folder / "f.safetensors")
    config = {} if layout.config is None else {"quantization_config": layout.config}
    if layout.config is None:
        (folder / "hf_quant_config.json").write_text(
            '{"quantization": {"quant_algo": "FP8", "exclude_modules": []}}'
        )
    scheme = read_scheme(config, folder)
    assert scheme is not None
    file = read_safetensors(folder / "f.safetensors")
    (piece,) = group_pieces(file.tensors.values(), scheme)
    assert piece.name == "m.weight"
    matrix = piece.read({file.path: file})
    assert isinstance(matrix, NarrowMatrix)
    return matrix


def decompressed(name: str, tensors: Tensors) -> Tensor:
    """What compressed-tensors makes of the same tensors, in float32."""
    config = LAYOUTS[name].config
    assert config is not None
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    wide = {
        k: v.float() if k == "weight_scale" and v.is_floating_point() else v
        for k, v in tensors.items()
    }
    if name == "nvfp4":  # its own call computes in bfloat16
        codes = unpack_fp4_from_uint8(tensors["weight_packed"], ROWS, COLUMNS, torch.float32)
        factor = tensors["weight_global_scale"]
        return dequantize(
            codes,
            wide["weight_scale"],
            args=scheme.weights,
            global_scale=factor,
            dtype=torch.float32,
        )
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    return compressor.decompress(wide, scheme)["weight"]


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "nvfp4"])
def test_values_are_those_of_compressed_tensors(tmp_path: Path, name: str) -> None:
    tensors = LAYOUTS[name].encode(weight())
    theirs = decompressed(name, tensors)
    ours = written(tmp_path, name, tensors).dequantize()
    assert ours.dtype == theirs.dtype == torch.float32
    assert torch.equal(ours, theirs)
    assert (ours - weight()).norm() < 0.13 * weight().norm()


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "nvfp4"])
def test_their_own_compression_is_read(tmp_path: Path, name: str) -> None:
    """The tensors as their library writes them, with their names and dtypes."""
    config = LAYOUTS[name].config
    assert config is not None
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    ours = LAYOUTS[name].encode(weight())
    scales = {k: v for k, v in ours.items() if k.endswith("scale")}
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    wide = {"weight": weight(), **{k: v.float() for k, v in scales.items()}}
    theirs = compressor.compress(wide, scheme)
    theirs["weight_scale"] = ours["weight_scale"]
    assert theirs.keys() == ours.keys()
    matrix = written(tmp_path, name, theirs)
    assert torch.equal(matrix.dequantize(), decompressed(name, theirs))


def test_both_forms_of_nvfp4_are_one(tmp_path: Path) -> None:
    """ModelOpt's scale of all multiplies, that of compressed-tensors divides."""
    values = [
        written(tmp_path, name, LAYOUTS[name].encode(weight())).dequantize()
        for name in ("modelopt-nvfp4", "nvfp4")
    ]
    torch.testing.assert_close(*values, rtol=1e-6, atol=0)
    codes = LAYOUTS["modelopt-nvfp4"].encode(weight())
    codes["weight_scale_2"] *= 2
    assert torch.equal(written(tmp_path, "modelopt-nvfp4", codes).dequantize(), 2 * values[0])


@pytest.mark.parametrize(
    ("name", "columns", "block", "most"),
    [
        ("fp8", 512, "Q8_0", 0.008),
        ("modelopt-fp8", 512, "Q8_0", 0.008),
        ("int8", 512, "Q8_0", 0.0),
        ("int4", 512, "Q4_0", 0.0),
        ("nvfp4", 512, "Q6_K", 0.0005),
        ("nvfp4", 480, "Q8_0", 0.008),
    ],
)
def test_the_nearest_blocks(
    tmp_path: Path, name: str, columns: int, block: str, most: float, note: Callable[[str], None]
) -> None:
    matrix = written(tmp_path, name, LAYOUTS[name].encode(weight(columns)))
    values, blocks = matrix.dequantize(), blocks_of(matrix)
    assert blocks.format.name == block

    def error(other: Tensor) -> float:
        return ((other - values).norm() / values.norm()).item()

    note(f"narrow: {name} in {block}: error {error(blocks.dequantize()):.5f}")
    assert error(blocks.dequantize()) <= most
    # No other kind is nearer.
    others = [b for b in ("Q8_0", "Q6_K", "Q5_0", "Q4_0") if columns % 256 == 0 or b != "Q6_K"]
    for other in others:
        searched = quantize(values, FORMATS[other]).dequantize()
        assert error(blocks.dequantize()) <= error(searched)
    parts = torch.cat([blocks_of(part).data for part in matrix.parts()])
    assert torch.equal(parts, blocks.data)


def test_a_scale_that_float16_cannot_hold(tmp_path: Path) -> None:
    """It is rounded; one that is too large is refused."""
    tensors = LAYOUTS["int4"].encode(weight())
    tensors["weight_scale"] = tensors["weight_scale"].float() * 1.0001
    matrix = written(tmp_path, "int4", tensors)
    error = (blocks_of(matrix).dequantize() - matrix.dequantize()).abs() / matrix.dequantize().abs()
    assert 0 < error.nan_to_num().max() <= 2**-11
    for name in ("int4", "int8", "nvfp4", "fp8"):
        tensors = LAYOUTS[name].encode(weight() * 1e9)
        with pytest.raises(ValueError, match="too large for a block's float16 scale"):
            blocks_of(written(tmp_path, name, tensors))


def test_odd_rows_divide_into_no_blocks() -> None:
    assert nearest(FORMATS["FP8"], 48) is None
    assert nearest(FORMATS["NVFP4"], 48) is None
    format = nearest(FORMATS["NVFP4"], 704)
    assert format is not None
    assert format.name == "Q8_0"


def test_groups_without_any_value(tmp_path: Path) -> None:
    """Zero scales give zeros, and small ones beside a large one keep most of their values."""
    values = weight()
    values[0] = 0
    values[1, :16] = 0
    values[2] *= torch.where(torch.arange(COLUMNS) // 16 % 2 == 0, 1.0, 2**-8)
    matrix = written(tmp_path, "nvfp4", LAYOUTS["nvfp4"].encode(values))
    back = blocks_of(matrix).dequantize()
    assert not back[0].any()
    assert not back[1, :16].any()
    small, kept = (row[2].view(-1, 16)[1::2] for row in (matrix.dequantize(), back))
    assert (kept - small).norm() < 0.5 * small.norm()
