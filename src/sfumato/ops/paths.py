"""Which function serves each operation on a device, and why: the table of `sfumato doctor`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sfumato.ops import gpu, registry
from sfumato.ops.cpu import library
from sfumato.ops.registry import COMPILED, TORCH, TRITON, VARIABLE, Twin
from sfumato.ops.triton import self_test
from sfumato.ops.triton.planes import LAYOUTS, twin_name
from sfumato.ops.triton.planes import OPERATIONS as FORMATS_OF

_MADE_OF_OTHERS = "of torch's operations, and of others here"
_STEADY = "in parts of fixed size: a row's bits do not depend on others"


@dataclass(frozen=True)
class Path:
    """Who serves an operation on a device ("torch", "compiled, avx2", "Triton", "torch on the
    CPU"), and why."""

    operation: str
    path: str
    reason: str


def paths(device: torch.device) -> list[Path]:
    """A row for each operation; one for each that kernels serve from planes, with the formats that
    passed their test; and one for each format that failed it.

    On a GPU kernels must have been prepared (`ops.prepare`), or the table says that they were not.
    Raises ValueError where SFUMATO_OFF names what is no operation.
    """
    registry.check_off()
    rows = [_path(operation, device) for operation in sorted(registry.operations())]
    failed = self_test.failures(device).items()
    rows += filter(None, (_planes_path(operation, device) for operation in FORMATS_OF))
    return rows + [Path(name, "torch", why) for name, why in failed if " " in name]


def _planes_path(operation: str, device: torch.device) -> Path | None:
    """The path of an operation with weights in planes; None where none of them has passed a
    test."""
    names = [format for format in FORMATS_OF[operation] if format in LAYOUTS]
    passed = [each for each in names if self_test.serves(twin_name(operation, each), device)]
    if not passed or registry.is_off(operation) or registry.kind_of(device) != gpu.KIND:
        return None
    reason = f"passed their tests here: {', '.join(passed)}"
    if left := [format for format in names if format not in passed]:
        reason += f"; failed or not tested: {', '.join(left)}"
    return Path(f"{operation}, planes", "Triton", reason)


def _path(operation: str, device: torch.device) -> Path:
    if registry.is_off(operation):
        return Path(operation, "torch", f"{VARIABLE} asks for it")
    if why := registry.why_replaced(operation, device):
        return Path(operation, "torch on the CPU", why)
    refused = ""
    for twin in registry.twins_of(operation, device):
        why = twin.refusal(device)
        if not why:
            names = {TORCH: "torch", TRITON: "Triton", COMPILED: library.describe()[0]}
            return Path(operation, names[twin.backend], _reason(twin, refused))
        refused = refused or why
    return Path(operation, "torch", refused or _MADE_OF_OTHERS)


def _reason(twin: Twin, refused: str) -> str:
    """Why this one, where another was refused; else for what it serves."""
    if twin.note:
        return f"for {twin.note}, else torch" + (f": {refused}" if refused else "")
    if refused:
        return refused
    if twin.backend == TORCH:
        return _STEADY
    return "passed its test here" if twin.backend == TRITON else library.reason


def table() -> list[str]:
    """The rows of the table of operations in docs/hardware.md: the first sentence about each, and
    where its reference is."""
    rows = []
    for name, operation in sorted(registry.operations().items()):
        what = " ".join(str(operation.__doc__).split()).partition(". ")[0].rstrip(".")
        file = operation.reference.__module__.removeprefix("sfumato.").replace(".", "/")
        rows.append(f"| `{name}` | {what} | `{file}.py` |")
    return rows
