"""A format of one file, this one, which nothing else knows: read, multiplied, shown and listed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from docs import tables
from tests.cli.conftest import cli  # noqa: F401
from tests.support.gguf_files import gguf_config, random_state
from tests.support.gguf_files import write_gguf as write_floats
from torch import Tensor

from sfumato import ops
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import load_network
from sfumato.weights import formats
from sfumato.weights.files.gguf import read_gguf, write_gguf
from sfumato.weights.files.tensorfile import TensorStream
from sfumato.weights.formats import Format, QuantizedTensor, quantize

CPU = torch.device("cpu")


def _dequantize(blocks: Tensor) -> Tensor:
    scale = blocks[:, :4].clone().view(torch.float32)
    return blocks[:, 4:].clone().view(torch.int8).float() * scale


def _encode(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
    codes = (x / scale).round().to(torch.int8)
    return torch.cat((scale.view(torch.uint8), codes.view(torch.uint8)), dim=1)


TOY = Format("TOY", 16, 20, _dequantize, ggml_type=1000, encode=_encode)
"""Int8 codes with a float32 scale for 16."""


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    formats.register(TOY)
    yield
    del formats.FORMATS["TOY"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint whose matrices are of the format, and one with the same numbers as floats."""
    plain, toy, same = (tmp_path / f"{name}.gguf" for name in ("plain", "toy", "same"))
    write_floats(plain, random_state(gguf_config()), gguf_config())
    source = read_gguf(plain)

    def written(path: Path, read: Any, format: str) -> None:
        streams = [
            TensorStream.of(name, read(name), format if _is_matrix(info.shape, name) else "F32")
            for name, info in source.tensors.items()
        ]
        with path.open("wb") as stream:
            write_gguf(stream, source.metadata, streams)

    written(toy, source.read, "TOY")
    held = read_gguf(toy)
    written(same, lambda name: held.read(name).to(torch.float32), "F32")
    return toy, same


def _is_matrix(shape: tuple[int, ...], name: str) -> bool:
    return len(shape) >= 2 and shape[-1] % TOY.block_size == 0 and "gate_inp" not in name


def test_a_network_of_it_gives_the_logits_of_its_numbers(files: tuple[Path, Path]) -> None:
    logits = []
    for path in files:
        network = load_network(open_checkpoint(path), CPU, torch.float32, cache_type="bf16")
        slot = network.new_slot(16)
        network.encode([torch.arange(5)], [slot])
        logits.append(network.head.logits(network.denoise([torch.arange(8)], [slot])[0]))
    weight = load_network(open_checkpoint(files[0]), CPU, torch.float32).transformer.embed_tokens
    assert isinstance(weight.weight, QuantizedTensor) and weight.weight.format is TOY
    assert torch.allclose(*logits, atol=1e-5)


def test_the_reference_multiplies_it() -> None:
    weight, x = quantize(torch.randn(7, 48), TOY), torch.randn(3, 48)
    assert torch.allclose(ops.linear(x, weight), F.linear(x, weight.dequantize()), atol=1e-5)
    assert ops.pack(weight, "int8") is weight
    assert torch.equal(ops.dense(weight[2:4], torch.float32), weight.to(torch.float32)[2:4])


def test_inspect_shows_it(files: tuple[Path, Path], cli: Any) -> None:  # noqa: F811
    printed = cli("inspect", str(files[0]), "--tensors").out
    assert "TOY" in printed


def test_a_name_or_a_number_is_registered_once() -> None:
    for other in (TOY, Format("OTHER", 16, 20, _dequantize, ggml_type=TOY.ggml_type)):
        with pytest.raises(ValueError, match="registered already, as TOY"):
            formats.register(other)


def test_the_docs_have_all_formats() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "conversion.md"
    rows = tables.formats().splitlines()
    assert rows[-1] == "| TOY | 10 | GGUF | yes | no: torch dequantizes it |"
    known = "\n".join(rows[:-1])
    assert known in page.read_text(encoding="utf-8"), (
        "docs/conversion.md: paste what `python docs/tables.py formats` prints"
    )
