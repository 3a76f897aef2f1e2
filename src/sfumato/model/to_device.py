"""Copies from the host to a device that do not wait for the work which the device has to do."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` on the device. A copy from memory that the system may move makes the host wait for
    all the device's work, so the copy to a GPU is from pinned memory."""
    if device.type == "cuda" and values.device.type == "cpu" and torch.cuda.is_available():
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
