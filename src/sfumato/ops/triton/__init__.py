"""Kernels in Triton for GPUs of NVIDIA and AMD; twins of `ops`, registered for `cuda`.

Triton is an optional package: this module imports without it, and then torch serves.  The modules
that hold kernels are imported when a device is prepared, since Triton takes a second to load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from sfumato.ops.attention_reference import Prefixes
from sfumato.ops.narrow_cache import CACHED, FORMATS
from sfumato.ops.registry import (
    ANY,
    FLOAT,
    PLANES,
    SCALED,
    TRITON,
    check_signature,
    choose,
    device_of,
    is_off,
    twin,
)
from sfumato.ops.triton import self_test
from sfumato.ops.triton.kernel import LaunchError
from sfumato.ops.triton.planes import OPERATIONS as PLANE_OPERATIONS
from sfumato.ops.triton.planes import PlaneTensor, plane_name, plane_names
from sfumato.ops.triton.scaled import KINDS, scaled_name, scaled_names
from sfumato.ops.triton.scaled import OPERATIONS as SCALED_OPERATIONS
from sfumato.ops.triton.self_test import KernelTwin
from sfumato.ops.triton.tiles import slower
from sfumato.weights.formats import ScaledTensor

__all__ = ["prepare", "serves_planes", "serves_scaled", "serving", "twins"]

log = logging.getLogger(__name__)

OPERATIONS = {
    "after_attention": ("norms", ANY),
    "after_layer": ("norms", ANY),
    "attend": ("prefill", ANY),
    "canvas_attention": ("attention", ANY),
    "experts": ("experts", FLOAT),
    "linear": ("linear", FLOAT),
    "move_rows": ("sampler", ANY),
    "own_scores": ("listed", FLOAT),
    "phase_attention": ("attention", ANY),
    "prepare_heads": ("heads", ANY),
    "read_attention": ("read_attention", ANY),
    "rms_norm": ("norms", ANY),
    "route": ("router", FLOAT),
    "step_noise": ("noise", ANY),
    "vocabulary_mass": ("vocabulary_mass", FLOAT),
    "vocabulary_pass": ("head", FLOAT),
    "write_cache": ("cache_write", ANY),
}
"""The module whose `TWINS` has each operation, and the form of weight that it serves."""


_refused: set[tuple[str, torch.device]] = set()


@cache
def _twin(operation: str) -> KernelTwin:
    name, _, format = operation.partition(" ")
    module_name = f"scaled_{name}" if format in KINDS else OPERATIONS[name][0]
    module = import_module(f"{__name__}.{module_name}")
    kernel_twin: KernelTwin = module.TWINS[operation]
    check_signature(name, kernel_twin.function)
    return kernel_twin


def twins(formats: Iterable[str] = ()) -> dict[str, KernelTwin]:
    """All operations that kernels serve, those with planes and with 8-bit codes for weights of
    these formats and those over a narrow cache of one of them, less those that are turned off.
    Imports Triton."""
    named = [names for operation in PLANE_OPERATIONS for names in plane_names(operation).items()]
    named += [names for operation in SCALED_OPERATIONS for names in scaled_names(operation).items()]
    names = [name for format, name in named if format in formats]
    names += [f"{name} {format}" for name in sorted(CACHED) for format in _cache_formats(formats)]
    return {name: _twin(name) for name in (*OPERATIONS, *names) if not is_off(name.split()[0])}


def _cache_formats(formats: Iterable[str]) -> list[str]:
    return sorted(set(FORMATS.values()) & set(formats))


def prepare(
    device: torch.device, hidden: int = 0, formats: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Tests the kernels on a device, once; the operations that they serve there from now on.

    hidden: size of a hidden state of the model that will be loaded, whose kernels are compiled
    first, beside those of the tests, where Triton's cache lacks them; 0: none.  formats: of its
    quantized weights and of a narrow cache, for which the kernels are tested too.

    Call it before the first step on a device, and outside of a graph's capture. Where kernels
    cannot run, torch serves all, and one log line says why.
    """
    if not self_test.usable(device):
        if device.type == "cuda":
            why = self_test.why_unusable(device)
            log.warning("kernels: torch serves on %s, since %s%s", device, why, self_test.LOSS)
        return frozenset()
    try:
        known = twins(formats)
    except Exception as error:  # a build of Triton may fail in any way when it is imported
        why = f"{error}{self_test.LOSS}"
        log.warning("kernels: torch serves on %s, since Triton fails (%s)", device, why)
        return frozenset()
    if self_test.undecided(device, known):
        import_module(f"{__name__}.fill_cache").fill(device, hidden, known, formats=formats)
    return self_test.prepare(device, known)


def serves_planes(operation: str, format: str, device: torch.device) -> bool:
    """Whether kernels serve an operation with planes of a format on a device; before they are
    tested, whether they will if their tests pass."""
    known = format in PLANE_OPERATIONS[operation]
    return known and _serves_format(operation, plane_name(operation, format), device)


def serves_scaled(operation: str, kind: str, device: torch.device) -> bool:
    """As `serves_planes`, with weights of 8-bit codes of a kind."""
    known = operation in SCALED_OPERATIONS and kind in KINDS
    return known and _serves_format(operation, scaled_name(operation, kind), device)


