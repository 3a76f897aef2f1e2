"""One reply in the engine: what it has said, what its slot holds, and what comes next.

All state of a request is here and nothing of any other's. Knows no batches and no threads.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sfumato.api import Reply, Settled
from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.constraints.causal_writing import CausalWriting
from sfumato.diffusion.limits import StopReason
from sfumato.diffusion.outcome import SettledCanvas
from sfumato.diffusion.sequence import Sequence
from sfumato.engine.any_row import AnyRow
from sfumato.engine.events import Account
from sfumato.engine.handle import Handle
from sfumato.engine.pooling import HiddenPooler
from sfumato.engine.prompt_scores import PromptScorer
from sfumato.engine.request import Prepared, Request
from sfumato.engine.slots import CacheKey, Lease
from sfumato.engine.stats import Phase, RowState
from sfumato.model.network import Network


class Row(AnyRow):
    """A request for a reply from submission to its terminal event."""

    request: Request
    handle: Handle

    def __init__(
        self,
        request: Request,
        prepared: Prepared,
        handle: Handle,
        submitted: float,
        limit_s: float | None,
    ) -> None:
        need, holds = prepared.need, (prepared.family, prepared.adapter)
        self.prepared = prepared
        self.sequence = Sequence(prepared.plan, prepared.policies, prepared.opening)
        super().__init__(request, handle, prepared.prompt, need, holds, submitted, limit_s)
        self.first_commit_s: float | None = None
        self.canvas: Canvas | None = None
        self._last: Draft | None = None  # of the canvas that is written token by token
        self.stats = self.sequence.stats
        self.is_causal = prepared.plan.config.mode == "causal"
        self.hidden: Tensor | None = None  # [1, hidden] of the prefix's last token, in causal mode
        self.scorer: PromptScorer | None = None
        self.pooler: HiddenPooler | None = None
        if request.scoring is not None:
            self.scorer = PromptScorer(request.scoring, prepared.prompt.ids)
        elif request.pooling is not None:
            self.pooler = HiddenPooler(request.pooling, len(prepared.prompt.ids))

    @property
    def cache_key(self) -> CacheKey:
        """Without the tokens whose hidden states are wanted: a slot holds none."""
        reader = self._reader
        if reader is None and not self.is_causal:
            return super().cache_key
        end = len(self.prefix) - (1 if reader is None else reader.least_encoded)
        return CacheKey(*self._holds, self.prefix[:end], media=())

    def leased(self, lease: Lease, now: float) -> None:
        super().leased(lease, now)
        self.hidden = None
        if self._reader is not None:
            self._reader.reset()

    @property
    def wants_hidden(self) -> bool:
        return self.is_causal or (self._reader is not None and not self._reader.done)

    @property
    def _reader(self) -> PromptScorer | HiddenPooler | None:
        """What reads the hidden states of the prompt."""
        return self.pooler if self.scorer is None else self.scorer

    def take_hidden(self, network: Network, start: int, hidden: Tensor) -> None:
        if self._reader is not None:
            self._reader.add(network.head, start, hidden, network.config.canvas_length)
        if self.is_causal and start + len(hidden) == len(self.prefix):
            self.hidden = hidden[-1:].clone()  # the others' memory is given back

    @property
    def last_hidden(self) -> Tensor:
        """[1, hidden], of the last token of the prefix, in causal mode and once that is encoded."""
        assert self.hidden is not None
        return self.hidden

    @property
    def is_scored(self) -> bool:
        """Whether only the prompt's scores, or its vector, are wanted, and all is encoded."""
        return not self.prepared.writes and not self.pending

    @property
    def phase(self) -> Phase:
        if self.lease is None:
            return "queued"
        if self.pending:
            return "commit" if self.sequence.reply else "prefill"
        return "causal" if self.is_causal else "denoise"

    @property
    def writing(self) -> CausalWriting | None:
        """The canvas that is finished token by token; None where one is denoised."""
        return self.sequence.writing

    @property
    def pending(self) -> int:
        """Of a canvas that is written, the last token is encoded with its step."""
        pending = super().pending
        return pending if self.writing is None else max(0, pending - 1)

    def took(self, tokens: int) -> None:
        alone = self.encodes_alone
        super().took(tokens)
        if self.writing is not None:  # each token is encoded: it goes alone up to the last
            self.encodes_alone = alone

    def waited(self, seconds: float) -> None:
        if self.encoded <= self.stats.prompt_tokens:
            self.stats.prefill_s += seconds
        else:
            self.stats.commit_s += seconds

    @property
    def canvas_length(self) -> int:
        return self.sequence.canvas_length

    @property
    def settled(self) -> bool:
        """Whether the canvas is done, and to be collected."""
        return self.canvas is not None and self.canvas.done

    @property
    def reason(self) -> StopReason | None:
        """Why the reply has ended; None while another canvas follows."""
        return self.sequence.reason

    def open(self, network: Network) -> Canvas:
        """The canvas to denoise, a fresh one where none is under way."""
        if self.canvas is None:
            self.canvas = Canvas.of(self.sequence.next_canvas(), network)
        return self.canvas

    def waits_for_host(self) -> bool:
        """Whether the next step needs to know what the last one gave: a grammar looks at it."""
        canvas = self.canvas
        is_held = self.sequence.constrained is not None
        return is_held and canvas is not None and canvas.launched > canvas.step

    def guide(self, draft: Draft) -> None:
        """Sets what a constraint asks of the next step."""
        if self.canvas is not None:
            self.sequence.guide(self.canvas, draft)

    def readable(self, draft: Draft) -> Draft:
        """The draft with its text."""
        return self.prepared.transcript.readable(draft)

    def collect(self, ids: list[int], draft: Draft) -> Settled | None:
        """What a canvas that has settled on these ids adds, `draft` being its last; None where it
        is drawn again, or written from here on."""
        assert self.canvas and self.canvas.convergence and self.lease
        settled = self.sequence.add_canvas(ids, self.canvas.convergence)
        self.canvas = None
        if self.writing is not None:
            self._last = draft
            self._extend_prefix(self.writing.ids)
        return None if settled is None else self._added(settled, draft)

    def write(self, scores: Tensor) -> Settled | None:
        """Writes one more token, by the scores float32 [vocabulary] of what follows the prefix; the
        settled canvas once it is done."""
        writing, sequence = self.writing, self.sequence
        assert writing is not None and self._last is not None
        writing.write(scores, sequence.config.processors, sequence.reply)
        if not writing.done:
            self._extend_prefix(writing.ids)
            return None
        settled, last = sequence.add_written(), self._last
        self._last = None
        assert settled is not None
        return self._added(settled, last)

    def _extend_prefix(self, canvas: list[int]) -> None:
        """Makes the prefix end in what the canvas under way has."""
        begun = len(self.prefix) - self.prompt_tokens - len(self.sequence.reply)
        self.prefix.extend(canvas[begun:])

    def _added(self, settled: SettledCanvas, last: Draft) -> Settled:
        self.hidden = None
        if settled.stop_reason is None:  # only a canvas that another follows goes into the cache
            before = self.prompt_tokens + len(self.sequence.reply) - len(settled.token_ids)
            self.prefix.extend(settled.token_ids[len(self.prefix) - before :])
        draft = self.sequence.as_settled(last, settled)
        return self.prepared.transcript.add(settled, self.readable(draft))

    def finish(self, reason: StopReason, now: float) -> Reply:
        """The reply as it stands."""
        outcome = self.sequence.outcome(reason, now - self.submitted)
        return self.prepared.transcript.finish(outcome)

    def state(self, now: float) -> RowState:
        canvas, lease = self.canvas, self.lease  # once: the engine's thread clears them
        return RowState(
            self.request.id,
            self.request.endpoint,
            self.phase,
            self.stats.canvases,
            canvas.step if canvas else 0,
            self.prepared.plan.config.max_steps or 0,
            self.prompt_tokens,
            len(self.sequence.reply),
            lease.index if lease else -1,
            now - self.submitted,
            self.cached,
            min(self.encoded, self.prompt_tokens),
        )

    def _steps(self) -> tuple[int, ...]:
        """Of each canvas; those of a causal reply, which are single tokens, count as one."""
        steps = self.stats.steps
        return (sum(steps),) if self.is_causal and steps else tuple(steps)

    def account_at(self, now: float) -> Account:
        stats, lease, sequence = self.stats, self.lease, self.sequence
        queue_s, slot_wait_s = self.waits_s(now)
        accepted, prediction = sequence.accepted_prediction, sequence.plan.prediction
        rejected = len(prediction.ids) - (accepted or 0) if prediction else None
        return Account(
            request_id=self.request.id,
            endpoint=self.request.endpoint,
            seed=self.prepared.plan.seed,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=self.cached,
            requested_tokens=self.request.max_tokens,
            output_tokens=len(sequence.reply),
            thought_tokens=self.prepared.thinking.count(sequence.reply),
            canvas_tokens=(stats.canvases + sequence.drawn_again) * sequence.canvas_length,
            steps=self._steps(),
            convergence=() if self.is_causal else tuple(stats.convergence),
            retries=sequence.retries,
            step_s=tuple(sequence.step_s),
            queue_s=queue_s,
            slot_wait_s=slot_wait_s,
            prefill_s=stats.prefill_s,
            denoise_s=stats.denoise_s,
            commit_s=stats.commit_s,
            first_draft_s=stats.first_draft_s,
            first_commit_s=self.first_commit_s,
            total_s=now - self.submitted,
            slot=lease.index if lease else None,
            context=lease.context if lease else None,
            allocated=lease.allocated if lease else False,
            accepted_prediction=accepted,
            rejected_prediction=rejected,
            constraint=None if stats.constraint is None else replace(stats.constraint),
        )
