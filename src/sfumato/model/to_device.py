"""Copies between the host and a device for which the host waits no longer than it must."""

from __future__ import annotations

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
