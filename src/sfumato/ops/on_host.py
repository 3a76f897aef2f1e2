"""An operation whose arguments go to the CPU and whose results come back: what serves where a
device computes it wrongly.  Slow, and right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sfumato.ops.narrow_cache import as_bytes

_CPU = torch.device("cpu")


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
            if not torch.equal(as_bytes(copy).nan_to_num(), as_bytes(old).nan_to_num()):
                original.copy_(copy)
        device = copies[0][0].device
        return mapped(result, lambda x: placed(x, device))

    return serve


def placed(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; float64 as float32 where the device is an Apple GPU, which has none."""
    narrow = device.type == "mps" and x.dtype == torch.float64
    return x.to(device, torch.float32 if narrow else x.dtype)


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
