"""One decision in the engine: what it reads, and what its slot holds."""

from __future__ import annotations

from dataclasses import dataclass

from sfumato.decisions.results import DecisionUsage
from sfumato.diffusion.constraints.decision_plan import DecisionPlan
from sfumato.diffusion.constraints.decision_progress import DecisionProgress
from sfumato.diffusion.constraints.read import Turn
from sfumato.engine.any_row import AnyRow
from sfumato.engine.decision import DecisionRequest
from sfumato.engine.events import Account, Decided
from sfumato.engine.handle import DecisionHandle
from sfumato.engine.request import Prompt
from sfumato.engine.stats import Phase, RowState


@dataclass(frozen=True)
class PreparedDecision:
    """A decision that can be done."""

    plan: DecisionPlan
    family: str  # with the tokens, decides what a slot holds

    @property
    def prompt(self) -> Prompt:
        """The prefix; later decisions are likely to share all of it."""
        return Prompt(self.plan.prefix, (len(self.plan.prefix),))


class DecisionRow(AnyRow):
    """A decision from submission to its terminal event."""

    request: DecisionRequest
    handle: DecisionHandle

    def __init__(
        self,
        request: DecisionRequest,
        prepared: PreparedDecision,
        handle: DecisionHandle,
        submitted: float,
        limit_s: float | None,
    ) -> None:
        prompt = prepared.prompt
        need, holds = len(prompt.ids), (prepared.family, None)
        super().__init__(request, handle, prompt, need, holds, submitted, limit_s)
        self.plan, self.progress = prepared.plan, DecisionProgress(prepared.plan)
        self.turn_number = -1  # of the last turn that its reads had, of all rows' turns
        self.prefill_s = self.read_s = 0.0
        self.read_step_s: list[float] = []

    @property
    def phase(self) -> Phase:
        if self.lease is None:
            return "queued"
        return "prefill" if self.pending else "read"

    def turns(self, tokens: int) -> list[Turn]:
        """What is read next, of at most so many tokens or of one read."""
        assert self.lease and self.lease.slot.length == len(self.prefix)
        return self.progress.turns(self.lease.slot, tokens)

    def waited(self, seconds: float) -> None:
        self.prefill_s += seconds

    def had_turns(self, seconds: float) -> None:
        """Turns were taken, in a step whose reads took so long."""
        self.progress.collect()
        self.read_s += seconds
        self.read_step_s.append(seconds)

    def finish(self, now: float) -> Decided:
        """The answers, once all is read."""
        tokens = self.prompt_tokens + self.plan.question_tokens
        usage = DecisionUsage(tokens, self.cached, self.progress.canvases)
        return Decided(self.progress.answers(), usage, self.account_at(now))

    def state(self, now: float) -> RowState:
        lease = self.lease  # once: the engine's thread clears it
        return RowState(
            self.request.id,
            self.request.endpoint,
            self.phase,
            self.progress.canvases,
            0,
            self.plan.settings.steps,
            self.prompt_tokens,
            0,
            lease.index if lease else -1,
            now - self.submitted,
        )

    def account_at(self, now: float) -> Account:
        lease = self.lease
        queue_s, slot_wait_s = self.waits_s(now)
        return Account(
            request_id=self.request.id,
            endpoint=self.request.endpoint,
            seed=self.plan.settings.seed,
            prompt_tokens=self.prompt_tokens + self.plan.question_tokens,
            cached_tokens=self.cached,
            requested_tokens=0,
            output_tokens=0,
            thought_tokens=0,
            canvas_tokens=0,
            steps=(),
            convergence=(),
            retries=0,
            queue_s=queue_s,
            slot_wait_s=slot_wait_s,
            prefill_s=self.prefill_s,
            denoise_s=self.read_s,
            commit_s=0.0,
            first_draft_s=None,
            first_commit_s=None,
            total_s=now - self.submitted,
            slot=lease.index if lease else None,
            context=lease.context if lease else None,
            allocated=lease.allocated if lease else False,
            step_s=tuple(self.read_step_s),
            questions=len(self.plan.questions),
            reads=self.progress.canvases,
        )
