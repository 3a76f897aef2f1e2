"""How an engine is laid out: one frozen value, checked when made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sfumato.diffusion.checks import is_number, is_whole
from sfumato.model.network import prefill_chunk
from sfumato.options.limits import MOST_SECONDS, MOST_STEPS
from sfumato.refused import Refused

READ_TOKENS = 512
"""Tokens of the reads of a step on a CPU, where a step takes as long as its tokens; on another
device they are as many as `EngineConfig.prefill_chunk` says, where it does."""

KEPT_PICTURES = 16
"""Pictures of the largest size whose soft tokens an engine keeps, for turns that show them again
where no slot holds them any more; of the default size four times as many."""

REQUEST_TIMEOUT_S = 21_600.0
"""Six hours. The longest reply that `sfumato serve` gives unasked, 4,096 tokens, is 16 canvases of
48 steps; the 26B model takes 6 s a step on two CPU threads (docs/performance.md); and on a CPU four
requests at a time take four times as long as one. 16 × 48 × 6 s × 4 is a little over five hours."""


@dataclass(frozen=True)
class EngineConfig:
    """Slots, limits and margins of an engine. Raises ValueError naming the field."""

    slots: int = 4  # requests that run at a time
    context: int = 8192  # positions of a slot
    queue: int = 64  # requests that wait at most
    prefill_chunk: int | None = None
    """Tokens encoded between two denoising steps at most; None: as `model.network` has it."""
    strict: bool = False  # refuse what does not fit a slot, rather than make a larger one
    snapshot_bytes: int = 2**30  # memory of the device for what prefix reuse needs
    max_steps: int = 256  # denoising steps per canvas that a request may ask for
    request_timeout_s: float | None = REQUEST_TIMEOUT_S  # from submission; None: no limit
    memory_margin: float = 0.05  # share of the memory that stays free

    def __post_init__(self) -> None:
        for name, low in (*((n, 1) for n in _COUNTS), ("snapshot_bytes", 0)):
            value = getattr(self, name)
            if value is None and name == "prefill_chunk":
                continue
            if not (is_whole(value) and value >= low):
                raise Refused(name, f"must be a whole number from {low}, got {value!r}")
        if self.max_steps > MOST_STEPS:
            raise Refused("max_steps", f"must be at most {MOST_STEPS}, got {self.max_steps}")
        limit = self.request_timeout_s
        if limit is not None and not (is_number(limit) and 0 < limit <= MOST_SECONDS):
            raise Refused(
                "request_timeout_s",
                f"must be over 0 and at most {MOST_SECONDS:.0e} seconds, got {limit!r}",
                "None for no limit",
            )
        if not (is_number(self.memory_margin) and 0 <= self.memory_margin < 1):
            raise Refused("memory_margin", f"must be from 0 to 1, got {self.memory_margin!r}")

    def chunk_on(self, device: torch.device) -> int:
        """`prefill_chunk` for a model on this device."""
        return self.prefill_chunk or prefill_chunk(device)


_COUNTS = ("slots", "context", "queue", "prefill_chunk", "max_steps")
