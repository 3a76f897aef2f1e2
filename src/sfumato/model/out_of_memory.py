"""Which exceptions say that memory ran out. Knows not what is done about it."""

from __future__ import annotations

import torch

_NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left; on a CPU torch says so in words only."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(s in str(error).lower() for s in _NO_MEMORY)
