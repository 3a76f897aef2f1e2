"""What a reply gives on its way and at its end, as ids and figures. Knows no texts."""

from __future__ import annotations

from dataclasses import dataclass, field

from sfumato.diffusion.canvas import Convergence
from sfumato.diffusion.constraints.constrained_reply import ConstraintReport
from sfumato.diffusion.limits import StopReason


@dataclass
class Stats:
    """What a reply took. Times in seconds; set-up (loading) is not in them."""

    prompt_tokens: int
    output_tokens: int = 0
    canvases: int = 0
    steps: list[int] = field(default_factory=list)  # denoising forwards of each canvas
    convergence: list[Convergence] = field(default_factory=list)
    prefill_s: float = 0.0
    denoise_s: float = 0.0
    commit_s: float = 0.0
    first_draft_s: float | None = None
    accepted_prediction: int | None = None  # tokens of it in the reply; None: there was none
    dropped_predictions: int = 0  # canvases that were drawn again without it
    constraint: ConstraintReport | None = None  # None: the reply had no constraint
    total_s: float = 0.0  # from first to last event, with what the consumer did in between

    @property
    def tokens_per_forward(self) -> float:
        """Visible tokens over denoising forwards."""
        return self.output_tokens / max(1, sum(self.steps))


@dataclass(frozen=True)
class SettledCanvas:
    """A canvas that has finished: what it adds to the reply."""

    canvas: int
    token_ids: list[int]  # without an end token and all after it
    convergence: Convergence
    stop_reason: StopReason | None  # None: another canvas follows
    end_id: int | None = field(default=None, compare=False)  # the end token after token_ids


@dataclass(frozen=True)
class Outcome:
    """How a reply ended, as ids."""

    token_ids: list[int]
    stop_reason: StopReason
    stats: Stats
    warnings: tuple[str, ...]
