"""One request in the engine: what it has said, what its slot holds, and what comes next.

All state of a request is here and nothing of any other's. Knows no batches and no threads.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import torch

from sfumato.api import Reply, Settled
from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.guards import repetition
from sfumato.diffusion.limits import StopReason, truncate_canvas
from sfumato.diffusion.loop import Outcome, SettledCanvas, Stats
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.processors import MinTokens
from sfumato.engine.events import Account
from sfumato.engine.handle import Handle
from sfumato.engine.request import Prepared, Request
from sfumato.engine.slots import Lease
from sfumato.engine.stats import Phase, RowState
from sfumato.model.head import HeadStats
from sfumato.text.reply import parse_reply

RETRIES = 2
"""Times that an empty answer is drawn again; the last time it may not end where it did."""


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
        self.prepared, self.config = prepared, prepared.config
        self.submitted = submitted
        self.first_in_line: float | None = None
        self.admitted: float | None = None
        self.first_commit_s: float | None = None
        self.leader: Row | None = None  # the row whose encoding this one waits for, in line
        self.shared = 0  # tokens that both prompts begin with
        self.lease: Lease | None = None
        self.cached = 0  # tokens of the prompt that the slot held already
        self.prefix = array("i", prepared.prompt.ids)  # all that comes before the canvas
        self.encoded = 0  # how much of it the slot holds
        self.alone = False  # encodes by itself, after it failed in company
        self.canvas: Canvas | None = None
        self.reply: list[int] = []
        self.reason: StopReason | None = None
        self.stats = Stats(prompt_tokens=len(prepared.prompt.ids))
        self.warnings: list[str] = []
        self.attempt, self.retries, self.spent = 0, 0, 0  # spent: steps of earlier attempts

    @property
    def prompt_tokens(self) -> int:
        return len(self.prepared.prompt.ids)

    @property
    def pending(self) -> int:
        """Tokens to encode before the next canvas can be denoised."""
        return len(self.prefix) - self.encoded

    @property
    def phase(self) -> Phase:
        if self.lease is None:
            return "queued"
        if self.pending:
            return "commit" if self.reply else "prefill"
        return "denoise"

    def leased(self, lease: Lease, now: float) -> None:
        """Takes a slot, which may hold a part of the prefix already."""
        if self.admitted is None:
            self.admitted, self.cached = now, lease.cached
        self.lease, self.encoded = lease, lease.cached

    def took(self, tokens: int) -> None:
        """Tokens of the prefix have been encoded."""
        self.encoded += tokens
        self.alone = self.alone and self.pending > 0

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

    def open(self, vocab_size: int, device: torch.device) -> Canvas:
        """The canvas to denoise, a fresh one where none is under way."""
        if self.canvas is None:
            noise = Noise(self.prepared.seed, self.stats.canvases, self.attempt)
            pins = dict(enumerate(self.prepared.opening[len(self.reply) :][: self._length]))
            self.canvas = Canvas(self.config, noise, vocab_size, device, self.reply, pins)
        return self.canvas

    def advance(self, stats: HeadStats) -> Draft:
        """Moves the canvas a step on."""
        assert self.canvas
        draft = self.prepared.transcript.readable(self.canvas.advance(stats))
        self.stats.steps[self.stats.canvases :] = [self.spent + draft.step]
        return draft

    def collect(self, draft: Draft) -> Settled | None:
        """What a canvas that has settled adds, `draft` being its last; None where it is drawn
        again. Sets `reason` where the reply ends with it."""
        assert self.canvas and self.canvas.convergence
        limits, number = self.prepared.limits, self.stats.canvases
        whole: list[int] = self.canvas.argmax.tolist()
        added, reason = truncate_canvas(whole, self.reply, self.config, limits)
        kept = self._thought_kept(added)
        if kept is not None and limits.cut(self.reply, added[:kept]) is None:
            assert self.prepared.thinking.closes is not None
            added, reason = [*added[:kept], self.prepared.thinking.closes], None
            self.warnings.append(f"canvas {number}: the thought was ended to leave room to answer")
        elif reason == "eos" and self._draws_again(added):
            return None
        if warning := repetition(added, reason):
            self.warnings.append(f"canvas {number}: {warning}")
        settled = SettledCanvas(number, added, self.canvas.convergence, reason)
        self.reply += added
        if reason == "stop":  # a stop string may begin in an earlier canvas
            self.reply = self.reply[: limits.cut(self.reply, [])]
        self.stats.canvases += 1
        self.stats.convergence.append(self.canvas.convergence)
        self.reason = reason
        self._next_canvas()
        if reason is None:  # only a canvas that another follows goes into the cache
            self.prefix.extend(added)
        return self.prepared.transcript.add(settled, draft)

    def finish(self, reason: StopReason, now: float) -> Reply:
        """The reply as it stands."""
        stats = self.stats
        stats.output_tokens, stats.total_s = len(self.reply), now - self.submitted
        outcome = Outcome(self.reply, reason, stats, tuple(self.warnings))
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
            self.config.max_steps or 0,
            self.prompt_tokens,
            len(self.reply),
            lease.index if lease else -1,
            now - self.submitted,
        )

    def account(self, now: float) -> Account:
        stats, lease = self.stats, self.lease
        began = now if self.admitted is None else self.admitted
        line = began if self.first_in_line is None else self.first_in_line
        return Account(
            request_id=self.request.id,
            endpoint=self.request.endpoint,
            seed=self.prepared.seed,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=self.cached,
            requested_tokens=self.request.max_tokens,
            output_tokens=len(self.reply),
            thought_tokens=self.prepared.thinking.count(self.reply),
            canvas_tokens=(stats.canvases + self.retries) * self._length,
            steps=tuple(stats.steps),
            convergence=tuple(stats.convergence),
            retries=self.retries,
            queue_s=began - self.submitted,
            slot_wait_s=began - line,
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

    @property
    def _length(self) -> int:
        assert self.config.canvas_length
        return self.config.canvas_length

    def _next_canvas(self) -> None:
        self.canvas, self.config = None, self.prepared.config
        self.attempt, self.spent = 0, 0

    def _thought_kept(self, added: list[int]) -> int | None:
        """How many tokens of the canvas stay before its thought is closed, where it must be and
        an answer still has room."""
        kept = self.prepared.thinking.cut(self.reply, added)
        if kept is None or len(self.reply) + kept + 1 >= self.prepared.limits.max_tokens:
            return None
        assert self.lease
        prefix = len(self.prefix) + kept + 1
        fits = prefix <= self.lease.context and prefix + self._length <= self.prepared.context
        return kept if fits else None

    def _draws_again(self, added: list[int]) -> bool:
        """Whether the answer is empty and the canvas begins anew with another draw."""
        if not self.request.retry_empty or self.attempt == RETRIES:
            return False
        transcript = self.prepared.transcript
        parsed = parse_reply(transcript.pieces([*self.reply, *added]), transcript.markers)
        if (
            parsed.text.strip() or parsed.tool_calls or parsed.warnings
        ):  # a broken call is something
            return False
        if self.attempt == 0:
            self.warnings.append(
                f"canvas {self.stats.canvases}: the answer was empty and was drawn again"
            )
        self.attempt, self.retries = self.attempt + 1, self.retries + 1
        self.spent = self.stats.steps[self.stats.canvases]
        self.canvas = None
        if self.attempt == RETRIES:
            # The answer may not end before it has begun.
            ban = MinTokens(len(self.reply) + len(added) + 1, self.prepared.limits.end_ids)
            self.config = replace(self.config, processors=(*self.config.processors, ban))
        return True
