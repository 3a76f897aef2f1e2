"""How an engine is laid out: one frozen value, checked when made."""

from __future__ import annotations

from dataclasses import dataclass

from sfumato.diffusion.checks import is_number, is_whole


@dataclass(frozen=True)
class EngineConfig:
    """Slots, limits and margins of an engine. Raises ValueError naming the field."""

    slots: int = 4  # requests that run at a time
    context: int = 8192  # positions of a slot
    queue: int = 64  # requests that wait at most
    prefill_chunk: int = 512  # tokens encoded between two denoising steps at most
    strict: bool = False  # refuse what does not fit a slot, rather than make a larger one
    snapshot_bytes: int = 2**30  # host memory for what prefix reuse needs
    request_timeout_s: float | None = None  # from submission
    memory_margin: float = 0.05  # share of the memory that stays free

    def __post_init__(self) -> None:
        for name, low in (*((n, 1) for n in _COUNTS), ("snapshot_bytes", 0)):
            value = getattr(self, name)
            if not (is_whole(value) and value >= low):
                raise ValueError(f"{name}: must be a whole number from {low}, got {value!r}")
        limit = self.request_timeout_s
        if limit is not None and not (is_number(limit) and limit > 0):
            raise ValueError(f"request_timeout_s: must be over 0 seconds, got {limit!r}")
        if not (is_number(self.memory_margin) and 0 <= self.memory_margin < 1):
            raise ValueError(f"memory_margin: must be from 0 to 1, got {self.memory_margin!r}")


_COUNTS = ("slots", "context", "queue", "prefill_chunk")
