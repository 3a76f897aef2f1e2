"""What `move_rows` reads and writes: the rows of a step, what decides in them, and statistics.

R: rows, W: positions of a row.  Knows no batch, no rule and no network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Rows(Protocol):
    """The state of rows, as a `StepBatch` has it; integers int64, flags bool."""

    @property
    def tokens(self) -> Tensor: ...  # [R, W]

    @property
    def pinned(self) -> Tensor: ...  # [R, W]

    @property
    def history(self) -> Tensor: ...  # [R, H, W]

    @property
    def max_steps(self) -> Tensor: ...  # [R], as all that follow but the last

    @property
    def hard_pins(self) -> Tensor: ...

    @property
    def step(self) -> Tensor: ...

    @property
    def unchanged(self) -> Tensor: ...

    @property
    def cold(self) -> Tensor: ...

    @property
    def self_conditioning(self) -> Tensor: ...

    @property
    def converged(self) -> Tensor: ...

    @property
    def done(self) -> Tensor: ...

    @property
    def soft(self) -> Tensor: ...  # [R, W, hidden]


class Statistics(Protocol):
    """Statistics of each of R · W positions; see `HeadStats`."""

    @property
    def argmax(self) -> Tensor: ...

    @property
    def drawn(self) -> Tensor: ...

    @property
    def entropy(self) -> Tensor: ...

    @property
    def top_ids(self) -> Tensor: ...

    @property
    def top_probs(self) -> Tensor: ...

    @property
    def soft(self) -> Tensor: ...


@dataclass(frozen=True)
class Settings:
    """Settings of each row for the rules `EntropyBound` and `StableAndConfident`."""

    bound: Tensor  # float32 [R]
    stability: Tensor  # int64 [R]
    confidence: Tensor  # float32 [R]; -inf where no canvas ends before its last step


class Rules(Protocol):
    """What decides in the rows."""

    @property
    def settings(self) -> Settings | None:
        """None where a row has other rules than those that have settings."""

    def decide(self, view: Any) -> Any:
        """Which positions are accepted, and which rows stop; for torch."""
