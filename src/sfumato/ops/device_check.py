"""Whether a device computes each operation rightly: recorded calls, made again on it.

For devices without kernels of ours, whose torch has not been seen here: Apple's, Intel's.  An
operation that fails, or differs from the reference on a CPU, is served by the CPU from then on, one
by one: slow, and right.  Knows no operation by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sfumato.ops import registry
from sfumato.ops.gpu import widest_float

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")

LARGEST_ERROR = 32
"""The largest error that passes, of a result's norm, in units of its dtype's rounding (at least
float32's): other orders of a sum stay well below, and a wrong result far above."""
WRONG_INTEGERS = 0.02
"""Share of the integers of a result that may differ: where two numbers are nearly equal, their
order may differ."""


@dataclass(frozen=True)
class Call:
    """An operation and copies of the arguments of one call of it, on the CPU."""

    operation: str
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
            function = on_host(registry.operations()[operation].reference)
            registry.replace(operation, registry.kind_of(device), function, why)
    return wrong


def _why_wrong(device: torch.device, call: Call) -> str:
    """Empty where the device's result is that of the reference."""
    operation, right = registry.operations()[call.operation], copied(call.arguments)
    with registry.reference_only():
        expected = operation(*right)
    given = mapped(call.arguments, lambda x: placed(x.clone(), device))
    try:
        result = operation(*given)
        # What has a result may use its arguments' memory as it likes.
        result, expected = (given, right) if expected is None else (result, expected)
        pairs = zip(tensors_of(result), tensors_of(expected), strict=True)
        errors = [why for out, wanted in pairs if (why := _difference(out.cpu(), wanted))]
    except Exception as error:  # torch raises errors of many classes for what a device lacks
        return f"it fails there ({first_line(error)})"
    return errors[0] if errors else ""


def first_line(error: Exception) -> str:
    """The class of an error, and the first line of its message, up to 200 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"


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


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on the CPU, of arguments on any device. Tensors that it changes in place are
    changed on their device; results go to the device of the first tensor."""

    def serve(*arguments: Any) -> Any:
        copies: list[tuple[Tensor, Tensor]] = []

        def down(x: Tensor) -> Tensor:
            copies.append((x, x.to(_CPU, copy=True)))
            return copies[-1][1]

        host = mapped(arguments, down)
        before = [copy.clone() for _, copy in copies]
        result = function(*host)
        for (original, copy), old in zip(copies, before, strict=True):
            if not torch.equal(copy.nan_to_num(), old.nan_to_num()):
                original.copy_(copy)
        device = copies[0][0].device
        return mapped(result, lambda x: placed(x, device))

    return serve


def placed(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; float64 as float32 where the device has none."""
    return x.to(device, widest_float(device.type) if x.dtype == torch.float64 else x.dtype)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same value with every tensor in it changed: in tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: mapped(getattr(value, f.name), change) for f in fields(value) if f.init}
        return replace(value, **own)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(each, change) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(each, change) for each in value)
    if isinstance(value, dict):
        return {key: mapped(each, change) for key, each in value.items()}
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in a value, in order."""
    tensors: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    mapped(value, note)
    return tensors
