"""What a task took, as its driver stamps it. Tasks know no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from sfumato.diffusion.outcome import Stats


@dataclass
class Times:
    """Seconds."""

    prefill_s: float = 0.0
    commit_s: float = 0.0
    denoise_s: float = 0.0  # draws and scores with it
    first_draft_s: float | None = None  # since the beginning, as the next two
    first_commit_s: float | None = None
    total_s: float = 0.0
    step_s: list[float] = field(default_factory=list)  # of each forward that denoised or read

    def write(self, stats: Stats | None) -> None:
        """Completes the statistics of a task that has ended, if it has any."""
        if stats is None:
            return
        stats.prefill_s, stats.commit_s = self.prefill_s, self.commit_s
        stats.denoise_s, stats.total_s = self.denoise_s, self.total_s
        stats.first_draft_s = self.first_draft_s
