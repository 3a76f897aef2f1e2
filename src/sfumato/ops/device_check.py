"""Whether a device computes each operation rightly: recorded calls, made again on it.

For devices without kernels of ours, whose torch has not been seen here: Apple's, Intel's.  An
operation that fails, or differs from the reference on a CPU, is served by the CPU from then on, one
by one.  Knows no operation by name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sfumato.ops import registry
from sfumato.ops.on_host import mapped, on_host, placed, tensors_of
from sfumato.ops.registry import kind_of

log = logging.getLogger(__name__)

LARGEST_ERROR = 32
"""Of a result's norm, in units of its dtype's rounding (at least float32's): other orders of a sum
stay well below, and a wrong result far above."""
WRONG_INTEGERS = 0.02
"""Of the integers of a result: where two numbers are nearly equal, their order may differ."""


@dataclass(frozen=True)
class Call:
    """An operation and copies of the arguments of one call of it, on the CPU."""

    operation: str
    form: str
    arguments: tuple[Any, ...]


def check(device: torch.device, calls: Sequence[Call]) -> dict[str, str]:
    """Makes the calls on a device, and lets the CPU serve what is wrong there. Why, by operation;
    logged once. What is not in the calls stays as it is."""
    wrong: dict[str, str] = {}
    # What an operation is made of was called after it, and is checked before it.
    for operation in reversed(dict.fromkeys(call.operation for call in calls)):
        own = (call for call in calls if call.operation == operation)
        if why := next(filter(None, (_why_wrong(device, call) for call in own)), ""):
            wrong[operation] = why
            log.warning("%s: the CPU serves it on %s, since %s", operation, device, why)
            function = on_host(registry.references()[operation])
            registry.replace(operation, kind_of(device), function, why)
    return wrong


def _why_wrong(device: torch.device, call: Call) -> str:
    """Empty where the device's result is that of the reference."""
    right = copied(call.arguments)
    with registry.reference_only():
        expected = registry.call(call.operation, torch.device("cpu"), call.form, *right)
    given = mapped(call.arguments, lambda x: placed(x.clone(), device))
    try:
        result = registry.call(call.operation, device, call.form, *given)
        # What has a result may use its arguments' memory as it likes.
        result, expected = (given, right) if expected is None else (result, expected)
        pairs = zip(tensors_of(result), tensors_of(expected), strict=True)
        errors = [why for out, wanted in pairs if (why := _difference(out.cpu(), wanted))]
    except Exception as error:  # torch raises errors of many classes for what a device lacks
        lines = str(error).strip().splitlines()
        return f"it fails there ({type(error).__name__}: {lines[0][:120] if lines else ''})"
    return errors[0] if errors else ""


def _difference(out: Tensor, wanted: Tensor) -> str:
    """In words; empty where there is none that matters."""
    if out.shape != wanted.shape:
        return f"its result has the shape {tuple(out.shape)}, not {tuple(wanted.shape)}"
    if not wanted.is_floating_point():
        share = float((out != wanted).double().mean()) if wanted.numel() else 0.0
        return f"{share:.0%} of its integers differ" if share > WRONG_INTEGERS else ""
    bound = LARGEST_ERROR * max(torch.finfo(out.dtype).eps, torch.finfo(torch.float32).eps)
    wide, right = out.double(), wanted.double()
    seen = right.isfinite()
    if not torch.equal(wide.isfinite(), seen):
        return "its result is not finite where the reference's is"
    error = float((wide - right)[seen].norm() / right[seen].norm().clamp(min=1e-30))
    return f"its result differs by {error:.1e} of its size" if error > bound else ""


def copied(value: Any) -> Any:
    """A value whose tensors are others, with the same numbers."""
    return mapped(value, Tensor.clone)
