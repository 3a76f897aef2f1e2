"""Numbers that a device has computed or will have, and what the host makes of them: those of
several calculations come to the host by one copy, so that it waits once. Knows no networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from sfumato.model.to_device import to_host

Result = TypeVar("Result")

_WORD = torch.int32


@dataclass(frozen=True)
class DeviceResult(Generic[Result]):
    """A result of which the host has read nothing yet."""

    tensors: tuple[Tensor, ...]  # of elements of 4 or 8 bytes
    result: Callable[[Sequence[Tensor]], Result]
    """Makes it of the same tensors on the host."""

    def fetch(self) -> Result:
        """Waits for the device."""
        (result,) = fetch_together([self])
        return result


def fetch_together(results: Sequence[DeviceResult[Result]]) -> list[Result]:
    """The results, by one copy, for which the host waits."""
    on_host = iter(_on_host([tensor for each in results for tensor in each.tensors]))
    return [each.result([next(on_host) for _ in each.tensors]) for each in results]


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one device; the tensors themselves where that is the host."""
    if all(map(_is_on_host, tensors)):
        return list(tensors)
    words, copied = to_host(torch.cat([tensor.reshape(-1).view(_WORD) for tensor in tensors]))
    if copied is not None:
        copied.synchronize()
    sizes = [tensor.nbytes // _WORD.itemsize for tensor in tensors]
    # Elements of 8 bytes may begin at an odd word, where they cannot be viewed.
    return [
        part.clone().view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(words.split(sizes), tensors, strict=True)
    ]
