"""Which of float32 and a narrower dtype a device multiplies faster: one product, timed at load.

For devices whose units are not known from here: NVIDIA's before Ampere, of which some multiply
float16 many times as fast as float32 and others at a sixty-fourth of it, and Apple's.  Knows no
checkpoint.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from functools import cache

import torch

_log = logging.getLogger(__name__)

ROWS = 256
"""Tokens of the product: those of a canvas."""
ROUNDS = 5
WIDEST = 8192
"""The product's width is at most this: its operands then take a few hundred megabytes."""
FASTER = 0.9
"""The share of float32's time that a narrower dtype may take where it is chosen: less than that is
no gain beyond noise, and float32 is more exact."""

Clock = Callable[[], float]


@cache
def faster_dtype(
    device: torch.device, width: int, narrow: torch.dtype, clock: Clock = time.perf_counter
) -> torch.dtype:
    """float32 or `narrow`, whichever multiplies [256, width] by [width, width] faster on a device,
    by medians; float32 where the device refuses the other. Logged once for a device and a width."""
    names = [str(dtype).removeprefix("torch.") for dtype in (torch.float32, narrow)]
    try:
        wide_s, narrow_s = _medians(device, min(width, WIDEST), narrow, clock)
    except (RuntimeError, AssertionError) as error:  # no such product there, no memory, no driver
        lines = str(error).splitlines()
        _log.info(
            "dtype: float32 on %s, since %s fails there (%s)",
            device,
            names[1],
            lines[0] if lines else "",
        )
        return torch.float32
    chosen = narrow if narrow_s <= FASTER * wide_s else torch.float32
    _log.info(
        "dtype: %s on %s: a product of width %d takes %.2f ms in %s and %.2f ms in %s",
        *(str(chosen).removeprefix("torch."), device, width),
        *(wide_s * 1e3, names[0], narrow_s * 1e3, names[1]),
    )
    return chosen


def _medians(
    device: torch.device, width: int, narrow: torch.dtype, clock: Clock
) -> tuple[float, float]:
    """Seconds of a product in float32 and in `narrow`, in turn, after one of each."""
    dtypes = (torch.float32, narrow)
    pairs = [
        tuple(torch.ones(n, width, dtype=dtype, device=device) for n in (ROWS, width))
        for dtype in dtypes
    ]
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(ROUNDS + 1):
        for (x, weight), taken in zip(pairs, seconds, strict=True):
            began = clock()
            torch.mm(x, weight)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            took = clock() - began
            if number:  # the first product loads code
                taken.append(took)
    return statistics.median(seconds[0]), statistics.median(seconds[1])
