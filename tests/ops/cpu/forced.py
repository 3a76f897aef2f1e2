"""One instruction set after another, each made the choice while a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.support.gguf_files import encode
from torch import Tensor

from sfumato.ops.cpu import library
from sfumato.ops.cpu.library import ISAS, Kernels, choose
from sfumato.ops.cpu.panels import PackedTensor, panels
from sfumato.weights import formats
from sfumato.weights.formats import QuantizedTensor, of_files

FORMATS = (*of_files("blocks"), "BF16")


def _available(isa: str) -> Kernels | str:
    """The kernels, or why there are none."""
    try:
        kernels = choose(isa)[0]
    except ValueError as error:
        return str(error)
    assert kernels is not None
    return kernels


_KERNELS = {isa: _available(isa) for isa in ISAS}

each_isa = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(isa, marks=pytest.mark.skipif(isinstance(kernels, str), reason=str(kernels)))
        for isa, kernels in _KERNELS.items()
    ],
)
"""Parametrizes a test with the names that `forced` takes."""

compiled = pytest.mark.skipif(library.kernels is None, reason=library.reason)
"""Skips a test where nothing is compiled."""


def runs(isa: str) -> bool:
    """Whether this machine runs it."""
    return isinstance(_KERNELS[isa], Kernels)


RUNNING = tuple(isa for isa in ISAS if runs(isa))
"""For tests whose inputs cost more than what each instruction set makes of them."""


@contextmanager
def forced(isa: str) -> Iterator[None]:
    """Operations run with this instruction set, which an error within names."""
    before, kernels = library.kernels, _KERNELS[isa]
    assert isinstance(kernels, Kernels)
    library.kernels = kernels
    try:
        yield
    except Exception as error:
        error.add_note(f"with {isa}")
        raise
    finally:
        library.kernels = before


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks(name: str, *shape: int, seed: int = 0) -> QuantizedTensor:
    """Random blocks whose values have about deviation 1."""
    data = torch.from_numpy(encode(normal(seed, *shape), name, seed))
    return QuantizedTensor(data, formats.FORMATS[name], shape)


def weights(name: str, activations: str, *shape: int, seed: int = 0) -> tuple[PackedTensor, Tensor]:
    """A packed weight, and the float32 of what was packed."""
    if name == "BF16":
        stored = normal(seed, *shape).bfloat16()
        return panels(stored, name, shape, "bf16"), stored.float()
    quantized = blocks(name, *shape, seed=seed)
    return panels(quantized.data, name, shape, activations), quantized.dequantize()


def relative(got: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm())
