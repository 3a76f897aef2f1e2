"""One request in the engine: what it has said, what its slot holds, and what comes next.

All state of a request is here and nothing of any other's. Knows no batches and no threads.
"""

from __future__ import annotations

from array import array

from sfumato.api import Reply, Settled
from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.limits import StopReason
from sfumato.diffusion.sequence import Sequence
from sfumato.engine.events import Account
from sfumato.engine.handle import Handle
from sfumato.engine.lease import CacheKey, Lease
from sfumato.engine.request import Prepared, Request
from sfumato.engine.stats import Phase, RowState
from sfumato.model.network import Network


class Row:
    """A request from submission to its terminal event. Times are readings of the engine's clock."""

    def __init__(
        self,
        request: Request,
        prepared: Prepared,
        handle: Handle,
        submitted: float,
        limit_s: float | None,
    ) -> None:
        self.request, self.handle, self.limit_s = request, handle, limit_s
        self.prepared = prepared
        self.submitted = submitted
        self.first_in_queue: float | None = None
        self.admitted: float | None = None
        self.first_commit_s: float | None = None
        self.leader: Row | None = None  # the row whose encoding this one waits for, in the queue
        self.shared = 0  # tokens that both prompts begin with
        self.lease: Lease | None = None
        self.cached = 0  # tokens of the prompt that the slot held already
        self.prefix = array("i", prepared.prompt.ids)  # all that comes before the canvas
        self.encoded = 0  # how much of it the slot holds
        self.encodes_alone = False  # after its encoding failed together with others
        self.canvas: Canvas | None = None
        self.sequence = Sequence(prepared.plan, prepared.policies, prepared.opening)
        self.stats = self.sequence.stats

    @property
    def prompt_tokens(self) -> int:
        return len(self.prepared.prompt.ids)

    @property
    def cache_key(self) -> CacheKey:
        """What a slot must hold for this row to reuse it."""
        return CacheKey(self.prepared.family, self.prepared.adapter, self.prefix, media=())

    @property
    def pending(self) -> int:
        """Tokens to encode before the next canvas can be denoised."""
        return len(self.prefix) - self.encoded

    @property
    def phase(self) -> Phase:
        if self.lease is None:
            return "queued"
        if self.pending:
            return "commit" if self.sequence.reply else "prefill"
        return "denoise"

    def leased(self, lease: Lease, now: float) -> None:
        """Takes a slot, which may hold a part of the prefix already."""
        if self.admitted is None:
            self.admitted, self.cached = now, lease.cached
        self.lease, self.encoded = lease, lease.cached

    def took(self, tokens: int) -> None:
        """Tokens of the prefix have been encoded."""
        self.encoded += tokens
        self.encodes_alone = self.encodes_alone and self.pending > 0

    def waited(self, seconds: float) -> None:
        """A step's encode work took so long, some of this row's in it."""
        if self.encoded <= self.stats.prompt_tokens:
            self.stats.prefill_s += seconds
        else:
            self.stats.commit_s += seconds

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

    def readable(self, draft: Draft) -> Draft:
        """The draft with its text."""
        return self.prepared.transcript.readable(draft)

    def collect(self, ids: list[int], draft: Draft) -> Settled | None:
        """What a canvas that has settled on these ids adds, `draft` being its last; None where it
        is drawn again."""
        assert self.canvas and self.canvas.convergence and self.lease
        settled = self.sequence.add_canvas(ids, self.canvas.convergence)
        self.canvas = None
        if settled is None:
            return None
        if settled.stop_reason is None:  # only a canvas that another follows goes into the cache
            self.prefix.extend(settled.token_ids)
        return self.prepared.transcript.add(settled, draft)

    def finish(self, reason: StopReason, now: float) -> Reply:
        """The reply as it stands."""
        outcome = self.sequence.outcome(reason, now - self.submitted)
        return self.prepared.transcript.finish(outcome)

    def state(self, now: float) -> RowState:
        """What others see of it, from any thread."""
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
        )

    def account_at(self, now: float) -> Account:
        stats, lease, sequence = self.stats, self.lease, self.sequence
        began = now if self.admitted is None else self.admitted
        first = began if self.first_in_queue is None else self.first_in_queue
        return Account(
            request_id=self.request.id,
            endpoint=self.request.endpoint,
            seed=self.prepared.plan.seed,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=self.cached,
            requested_tokens=self.request.max_tokens,
            output_tokens=len(sequence.reply),
            thought_tokens=self.prepared.thinking.count(sequence.reply),
            canvas_tokens=(stats.canvases + sequence.retries) * sequence.canvas_length,
            steps=tuple(stats.steps),
            convergence=tuple(stats.convergence),
            retries=sequence.retries,
            step_s=tuple(sequence.step_s),
            queue_s=began - self.submitted,
            slot_wait_s=began - first,
            prefill_s=stats.prefill_s,
            denoise_s=stats.denoise_s,
            commit_s=stats.commit_s,
            first_draft_s=stats.first_draft_s,
            first_commit_s=self.first_commit_s,
            total_s=now - self.submitted,
            slot=lease.index if lease else None,
            context=lease.context if lease else None,
            allocated=lease.allocated if lease else False,
        )
