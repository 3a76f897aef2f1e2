"""Launches that are noted in place of being run, for what they would compile.

A self-test has launches of its own sizes: to note them costs no compilation, and then all of them
are compiled at a time, on all cores, elsewhere.  Knows no operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sfumato.ops.triton.kernel import Kernel, all_kernels, in_place_of_launches
from sfumato.ops.triton.targets import architecture

Path = list[int]
"""Which parameter, and which part of it."""


@dataclass(frozen=True)
class Noted:
    """A compilation, as Triton's launches ask for it, in values of JSON."""

    kernel: str
    target: str  # whose tiles the device has
    signature: dict[str, Any]
    constants: list[tuple[Path, Any]]
    attributes: list[tuple[Path, Any]]
    options: dict[str, Any]  # warps, stages, contraction

    def __str__(self) -> str:
        return f"{self.kernel}, of a self-test"

    def source(self) -> Any:
        """What Triton compiles. Raises what it raises."""
        from triton.compiler import ASTSource

        function = all_kernels()[self.kernel].function
        constants, attributes = (
            {tuple(path): value for path, value in each}
            for each in (self.constants, self.attributes)
        )
        return ASTSource(function, self.signature, constants, attributes)


_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def note(kernel: Kernel, parameters: dict[str, Any], target: str, device: int) -> Noted:
    """What the launch of a kernel with these parameters and options would compile. target: whose
    tiles the device has; device: the current one, by its number."""
    from triton import knobs

    function = kernel.function
    given = dict(parameters)
    given |= {"debug": False, "instrumentation_mode": knobs.compilation.instrumentation_mode}
    if hasattr(knobs.compilation, "fpsan_homomorphic_casts"):  # since Triton 3.9
        given["fpsan_homomorphic_casts"] = knobs.compilation.fpsan_homomorphic_casts
    _, _, _, backend, binder = function.device_caches[device]
    bound, kinds, options = binder(**given)
    _, signature, constants, attributes = function._pack_args(backend, given, bound, kinds, options)
    return Noted(
        kernel.name,
        target,
        signature,
        [(list(path), value) for path, value in constants.items()],
        [(list(path), value) for path, value in attributes.items()],
        {name: parameters[name] for name in _OPTIONS},
    )


@contextmanager
def noted_launches(device: torch.device) -> Iterator[list[Noted]]:
    """Within it, this thread's launches on a device run nothing, and their results are
    undefined. Each compilation is noted once."""
    notes: list[Noted] = []
    target, index = architecture(device), device.index or 0
    assert target is not None

    def take(kernel: Kernel, given: dict[str, Any]) -> None:
        noted = note(kernel, given, target, index)
        if noted not in notes:
            notes.append(noted)

    with in_place_of_launches(take):
        yield notes
