"""Kernels in Triton for GPUs of NVIDIA and AMD; twins of `ops`, registered for `cuda`.

Triton is an optional package: this module imports without it, and then torch serves.  The modules
that hold kernels are imported when a device is prepared, since Triton takes a second to load.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

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
from sfumato.ops.triton.planes import LAYOUTS, PlaneTensor, twin_name
from sfumato.ops.triton.planes import OPERATIONS as FORMATS_OF
from sfumato.ops.triton.self_test import KernelTwin, Sizes, Trial
from sfumato.ops.triton.tiles import slower
from sfumato.weights.formats import KINDS, ScaledTensor

__all__ = ["prepare", "serves_format", "serving", "twins"]

log = logging.getLogger(__name__)

OPERATIONS = {
    "after_attention": ("norms", ANY),
    "after_layer": ("norms", ANY),
    "attend": ("attention", ANY),
    "attend_padded": ("attention", ANY),
    "experts": ("experts", FLOAT),
    **dict.fromkeys(("linear", "linear_each", "linear_gated"), ("linear", FLOAT)),
    "move_rows": ("step", ANY),
    "own_scores": ("head", FLOAT),
    "prepare_heads": ("norms", ANY),
    "rms_norm": ("norms", ANY),
    "route": ("experts", FLOAT),
    "step_noise": ("step", ANY),
    "vocabulary_mass": ("head", FLOAT),
    "vocabulary_pass": ("head", FLOAT),
    "write_cache": ("norms", ANY),
}
"""The module whose `TWINS` has each operation, and the form of weight that it serves; with weights
of which formats besides: `planes.OPERATIONS`."""

_LIMITS = {
    "move_rows": "canvases of random tokens, `EntropyBound` and a built-in stopping rule",
    "prepare_heads": "networks that norm values",
    "route": "routers with scales, whose shares sum to 1",
}
"""Which calls of an operation its kernels take alone."""

_NOTES = {
    FLOAT: "weights of floats",
    PLANES: "weights in planes",
    SCALED: "weights of 8-bit codes",
    ANY: "",
}

_SIZES = Sizes()
_refused: set[tuple[str, torch.device]] = set()


@cache
def _twin(name: str) -> KernelTwin:
    operation = name.partition(" ")[0]
    module = import_module(f"{__name__}.{OPERATIONS[operation][0]}")
    kernel_twin: KernelTwin = module.TWINS[name]
    check_signature(operation, kernel_twin.function)
    return kernel_twin


def twins(formats: Iterable[str] = ()) -> dict[str, KernelTwin]:
    """All operations that kernels serve, and those with weights of these formats, less those that
    are turned off. Imports Triton."""
    wanted = set(formats)
    names = [
        twin_name(operation, format)
        for operation, known in FORMATS_OF.items()
        for format in known
        if format in wanted
    ]
    return {name: _twin(name) for name in (*OPERATIONS, *names) if not is_off(name.split()[0])}


def prepare(
    device: torch.device, sizes: Sizes = _SIZES, formats: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Tests the kernels on a device, once; the operations that they serve there from now on.

    sizes: of the model that will be loaded.  formats: of its quantized weights, for which the
    kernels are tested too.

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
        tries = import_module(f"{__name__}.tries")
    except Exception as error:  # a build of Triton may fail in any way when it is imported
        why = f"{error}{self_test.LOSS}"
        log.warning("kernels: torch serves on %s, since Triton fails (%s)", device, why)
        return frozenset()
    trial = Trial(device, sizes)
    return self_test.prepare(trial, known, partial(tries.run, trial, formats))


def serves_format(operation: str, format: str, device: torch.device) -> bool:
    """Whether kernels serve an operation with weights of a format, as planes or codes, on a device;
    before they are tested, whether they will if their tests pass."""
    is_known = format in FORMATS_OF[operation] and not is_off(operation)
    if not is_known or not self_test.usable(device):
        return False
    name = twin_name(operation, format)
    will_serve = bool(self_test.undecided(device, (name,))) and not slower(name, device)
    return will_serve or self_test.serves(name, device)


def serving(device: torch.device) -> frozenset[str]:
    """The operations that kernels serve on a device; before `prepare`, those that they will if
    their tests pass."""
    if device.type != "cuda" or not self_test.usable(device):
        return frozenset()
    passed = self_test.prepared(device)
    if passed is None:
        passed = frozenset(name for name in OPERATIONS if not slower(name, device))
    return frozenset(name for name in passed if not is_off(name.split()[0]))


def _names(operation: str, arguments: tuple[Any, ...]) -> list[str]:
    """The twins that a call needs: several weights may have formats of their own, and each passed
    its test."""
    stored = [each for each in arguments if isinstance(each, PlaneTensor | ScaledTensor)]
    names = {twin_name(operation, each.format.name): None for each in stored}
    return list(names) or [operation]


def _note_refused(name: str, device: torch.device, arguments: tuple[Any, ...]) -> None:
    """One log line for the first call of an operation that its kernels do not take."""
    if (name, device) not in _refused:
        _refused.add((name, device))
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        kinds = ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in tensors)
        kinds += self_test.LOSS
        log.warning("%s: torch serves calls that kernels do not take, as of %s", name, kinds)


def _register(operation: str, form: str, known: Iterable[str] = ("",)) -> None:
    """Registers the kernels of an operation for a form of weight. known: its formats, "" of
    floats."""
    every = [twin_name(operation, format) for format in known]

    def serves(*arguments: Any) -> bool:
        device, needed = device_of(arguments), _names(operation, arguments)
        if not all(self_test.serves(name, device) for name in needed):
            return False
        if _twin(needed[0]).serves(*arguments):
            return True
        _note_refused(needed[0], device, arguments)
        return False

    def function(*arguments: Any) -> Any:
        """The result of the kernels, or, where one of them does not run, of torch from then on.

        A kernel that does not run wrote nothing. Operations of several kernels write to memory of
        their own, or what torch writes again."""
        device, needed = device_of(arguments), _names(operation, arguments)
        try:
            return _twin(needed[0]).function(*arguments)
        except LaunchError as error:
            # Where torch fails too, the device does, and the operation keeps its kernels.
            result = choose(operation, device, form, *arguments, below=TRITON)(*arguments)
            for name in needed:
                self_test.switch_off(name, device, error)
            return result

    def refusal(device: torch.device) -> str:
        """Why a device serves no format."""
        reasons = [self_test.refusal(name, device) for name in every]
        return "" if "" in reasons else reasons[0]

    note = _LIMITS.get(operation, _NOTES[form])
    register: Any = twin(operation, "cuda", form, serves, TRITON, refusal, note)
    register(function)


for _operation, (_module, _form) in OPERATIONS.items():
    _register(_operation, _form)
for _operation, _formats in FORMATS_OF.items():
    for _form, _of_form in ((PLANES, LAYOUTS), (SCALED, KINDS)):
        if _known := [format for format in _formats if format in _of_form]:
            _register(_operation, _form, _known)