def _serves_format(operation: str, name: str, device: torch.device) -> bool:
    if device.type == "cuda" and not torch.cuda.is_available():
        return False
    if is_off(operation) or not self_test.usable(device):
        return False
    will_serve = bool(self_test.undecided(device, (name,))) and not slower(name, device)
    return will_serve or self_test.serves(name, device)


def serving(device: torch.device) -> frozenset[str]:
    """The operations that kernels serve on a device; before `prepare`, those that they will if
    their tests pass."""
    if device.type != "cuda" or not torch.cuda.is_available() or not self_test.usable(device):
        return frozenset()
    passed = self_test.prepared(device)
    if passed is None:
        narrow = [f"{name} {format}" for name in CACHED for format in FORMATS.values()]
        passed = frozenset(name for name in (*OPERATIONS, *narrow) if not slower(name, device))
    return frozenset(name for name in passed if not is_off(name.split()[0]))


def _plane_names(operation: str, arguments: tuple[Any, ...]) -> list[str]:
    """Several weights of one call may have formats of their own: each passed its test."""
    planes = [each for each in arguments if isinstance(each, PlaneTensor)]
    return list(dict.fromkeys(plane_name(operation, each.format.name) for each in planes))


def _scaled_names(operation: str, arguments: tuple[Any, ...]) -> list[str]:
    weights = [each for each in arguments if isinstance(each, ScaledTensor)]
    return list(dict.fromkeys(scaled_name(operation, each.kind) for each in weights))


def _register_formats(
    operation: str,
    form: str,
    names: Callable[[str, tuple[Any, ...]], list[str]],
    known: Iterable[str],
    note: str,
) -> None:
    """Registers the kernels of an operation for a form of weight with several formats.

    names: of the twins that a call needs; known: of all twins; note: see `registry.Twin`."""
    every = list(known)

    def serves(*arguments: Any) -> bool:
        device, needed = device_of(arguments), names(operation, arguments)
        if not all(self_test.serves(name, device) for name in needed):
            return False
        if _twin(needed[0]).serves(*arguments):
            return True
        _note_refused(needed[0], device, arguments)
        return False

    def function(*arguments: Any) -> Any:
        """As the kernels of floats, with torch's products of dequantized weights to fall back
        on."""
        device, needed = device_of(arguments), names(operation, arguments)
        try:
            return _twin(needed[0]).function(*arguments)
        except LaunchError as error:
            result = choose(operation, device, form, *arguments, below=TRITON)(*arguments)
            for name in needed:
                self_test.switch_off(name, device, error)
            return result

    def refusal(device: torch.device) -> str:
        """Of a device that serves no format."""
        reasons = [self_test.refusal(name, device) for name in every]
        return "" if "" in reasons else reasons[0]

    register: Any = twin(operation, "cuda", form, serves, TRITON, refusal, note)
    register(function)


def _note_refused(operation: str, device: torch.device, arguments: tuple[Any, ...]) -> None:
    """One log line for the first call of an operation that its kernels do not take."""
    if (operation, device) not in _refused:
        _refused.add((operation, device))
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        kinds = ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in tensors)
        kinds += self_test.LOSS
        log.warning("%s: torch serves calls that kernels do not take, as of %s", operation, kinds)


def _named(operation: str, arguments: tuple[Any, ...]) -> str:
    """The twin of a call: an operation that takes a cache has one more for each narrow kind."""
    if operation in CACHED:
        for held in arguments[:4]:
            dtype = held.keys.dtype if isinstance(held, Prefixes) else held.dtype
            if dtype in FORMATS:
                return f"{operation} {FORMATS[dtype]}"
    return operation


def _register(operation: str, form: str) -> None:
    def serves(*arguments: Any) -> bool:
        device, name = device_of(arguments), _named(operation, arguments)
        if not self_test.serves(name, device):
            return False
        if _twin(name).serves(*arguments):
            return True
        _note_refused(name, device, arguments)
        return False

    def function(*arguments: Any) -> Any:
        """The result of the kernels, or, where one of them does not run, of torch from then on.

        A kernel that does not run wrote nothing. Operations of several kernels write to memory of
        their own, or load all of them before the first one writes."""
        device, name = device_of(arguments), _named(operation, arguments)
        try:
            return _twin(name).function(*arguments)
        except LaunchError as error:
            # Where torch fails too, the device does, and the operation keeps its kernels.
            result = choose(operation, device, form, *arguments, below=TRITON)(*arguments)
            self_test.switch_off(name, device, error)
            return result

    def refusal(device: torch.device) -> str:
        return self_test.refusal(operation, device)

    note = "weights of floats" if form == FLOAT else ""
    register: Any = twin(operation, "cuda", form, serves, TRITON, refusal, note)
    register(function)


for _operation, (_module, _form) in OPERATIONS.items():
    _register(_operation, _form)
for _operation in PLANE_OPERATIONS:
    _names = plane_names(_operation).values()
    _register_formats(_operation, PLANES, _plane_names, _names, "weights in planes")
for _operation in SCALED_OPERATIONS:
    _names = scaled_names(_operation).values()
    _register_formats(_operation, SCALED, _scaled_names, _names, "weights of 8-bit codes")
