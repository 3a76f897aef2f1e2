"""A task in the engine: its place in the queue, its lease, its work under way, and its account.

The row of any kind of request is the same: only its task knows what it is for. Knows no batches and
no threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator
from typing import Any

from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.limits import Times
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine.events import Account, Handle
from sfumato.engine.prepare import Job
from sfumato.engine.queue.slots import CacheKey, Lease, Media
from sfumato.engine.request import AnyRequest
from sfumato.engine.stats import Phase, RowState
from sfumato.model.adapters import NONE
from sfumato.model.cache import Slot
from sfumato.model.vision.mask import ImageMask, SoftTokens
from sfumato.tasks.score_progress import ScoreProgress
from sfumato.tasks.works import Denoise, Draw, Encode, PlacedPicture, Score, Want, Work

_PHASES: dict[type, Phase] = {Draw: "causal", Denoise: "denoise", Score: "read"}


class Row:
    """A task from submission to its terminal event. Times are readings of the engine's clock."""

    def __init__(
        self,
        request: AnyRequest,
        job: Job,
        handle: Handle[Any],
        submitted: float,
        limit_s: float | None,
        image_mask: ImageMask = "model",
        adapter: int = NONE,
    ) -> None:
        """image_mask: the network's; adapter: the number of the one that serves it."""
        self.request, self.handle, self.limit_s = request, handle, limit_s
        self.task, self.job, self.submitted = job.task, job, submitted
        self.claim, self.adapter = job.task.claim, adapter
        self.first_in_queue: float | None = None
        self.admitted: float | None = None
        self.leader: Row | None = None  # whose encoding this one waits for, in the queue
        self.shared = 0  # tokens that both prompts begin with
        self.lease: Lease | None = None
        self.cached = 0  # tokens of the prompt that the slot held already
        # All that the task has asked to encode; before it has, its prompt.
        self.prefix = array("i", self.claim.prompt.ids)
        self.encoded = 0  # how much of it the slot holds
        self.soft: SoftTokens | None = None  # of one picture that comes, by its place in the prefix
        self._media = tuple(
            Media(each.start, each.end, f"{image_mask} {each.patches.key}")
            for each in self.claim.prompt.pictures
        )
        self.encodes_alone = False  # after its encoding failed together with others
        self.last_scored = -1  # the number of this row's last share of a score, of all rows' shares
        self.reads = 0  # canvases that were read
        self.times = job.task.stats or Times()
        self.step_s: list[float] = []  # of each forward that denoised or read
        self.first_commit_s: float | None = None  # since the submission
        self.run: Generator[Any, Any, Any] | None = None  # once it has a slot
        self.work: Work | None = None
        self.last_config: SamplerConfig | None = None  # of the canvas that was denoised last
        self._asked = 0  # tokens that the task has asked to encode
        self._drafts: dict[Canvas, Draft] = {}  # of the work under way
        self._score: ScoreProgress | None = None

    # The queue and the slot.

    @property
    def prompt_tokens(self) -> int:
        return len(self.claim.prompt.ids)

    @property
    def cache_key(self) -> CacheKey:
        """What a slot must hold for this row to reuse it: without the tokens whose hidden states
        are wanted, for a slot holds none."""
        fresh = self.claim.fresh
        if self.run is not None:
            fresh = 0 if self.want is None else self.want.least
        ids = self.prefix[: max(0, len(self.prefix) - fresh)] if fresh else self.prefix
        media = tuple(each for each in self._media if each.start < len(ids))
        return CacheKey(self.claim.family, self.adapter, ids, media, self.claim.blocks)

    @property
    def slot(self) -> Slot:
        """The leased one."""
        assert self.lease
        return self.lease.slot

    def leased(self, lease: Lease, now: float) -> None:
        """Takes a slot, which may hold a part of the prefix already. What was gathered from another
        slot begins anew."""
        if self.admitted is None:
            self.admitted, self.cached = now, lease.cached
        self.lease, self.encoded = lease, lease.cached
        if self.want is not None:
            self.want.begin(len(self.prefix))
        if isinstance(self.work, Score):
            self._score = ScoreProgress(self.work)

    # The work under way.

    def take(self, work: Work) -> None:
        """Takes what the task asks for next."""
        self.work, self._drafts, self._score = work, {}, None
        if isinstance(work, Encode):
            self._asked += len(work.ids)
            missing = self._asked - len(self.prefix)
            self.prefix.extend(work.ids[len(work.ids) - missing :] if missing > 0 else ())
            if work.want is not None:
                work.want.begin(len(self.prefix))
        elif isinstance(work, Denoise):
            self.last_config = work.canvases[-1].config
        elif isinstance(work, Score):
            self._score = ScoreProgress(work)

    @property
    def pending(self) -> int:
        """Tokens to encode before anything else can be done."""
        return len(self.prefix) - self.encoded

    @property
    def _ahead(self) -> list[PlacedPicture]:
        """The pictures that are not encoded yet."""
        return [each for each in self.claim.prompt.pictures if each.start >= self.encoded]

    @property
    def lacking(self) -> PlacedPicture | None:
        """The picture that comes next, where its soft tokens are not there."""
        picture = next(iter(self._ahead), None)
        is_here = picture is None or (self.soft is not None and self.soft.start == picture.start)
        return None if is_here else picture

    def see(self, soft: Tensor) -> None:
        """Takes the soft tokens [n, hidden] of the picture that it lacks."""
        assert self.lacking is not None and len(soft) == self.lacking.patches.soft_tokens
        self.soft = SoftTokens(self.lacking.start, soft)

    def ready(self, most: int, oversized: bool = False) -> int:
        """How many tokens can be encoded next, `most` at most: up to a picture, or past it, and not
        past one whose soft tokens are not there. oversized: whether a picture that comes at once
        may have more. Where the prefix has blocks, up to the end of one, and of one at least."""
        blocks, end = self.claim.blocks, self.encoded
        end += blocks.together(end, most, self.pending) if most > 0 else 0
        for picture in self._ahead:
            if end <= picture.start:
                break
            fits = picture.end <= end or (oversized and picture.start == self.encoded)
            if not fits or self.soft is None or self.soft.start != picture.start:
                end = picture.start
                break
            end = max(end, picture.end)
        return end - self.encoded

    @property
    def want(self) -> Want | None:
        """What gathers hidden states of the tokens that are encoded now."""
        return self.work.want if isinstance(self.work, Encode) else None

    def advance(self, tokens: int) -> None:
        """Counts tokens of the prefix that have been encoded."""
        self.encoded += tokens
        if self.soft is not None and self.soft.start < self.encoded:
            self.soft = None
        self.encodes_alone = self.encodes_alone and self.pending > 0

    @property
    def score(self) -> ScoreProgress:
        """The `Score` under way."""
        assert self._score is not None
        return self._score

    @property
    def unanswered(self) -> list[Canvas]:
        """The canvases of the `Denoise` under way that have not had their step, those that were
        launched least often first."""
        canvases = self.work.canvases if isinstance(self.work, Denoise) else ()
        left = [canvas for canvas in canvases if canvas not in self._drafts]
        return sorted(left, key=lambda canvas: canvas.launched)

    def may_launch(self, canvas: Canvas) -> bool:
        """Whether a canvas may take another step although the host may not know its last one.
        Canvases side by side go on together, once all have answered."""
        assert isinstance(self.work, Denoise) and canvas.config.max_steps
        is_ahead = self.work.ahead and len(self.work.canvases) == 1
        return canvas.launched < canvas.config.max_steps and (
            is_ahead or canvas.launched == canvas.step
        )

    def answer(self, canvas: Canvas, draft: Draft) -> None:
        """Takes the draft of a canvas of the work under way."""
        self._drafts[canvas] = draft

    @property
    def is_answered(self) -> bool:
        """Whether the work under way is done."""
        if isinstance(self.work, Encode):
            return not self.pending
        if isinstance(self.work, Denoise):
            return len(self._drafts) == len(self.work.canvases)
        if isinstance(self.work, Draw):
            return bool(self._drafts)
        return isinstance(self.work, Score) and self.score.done

    @property
    def answers(self) -> Any:
        """The result of the work, once it is done."""
        work = self.work
        if isinstance(work, Encode):
            return None if work.want is None else work.want.result()
        if isinstance(work, Denoise):
            return [self._drafts[canvas] for canvas in work.canvases]
        if isinstance(work, Draw):
            return self._drafts[work.canvas]
        return self.score.results

    # Figures.

    def waited(self, seconds: float) -> None:
        """Adds the time of a step's encode work, which had some of this row's in it."""
        if self.encoded <= self.prompt_tokens:
            self.times.prefill_s += seconds
        else:
            self.times.commit_s += seconds

    @property
    def phase(self) -> Phase:
        if self.lease is None:
            return "queued"
        if self.encoded < self.prompt_tokens or self.work is None:
            return "prefill"
        return "commit" if self.pending else _PHASES.get(type(self.work), "commit")

    def state(self, now: float) -> RowState:
        """What others see of it, from any thread."""
        encoded = min(self.encoded, self.prompt_tokens)
        tokens = self.prompt_tokens + self.claim.opened
        until_now = vars(self.account_at(now)) | {"prompt_tokens": tokens}
        return RowState(**until_now, phase=self.phase, encoded_tokens=encoded)

    def account_at(self, now: float) -> Account:
        # Once: the engine's thread changes them.
        figures, times, lease = self.task.figures, self.times, self.lease
        began = now if self.admitted is None else self.admitted
        first = began if self.first_in_queue is None else self.first_in_queue
        return Account(
            **vars(figures),
            request_id=self.request.id,
            endpoint=self.request.endpoint,
            prompt_tokens=self.prompt_tokens + self.claim.opened + figures.question_tokens,
            cached_tokens=self.cached,
            queue_s=began - self.submitted,
            slot_wait_s=began - first,
            prefill_s=times.prefill_s,
            denoise_s=times.denoise_s,
            commit_s=times.commit_s,
            first_draft_s=times.first_draft_s,
            first_commit_s=self.first_commit_s,
            total_s=now - self.submitted,
            slot=lease.index if lease else None,
            context=lease.slot.capacity if lease else None,
            allocated=lease.allocated if lease else False,
            step_s=tuple(self.step_s),
            reads=None if figures.questions is None else self.reads,
        )
