"""What a kernel is to the rest of the package, and how one is launched.

A `Kernel` holds a function of Triton beside what a compilation without tensors needs, so that
`ahead_of_time`, the tests and the benchmarks find all kernels in one list.  This module needs no
Triton and knows no operation.

Where the environment variable TRITON_INTERPRET is 1 before Triton is imported, all kernels of the
process are interpreted on a CPU.  The interpreter multiplies the bit patterns of bfloat16 numbers
and truncates where it stores them, so interpreted kernels get UPCAST = True, by which they
multiply float32 operands, and tests give them float32 tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from sfumato.ops.triton.planes import LAYOUTS
from sfumato.ops.triton.tiles import Tile, has_copy_engine
from sfumato.weights.formats import FORMATS

MODULES = ("attention", "experts", "head", "linear", "norms", "step", "weights")
"""The modules of this package that register kernels."""

FP_FUSION = False
"""Whether the compiler may contract a · b + c into one rounding, outside of matrix products.  Its
default differs between versions of Triton.  Without contraction, elementwise arithmetic rounds as
the same operations of torch do; these kernels wait for memory or matrix units, not for it."""


EXACT = ", float32"


class LaunchError(RuntimeError):
    """A kernel did not run: it does not compile, or needs more than the device has.  It wrote
    nothing."""


@dataclass(frozen=True)
class Kernel:
    """A kernel and the sizes of the 26B-A4B, with which it is compiled ahead of time.

    types: what each parameter is that is no constant, as Triton names it: "i32", "fp32", "*bf16",
    "tensordesc<bf16[{ROWS}, {COLUMNS}]>" with constants in braces; spaces count, in the keys of its
    cache.  ":16" after a type says that the address or number is a multiple of 16.  sizes: the
    constants that no tile gives, and parameters that are None.

    Every kernel has a constant UPCAST.  One that also has DESCRIPTORS takes its matrices as tensor
    descriptors where that is True, else as addresses; see `weights.as_descriptor`.

    variants: by a name, sizes that differ where the kernel also serves so and its code differs.
    shapes: by a name, other sizes that the kernel has in the 26B-A4B, with the same code, or with
    such as unpacks the numbers of another cache; or what it has in other networks.
    columns: of a kernel that reads planes, which constant is the number of their columns.
    format: of a kernel of one format of weights alone, its name.
    exact: parameters, such as the weights of norms, that are float32 where a file stores them so.
    """

    name: str  # its tiles stand under this name in tiles.toml
    function: Any  # decorated by triton.jit
    types: Mapping[str, str]
    sizes: Mapping[str, int | float | bool | None]
    variants: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    shapes: Mapping[str, Mapping[str, int | bool]] = field(default_factory=dict)
    columns: str = ""
    format: str = ""
    exact: tuple[str, ...] = ()

    def as_variant(self, name: str) -> Kernel:
        """The kernel with the sizes of one of its variants or shapes, and of weights of a format
        in planes, as "Q8_0" or "Q8_0: " before the name of another; with its exact parameters in
        float32, as EXACT behind a name; "": as it is."""
        types = dict(self.types)
        if name.endswith(EXACT):
            name, types = name.removesuffix(EXACT), types | dict.fromkeys(self.exact, "*fp32:16")
        before, colon, after = name.partition(": ")
        sizes = dict(self.sizes)
        if self.columns and before in LAYOUTS:
            sizes["FORMAT"], name = LAYOUTS[before].number, after if colon else ""
        differing = {**self.variants, **self.shapes}.get(name, {})
        return replace(self, sizes={**sizes, **differing}, types=types)

    def names(self, formats: Iterable[str], every: bool) -> list[str]:
        """The names of the variants, and where `every` is set of all shapes: with floats, with
        exact parameters where `every` is set, and, where the kernel reads planes and the columns
        divide into blocks, with weights of these formats."""
        own = ["", *self.variants, *(self.shapes if every else ())]
        exact = [name + EXACT for name in own if every and self.exact]
        packed = [f"{format}: {name}".removesuffix(": ") for format in formats for name in own]
        return [*own, *exact, *filter(self._divides, packed)]

    def _divides(self, name: str) -> bool:
        block = FORMATS[name.partition(": ")[0]].block_size
        return bool(self.columns) and (self.as_variant(name).sizes[self.columns] or 0) % block == 0


_kernels: dict[str, Kernel] = {}


def register(kernel: Kernel) -> Kernel:
    """Adds a kernel to the list of all; returns it."""
    assert kernel.name not in _kernels, f"{kernel.name}: is a kernel already"
    _kernels[kernel.name] = kernel
    return kernel


def all_kernels() -> dict[str, Kernel]:
    """Every kernel by its name. Imports Triton."""
    for module in MODULES:
        import_module(f"sfumato.ops.triton.{module}")
    return dict(_kernels)


def installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def interpreting() -> bool:
    """Whether this process interprets kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def launch(
    kernel: Kernel, grid: tuple[int, ...], tile: Tile, device: torch.device, **parameters: Any
) -> None:
    """Runs a kernel on the device's current stream, or interprets it.

    grid: programs along each axis; without any, nothing is done.  parameters: all of the kernel's
    but those that the tile gives and UPCAST and DESCRIPTORS.  Raises LaunchError where a kernel
    does not get to run.
    """
    if 0 in grid:
        return
    try:
        _run(kernel, grid, tile, device, parameters)
    except Exception as error:  # Triton's compilers raise errors of many classes
        if interpreting():
            raise
        raise LaunchError(f"{kernel.name}: {type(error).__name__}: {error}") from error


def _run(
    kernel: Kernel,
    grid: tuple[int, ...],
    tile: Tile,
    device: torch.device,
    parameters: dict[str, Any],
) -> None:
    # Triton launches on the current device, whatever the device of the tensors.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel.function[grid](**given(kernel, tile, device, parameters))


def given(
    kernel: Kernel, tile: Tile, device: torch.device, parameters: dict[str, Any]
) -> dict[str, Any]:
    """All parameters of a launch, and its options."""
    if "DESCRIPTORS" in kernel.function.arg_names:
        parameters = {**parameters, "DESCRIPTORS": has_copy_engine(device)}
    every = {**parameters, **tile.constants, "UPCAST": interpreting()}
    return every | {
        "num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": FP_FUSION
    }  # fmt: skip
