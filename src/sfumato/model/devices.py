"""Copies between the host and a device for which the host waits no longer than it must, and which
exceptions say that memory ran out.  Knows no networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from sfumato.ops import gpu


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` on the device. A copy from memory that the system may move makes the host wait for
    all the device's work, so the copy to a GPU is from pinned memory."""
    if values.device.type == "cpu" and gpu.is_present(device):
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def to_host(words: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Numbers on the host, by one copy; and the event after which they may be read, where the copy
    goes on meanwhile."""
    if not gpu.is_gpu(words.device):
        return words.cpu(), None
    host = torch.empty(words.shape, dtype=words.dtype, device="cpu", pin_memory=True)
    host.copy_(words, non_blocking=True)
    copied = torch.Event(words.device)
    copied.record()
    return host, copied


Result = TypeVar("Result")

_WORD = torch.int32


@dataclass(frozen=True)
class DeviceResult(Generic[Result]):
    """A result of which the host has read nothing yet."""

    tensors: tuple[Tensor, ...]  # of elements of 4 or 8 bytes
    result: Callable[[Sequence[Tensor]], Result]
    """Makes it of the same tensors on the host."""


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


_NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left; on a CPU torch says so in words only."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(s in str(error).lower() for s in _NO_MEMORY)
