"""One fill in the engine: its canvases, and what its slot holds."""

from __future__ import annotations

from dataclasses import replace

import torch

from sfumato.api import Reply, Settled
from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.constraints.fill_progress import FillOutcome, FillProgress
from sfumato.diffusion.limits import StopReason
from sfumato.diffusion.outcome import Stats
from sfumato.engine.any_row import AnyRow
from sfumato.engine.events import Account
from sfumato.engine.fill_request import PreparedFill
from sfumato.engine.handle import Handle
from sfumato.engine.request import Request
from sfumato.engine.stats import Phase, RowState
from sfumato.fills import Fills
from sfumato.model.network import Network
from sfumato.text.stops import StopStrings


class FillRow(AnyRow):
    """A request for a text with holes from submission to its terminal event."""

    request: Request
    handle: Handle

    def __init__(
        self,
        request: Request,
        prepared: PreparedFill,
        fills: Fills,
        handle: Handle,
        submitted: float,
        limit_s: float | None,
    ) -> None:
        prompt = prepared.prompt
        need, holds = len(prompt.ids), (prepared.family, None)
        super().__init__(request, handle, prompt, need, holds, submitted, limit_s)
        self.plan, self._fills = prepared.plan, fills
        self._progress: FillProgress | None = None
        self.prefill_s = self.denoise_s = 0.0
        self.step_s: list[float] = []
        self.first_draft_s: float | None = None
        self._step = 0  # of the canvas whose drafts are shown

    @property
    def phase(self) -> Phase:
        if self.lease is None:
            return "queued"
        return "prefill" if self.pending else "denoise"

    def progress(self, network: Network) -> FillProgress:
        """Its rounds, begun at the first call."""
        if self._progress is None:
            self._progress = FillProgress(self.plan, network)
            for canvas in self._progress.open:
                canvas.prepare()
        return self._progress

    @property
    def done(self) -> bool:
        return self._progress is not None and self._progress.done

    def waited(self, seconds: float) -> None:
        self.prefill_s += seconds

    def had_step(self, seconds: float, is_step: bool, now: float) -> None:
        """A denoising step, or the scores of a round, took so long."""
        self.denoise_s += seconds
        if is_step:
            self.step_s.append(seconds)
            if self.first_draft_s is None:
                self.first_draft_s = now - self.submitted

    def take(self, steps: list[tuple[Canvas, Draft]]) -> Draft | None:
        """Takes in the steps of its canvases; returns the draft that is shown, readable."""
        assert self._progress
        shown, number, draft = self._progress.shown, self._progress.round, None
        for canvas, each in steps:
            self._progress.took(canvas, each)
            if canvas is shown:
                pinned = canvas.pinned >= 0
                draft = replace(self._fills.readable(each), canvas=number, pinned=pinned)
                self._step = each.step
        return draft

    def finish(self, now: float) -> tuple[Settled, Reply]:
        """What filled the holes, as a canvas that has settled and as the reply."""
        assert self._progress
        outcome = self._progress.outcome(now - self.submitted)
        outcome.stats.prefill_s, outcome.stats.denoise_s = self.prefill_s, self.denoise_s
        outcome.stats.first_draft_s = self.first_draft_s
        filled = self._fills.filled(self.plan, outcome)
        ids = [token for hole in outcome.holes for token in hole]
        text, reason = self._cut("".join(hole.text for hole in filled.holes), outcome)
        convergence = outcome.stats.convergence
        last = convergence[-1] if convergence else "converged"
        top_ids, top_probs = _top(outcome)
        settled = Settled(0, text, "", ids, last, top_ids=top_ids, top_probs=top_probs)
        warnings = filled.warnings
        return settled, Reply(text, None, (), ids, reason, outcome.stats, warnings, filled)

    def cancelled(self, now: float) -> Reply:
        """The reply of a fill that was ended: no hole is filled before all are."""
        stats = Stats(self.prompt_tokens) if self._progress is None else self._progress.stats
        stats.prefill_s, stats.denoise_s, stats.total_s = (
            self.prefill_s,
            self.denoise_s,
            now - self.submitted,
        )
        return Reply("", None, (), [], "cancelled", stats)

    def _cut(self, text: str, outcome: FillOutcome) -> tuple[str, StopReason]:
        """The text before the first stop string, and why it ends there."""
        strings = StopStrings(self.request.stop).strings
        at = min((place for s in strings if (place := text.find(s)) >= 0), default=None)
        if at is not None:
            return text[:at], "stop"
        holes = zip(self.plan.template.holes, outcome.holes, strict=True)
        is_full = any(hole.at_most == len(ids) > 1 for hole, ids in holes)
        return text, "max_tokens" if is_full else "eos"

    def state(self, now: float) -> RowState:
        lease, progress = self.lease, self._progress  # once: the engine's thread changes them
        return RowState(
            self.request.id,
            self.request.endpoint,
            self.phase,
            0 if progress is None else progress.round,
            self._step,
            self.plan.config.max_steps or 0,
            self.prompt_tokens,
            0,
            lease.index if lease else -1,
            now - self.submitted,
        )

    def account_at(self, now: float) -> Account:
        lease, progress, template = self.lease, self._progress, self.plan.template
        queue_s, slot_wait_s = self.waits_s(now)
        stats = None if progress is None else progress.stats
        return Account(
            request_id=self.request.id,
            endpoint=self.request.endpoint,
            seed=self.plan.seed,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached,
            requested_tokens=sum(map(template.longest, range(len(template.holes)))),
            output_tokens=stats.output_tokens if stats else 0,
            thought_tokens=0,
            canvas_tokens=progress.canvas_tokens if progress else 0,
            steps=tuple(stats.steps) if stats else (),
            convergence=tuple(stats.convergence) if stats else (),
            retries=0,
            queue_s=queue_s,
            slot_wait_s=slot_wait_s,
            prefill_s=self.prefill_s,
            denoise_s=self.denoise_s,
            commit_s=0.0,
            first_draft_s=self.first_draft_s,
            first_commit_s=now - self.submitted if self.done else None,
            total_s=now - self.submitted,
            slot=lease.index if lease else None,
            context=lease.context if lease else None,
            allocated=lease.allocated if lease else False,
            step_s=tuple(self.step_s),
        )


def _top(outcome: FillOutcome) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The most probable tokens of all holes and their probabilities, [tokens, top]."""
    top = [each for each in outcome.top if each is not None]
    if len(top) < len(outcome.top):
        return None, None
    return torch.cat([ids for ids, _ in top]), torch.cat([probs for _, probs in top])
