"""A reply: canvases follow each other until it ends.

All rules of replies stand here: end tokens, `max_tokens`, stop strings, the end of a thought, empty
answers, repetition, predictions, and how a constraint holds canvases. Knows ids: what a
thought is, the markers among the ids say, as they do to the parser of replies; `Policies` say what
an empty answer is, and a `ReplyText` makes text of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sfumato.diffusion.canvas import Canvas, CanvasPlan, Convergence, Draft, Guidance
from sfumato.diffusion.constraints.constrained_reply import (
    CausalWriting,
    ConstrainedReply,
    written_draft,
)
from sfumato.diffusion.limits import (
    Limits,
    Outcome,
    ReplyPlan,
    ReplyText,
    SettledCanvas,
    Stats,
    StopReason,
    of_tokens,
)
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.prediction import predicted_steps
from sfumato.diffusion.sampler import MinTokens
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.diffusion.verification import CanvasVerification
from sfumato.model.scores import TokenScores
from sfumato.tasks.wants import LastState, NextScores, Ranks, Together
from sfumato.tasks.works import (
    Claim,
    Denoise,
    Draw,
    Encode,
    Figures,
    MakeCanvas,
    Prompt,
    Rank,
    Score,
    Want,
    prompt_work,
)
from sfumato.text.markers import ChatMarkers
from sfumato.text.reply import Region, common_start
from sfumato.text.tokenizer import Tokenizer

ANSWER = 256
"""Tokens that a thought leaves for the answer, however short a canvas is; half of `max_tokens`
where that is less."""


@dataclass(frozen=True)
class ThinkingBudget:
    """How many tokens of a reply may be thought, and the markers between which thoughts stand."""

    format: ChatMarkers
    markers: Mapping[int, str]  # the special tokens, by id
    closes: int | None  # the one that ends a thought; None: this tokenizer knows no thoughts
    header: tuple[int, ...]  # names the channel; no part of the thought
    tokens: int
    strict: bool  # the request sets it, so that a thought that ended by itself is cut too
    ignore_ends: bool  # end markers end no thought
    begins: Region = Region.ANSWER  # where the prompt ends

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        format: ChatMarkers,
        requested: int | None,
        max_tokens: int,
        ignore_ends: bool,
        begins: Region = Region.ANSWER,
    ) -> ThinkingBudget:
        """requested: the request's own limit. In any case min(ANSWER, max_tokens // 2) tokens are
        left for the answer; None shortens only a thought that would take them."""
        header = tuple(tokenizer.encode(format.thought_header, special=False))
        answer, around = min(ANSWER, max_tokens // 2), 2 + len(header)
        room = max(0, max_tokens - answer - around)
        tokens = room if requested is None else min(requested, room)
        markers = {token: tokenizer.token_text(token) for token in tokenizer.special_ids}
        closes = tokenizer.token_id(format.thought_close)
        strict = requested is not None
        return cls(format, markers, closes, header, tokens, strict, ignore_ends, begins)

    def read(self, ids: Iterable[int] = ()) -> Thoughts:
        """The thoughts of a reply that begins with these tokens."""
        thoughts = Thoughts(self, self.begins)
        thoughts.add(ids)
        return thoughts


@dataclass
class Thoughts:
    """Finds the thoughts of a reply, which it is given as it grows: each token once."""

    budget: ThinkingBudget
    region: Region
    length: int = 0  # tokens read
    opened: int = 0  # the place after the last marker
    head: tuple[int, ...] = ()  # the tokens from there on, as many as a header has at most
    ended: tuple[tuple[int, range], ...] = ()  # the ranges of thoughts that have ended

    def add(self, ids: Iterable[int]) -> None:
        """Reads on."""
        budget = self.budget
        for token in ids:
            marker, begun = budget.markers.get(token), None
            if marker is not None:
                begun = self.region.begun_by(marker, budget.format, budget.ignore_ends)
            if begun is not None:
                self.ended = self.ranges
                self.region, self.opened, self.head = begun, self.length + 1, ()
            elif len(self.head) < len(budget.header):
                self.head += (token,)
            self.length += 1

    @property
    def count(self) -> int:
        """The tokens that are thought, without markers and header."""
        return sum(len(places) for _, places in self.ranges)

    def cut(self, added: Sequence[int]) -> int | None:
        """How many tokens of a settled canvas, which comes next, are kept before its thought is
        closed; None where the canvas stays as it is."""
        if self.budget.closes is None:
            return None
        after = replace(self)
        after.add(added)
        left, strict = self.budget.tokens, self.budget.strict
        for opened, places in after.ranges:
            if not left:  # then the header goes too: there may be no room for it
                places = range(opened, places.stop)
            if len(places) > left and (strict or places.stop == after.length):
                return max(0, places[left] - self.length)
            left = max(0, left - len(places))
        return None

    @property
    def ranges(self) -> tuple[tuple[int, range], ...]:
        """Each thought, the open one last: the place after its opening marker, and the places of
        its tokens, without markers and header."""
        if self.region is not Region.THOUGHT:
            return self.ended
        named = self.head == self.budget.header[: len(self.head)]
        begin = self.opened + len(self.head) if named else self.opened
        return (*self.ended, (self.opened, range(begin, self.length)))


LONGEST = 16  # tokens of a phrase
REPEATS = 4  # as often, or it may be style
LEAST = 12  # tokens in all, or it may be a number or a rule of dashes


def repetition(ids: list[int], reason: str | None) -> str | None:
    """A warning where a token or phrase repeats to the end of a canvas without an end token; None
    where nothing repeats. `ids` are the canvas's visible tokens."""
    if reason == "eos":
        return None
    for size in range(1, min(LONGEST, len(ids) // REPEATS) + 1):
        run = size
        while run < len(ids) and ids[-run - 1] == ids[-run - 1 + size]:
            run += 1
        if run >= max(REPEATS * size, LEAST):
            what = "one token" if size == 1 else f"a phrase of {size} tokens"
            return f"{what} repeats over the last {run} positions; the text may be degenerate"
    return None


RETRIES = 2
"""Times that an empty answer is drawn again; the last time it may not end where it did."""


@dataclass(frozen=True)
class Policies:
    """Rules of a reply that need to know what its tokens mean. None: there is no such rule."""

    thought: ThinkingBudget | None = None
    is_empty: Callable[[list[int]], bool] | None = None  # whether a reply has no answer in it


def committed_tokens(plan: ReplyPlan, policies: Policies) -> int:
    """Tokens of prompt and reply that their slot must hold. It follows from the request alone, so
    that the same request gets the same reply in slots of every size.

    The last canvas is never committed. A thought that is ended makes canvases shorter and more, and
    what a constraint has written token by token is in the slot already."""
    ends_thoughts = policies.thought is not None and policies.thought.closes is not None
    if ends_thoughts or plan.constraint is not None:
        return plan.blocks.border(plan.prompt_tokens + plan.limits.max_tokens - 1)
    assert plan.config.canvas_length
    encoded = plan.prompt_tokens - plan.opened
    other = plan.verify == "abstain"  # the answer of the causal mode to a first canvas
    return encoded + max(plan.canvases - 1, int(other)) * plan.config.canvas_length


def visible(ids: list[int], end_ids: Collection[int]) -> list[int]:
    """The ids before the first end token."""
    return ids[: next((i for i, token in enumerate(ids) if token in end_ids), len(ids))]


def truncate_canvas(
    ids: list[int], reply: list[int], config: SamplerConfig, limits: Limits
) -> tuple[list[int], StopReason | None]:
    """What a settled canvas of these ids adds to the reply, and why the reply ends here, if it
    does."""
    added = ids if config.ignore_eos else visible(ids, limits.end_ids)
    reason: StopReason | None = "eos" if len(added) < len(ids) else None
    room = limits.max_tokens - len(reply)
    if len(added) >= room and (len(added) > room or reason is None):
        added, reason = added[:room], "max_tokens"
    if limits.cut(reply, added) is not None:
        reason = "stop"
    return added, reason


class ReplyTask:
    """One reply. In causal mode each of its canvases is one token."""

    def __init__(
        self,
        plan: ReplyPlan,
        prompt: Prompt,
        make: MakeCanvas,
        policies: Policies = Policies(),
        opening: Sequence[int] = (),
        text: ReplyText = ReplyText(),  # noqa: B008  (stateless)
        want: Want | None = None,
        family: str = "",
    ) -> None:
        """opening: tokens that the reply begins with; want: of the prompt, whose result `wanted`
        has once it is encoded; family: of the network."""
        self.plan, self.policies = plan, policies
        self._make, self._text, self._want = make, text, want
        self.wanted: Any = None
        self.is_causal = plan.config.mode == "causal"
        self._wants_state = self.is_causal or plan.verify is not None
        self._state: Tensor | None = None  # [1, hidden], of the last token of the prefix, if wanted
        least = max(0 if want is None else want.least, int(self._wants_state))
        # What is behind the last whole block begins the canvas under way, with its tokens pinned.
        prompt, self._opened = prompt.opened(plan.blocks)
        self._encoded = len(prompt.ids)
        need = committed_tokens(plan, policies)
        opened = len(self._opened)
        self.claim = Claim(prompt, need, family, least, opened, blocks=plan.blocks)
        self.config = plan.config  # of the canvas under way; a last attempt adds a processor
        self.reply: list[int] = []
        self._thoughts = self._read_thoughts()
        self._positions = 0  # of canvases that have settled or are drawn again
        self.reason: StopReason | None = None
        self.stats = Stats(prompt_tokens=plan.prompt_tokens)
        self.warnings = [*prompt.notes]
        self.retries = 0  # canvases drawn again: the answer was empty, or the prediction wrong
        self.drawn_again = 0  # these, and those whose rest a constraint has denoised again
        self._is_predicted = False  # whether the canvas under way begins as a prediction
        self.constrained: ConstrainedReply | None = None
        if plan.constraint is not None:
            is_causal = plan.blocks.size == 1
            self.constrained = ConstrainedReply(plan.constraint, is_causal)
            self.stats.constraint = self.constrained.report
            self.warnings += plan.constraint.grammar.notes
        self._opening = list(opening)
        self._attempt = self._spent_steps = 0  # of the canvas under way, before this attempt
        # Of the tokens of the last canvas that were written one by one.
        self._scored: Mapping[int, Tensor] = {}
        # Those tokens, where they are verified, and their scores.
        self._written, self._ranked = list[int](), list[TokenScores]()
        self._verified: list[CanvasVerification] = []
        most = plan.config.max_steps or 0
        self.figures = Figures(plan.seed, plan.limits.max_tokens, max_steps=most)
        self._show()

    def run(self) -> Generator[Any, Any, Any]:
        """Yields a `Draft` for every step, and what `ReplyText.add` makes of every canvas."""
        yield from self._encoded_prompt()
        while self.reason is None:
            canvas = self._make(self.next_canvas())
            ids, last = yield from self._drafted(canvas)
            assert canvas.convergence
            settled, held = yield from self._finish_canvas(ids, canvas.convergence)
            self._positions += canvas.length
            self._show()
            if settled is None:  # drawn again
                continue
            last = self.as_settled(last, settled)
            if self.plan.verify is not None:
                settled = yield from self._verify(settled, held, last)
                yield self._text.add(settled, last)
                continue
            yield self._text.add(settled, last)
            # Only a canvas that another follows goes into the cache.
            if self.reason is None and (ids := self._whole_blocks(settled.token_ids[held:])):
                self._state = yield Encode(ids, LastState() if self.is_causal else None)
        other = yield from self._other_answer()
        return self._text.finish(replace(self.outcome(self.reason), other=other))

    def stopped(self) -> Any:
        return self._text.finish(self.outcome("cancelled"))

    def _read_thoughts(self) -> Thoughts | None:
        budget = self.policies.thought
        return None if budget is None else budget.read(self.reply)

    def _encoded_prompt(self) -> Generator[Any, Any, None]:
        wants = [*([] if self._want is None else [self._want])]
        wants += [LastState()] if self._wants_state else []
        results = yield prompt_work(self.claim.prompt, Together(*wants) if wants else None)
        if self._want is not None:
            self.wanted = results[0]
        if self._wants_state:
            self._state = results[-1]

    def _verify(
        self, settled: SettledCanvas, held: int, last: Draft
    ) -> Generator[Any, Any, SettledCanvas]:
        """The canvas with what the causal mode finds of it. One that another follows is encoded,
        and the last one is read beside the prefix. held: as many of its tokens are encoded."""
        ids = settled.token_ids + ([] if settled.end_id is None else [settled.end_id])
        written, ranked, state = self._written, self._ranked, self._state
        self._written, self._ranked = [], []
        assert state is not None
        if (kept := common_start(written, ids)) < held:
            ids = ids[:kept]  # what closes a reply has replaced the others
        if (rest := ids[held:]) and self.reason is None:
            scores, self._state = yield Encode(rest, Ranks(rest, state))
            ranked.append(scores)
        elif rest:
            ranked += yield Score((Rank(rest, state),))
        if not ids:
            return settled
        scores = TokenScores.joined(ranked)[: len(ids)]
        verification = CanvasVerification.of(settled.canvas, ids, scores, last)
        self._verified.append(verification)
        return replace(settled, verification=verification)

    def _other_answer(self) -> Generator[Any, Any, list[int] | None]:
        """What the causal mode writes, most probable token by token, from the first token on that
        it doubts; None where it doubts none, and for an answer that is more than a canvas."""
        first = self._first_doubted()
        if first is None:
            return None
        answer, state, limits = self.reply[:first], self._state, self.plan.limits
        if answer:
            state = yield Encode(answer, LastState())
        config = replace(of_tokens(self.plan.config), temperature=0.0)
        most = min(limits.max_tokens, self._width)
        while len(answer) < most:
            assert state is not None
            canvas = self._make(CanvasPlan(config, Noise(self.plan.seed, len(answer)), [*answer]))
            draft = yield Draw(state, canvas)
            new = draft.token_ids.tolist()
            if new[0] in limits.end_ids and not config.ignore_eos:
                break
            answer = answer + new
            if limits.cut(answer, []) is not None:
                return answer[: limits.cut(answer, [])]
            if len(answer) < most:
                state = yield Encode(new, LastState())
        return answer

    def _first_doubted(self) -> int | None:
        """The place of the first token in doubt behind a thought; None where an answer that the
        causal mode doubts is not to be undecided."""
        if self.plan.verify != "abstain" or self.stats.canvases != 1 or not self._verified:
            return None
        thoughts = () if self._thoughts is None else self._thoughts.ranges
        begin = max((places.stop for _, places in thoughts), default=0)
        doubted = enumerate(self._verified[0].doubted[: len(self.reply) + 1])
        return next((at for at, is_in in doubted if is_in and at >= begin), None)

    def _whole_blocks(self, ids: Sequence[int]) -> list[int]:
        """What is to be encoded now that these tokens follow; the rest begins the next canvas."""
        following = [*self._opened, *ids]
        count = self.plan.blocks.border(self._encoded + len(following)) - self._encoded
        self._opened, self._encoded = following[count:], self._encoded + count
        return following[:count]

    def _drafted(self, canvas: Canvas) -> Generator[Any, Any, tuple[list[int], Draft]]:
        """Steps a canvas until it is done; returns its ids and the draft of its last step."""
        while True:
            if self.is_causal:
                assert self._state is not None
                draft = yield Draw(self._state, canvas)
            else:
                (draft,) = yield Denoise((canvas,), ahead=self.constrained is None)
            draft = draft.behind(len(self._opened))
            self.stepped(draft)
            ids = self.ids_of(draft)  # before a caller can write into the draft
            if not canvas.done and (known := self.guide(canvas, ids, draft.accepted)) is not None:
                ids = known
                canvas.finish()
            readable = self._text.readable(draft)
            yield readable
            if canvas.done:
                return ids, readable

    def _show(self) -> None:
        """Publishes how far the reply has come, before the first step of a canvas."""
        stats, accepted, prediction = self.stats, self.accepted_prediction, self.plan.prediction
        steps = tuple(stats.steps)
        self.figures = replace(
            self.figures,
            canvas=stats.canvases,
            step=0,
            output_tokens=len(self.reply),
            thought_tokens=0 if self._thoughts is None else self._thoughts.count,
            canvas_tokens=self._positions,
            # The canvases of a causal reply are single tokens, and count as one.
            steps=(sum(steps),) if self.is_causal and steps else steps,
            convergence=() if self.is_causal else tuple(stats.convergence),
            retries=self.retries,
            accepted_prediction=accepted,
            rejected_prediction=len(prediction.ids) - (accepted or 0) if prediction else None,
            constraint=None if stats.constraint is None else replace(stats.constraint),
        )

    @property
    def canvas_length(self) -> int:
        """Positions of the canvas under way."""
        length, is_given = self.config.canvas_length, self.plan.given and not self.stats.canvases
        assert length
        if self.plan.blocks.short_end and not is_given:
            return min(length, len(self._opened) + self.room)
        return length

    @property
    def _width(self) -> int:
        """Positions of the canvas under way that are the reply's to come."""
        return self.canvas_length - len(self._opened)

    def next_canvas(self) -> CanvasPlan:
        """What the canvas to denoise now begins with."""
        noise = Noise(self.plan.seed, self.stats.canvases, self._attempt)
        given, opened = self.plan.given, self._opened
        if given is not None and self.stats.canvases == 0:
            given = given.following(opened)
            return CanvasPlan(self.config, noise, [], dict(enumerate(opened)) | given.pins, given)
        guidance, opening = None, self._opening[len(self.reply) :][: self._width]
        if self.constrained is not None:
            guidance = self.constrained.begin(self._width, len(opening))
        opening = [*opened, *opening]
        config = replace(self.config, canvas_length=self.canvas_length)
        begins, prediction = None, self.plan.prediction
        if prediction is not None and self._attempt == 0:
            begins = prediction.start(self.reply, self.canvas_length, noise)
        self._is_predicted = begins is not None
        if begins is not None:
            config = replace(config, max_steps=predicted_steps(config))
        if guidance is not None:
            guidance = guidance.following(opened)
        pinned = dict(enumerate(opening)) if guidance is None else guidance.pins
        before = self.reply[: max(0, len(self.reply) - len(opened))]
        if ahead := len(opened) - (len(self.reply) - len(before)):  # tokens of the prompt
            moved = (p.behind(ahead) if isinstance(p, MinTokens) else p for p in config.processors)
            config = replace(config, processors=tuple(moved))
        return CanvasPlan(config, noise, before, pinned, None, begins, guidance)

    @property
    def room(self) -> int:
        """Tokens that the reply may still have."""
        return self.plan.limits.max_tokens - len(self.reply)

    def guide(self, canvas: Canvas, ids: list[int], accepted: Tensor) -> list[int] | None:
        """Sets what the constraint asks of the next step of a canvas that is not done, after one
        that gave these tokens. The tokens with which a canvas of masks has settled before its last
        step: all that the reply takes of them is revealed."""
        if self.constrained is None:
            return None if canvas.mask_id is None else self._revealed(ids, accepted)
        guidance = self.constrained.guide(ids, accepted.tolist(), self.room, self._width)
        if isinstance(guidance, Guidance):
            canvas.guide(guidance.following(self._opened))
            report = replace(self.constrained.report)
            self.figures = replace(self.figures, constraint=report)
            return None
        return guidance

    def _revealed(self, ids: list[int], accepted: Tensor) -> list[int] | None:
        """The tokens of a canvas of masks, if all that the reply takes of it is among them that
        are revealed; these stay."""
        kept = accepted.tolist()
        first_open = kept.index(False) if False in kept else len(kept)
        _, reason = truncate_canvas(ids[:first_open], self.reply, self.config, self.plan.limits)
        return ids[:first_open] if reason is not None and not self._is_read else None

    def stepped(self, draft: Draft) -> None:
        """Counts a denoising step."""
        stats = self.stats
        stats.steps[stats.canvases :] = [self._spent_steps + draft.step]
        steps = (sum(stats.steps),) if self.is_causal else tuple(stats.steps)
        self.figures = replace(self.figures, canvas=stats.canvases, step=draft.step, steps=steps)

    @property
    def _is_read(self) -> bool:
        return self.plan.given is not None and self.plan.given.read_only

    def ids_of(self, draft: Draft) -> list[int]:
        """What a canvas gives whose last draft this is. A read says what the model would write, at
        pinned positions too."""
        ids: list[int] = (draft.top_ids[:, 0] if self._is_read else draft.token_ids).tolist()
        return ids

    def _finish_canvas(
        self, ids: list[int], convergence: Convergence
    ) -> Generator[Any, Any, tuple[SettledCanvas | None, int]]:
        """What a finished canvas of these ids adds, which a constraint may finish token by token;
        None where the canvas is drawn again. And how many of its tokens are encoded then."""
        self._scored = {}
        if self.constrained is None or self._ends_thought(ids):
            return self.add_canvas(ids, convergence), 0
        held = self.constrained.stopped(ids, self.room, self._width)
        if held is None:
            self._draw_again()
            return None, 0
        if not isinstance(held, CausalWriting):
            return self.add_canvas(held, convergence), 0
        encoded = 0
        while not held.done:  # where the grammar forces all that is left, nothing waits for scores
            new, encoded = held.ids[encoded:], len(held.ids)
            if self._state is None:
                scores = yield Encode(new, NextScores())
            else:
                both = yield Encode(new, Together(NextScores(), Ranks(new, self._state)))
                scores, (ranked, self._state) = both
                self._written, self._ranked = [*self._written, *new], [*self._ranked, ranked]
            held.write(scores, self.config.processors, self.reply)
        ids, self._scored = self.constrained.written(held), held.scored
        # What was written is in the slot: a thought in it is ended in the next canvas.
        settled = self.add_canvas(ids, convergence, may_end_thought=False)
        if settled is not None and held.is_dead_end and self.reason is None:
            self.reason = "max_tokens"
            self.warnings.append(
                f"canvas {settled.canvas}: no token of the vocabulary continues the grammar"
            )
            settled = replace(settled, stop_reason=self.reason)
        return settled, encoded

    def as_settled(self, draft: Draft, settled: SettledCanvas) -> Draft:
        """The last draft of a canvas as the canvas has settled: a constraint may have chosen some
        of its tokens since."""
        if self.constrained is None:
            return draft
        end = [] if settled.end_id is None else [settled.end_id]
        return written_draft(draft, settled.token_ids + end, self._scored)

    def _ends_thought(self, ids: list[int]) -> bool:
        """Whether a canvas of these ids is cut to end a thought."""
        added, _ = truncate_canvas(ids, self.reply, self.config, self.plan.limits)
        return self._closed_thought(added) is not None

    def add_canvas(
        self, ids: list[int], convergence: Convergence, may_end_thought: bool = True
    ) -> SettledCanvas | None:
        """What a settled canvas of these ids adds; None where it is drawn again. Sets `reason`
        where the reply ends with it."""
        limits, number = self.plan.limits, self.stats.canvases
        if self._is_predicted and convergence == "step_cap":
            self.warnings.append(f"canvas {number}: the prediction did not settle and was left out")
            self.retries += 1
            self._draw_again()
            return None
        added, reason = truncate_canvas(ids, self.reply, self.config, limits)
        end_id = ids[len(added)] if reason == "eos" else None
        closed = self._closed_thought(added) if may_end_thought else None
        if closed is not None:
            added, reason, end_id = closed, None, None
            self.warnings.append(f"canvas {number}: the thought was ended to leave room to answer")
        elif reason == "eos" and self.constrained is None and self._is_retried(added):
            return None
        # Small blocks hold no repetition by themselves.
        before = self.reply[-LONGEST * REPEATS :] if self.plan.blocks.size > 1 else []
        warning = None if self._is_read else repetition([*before, *added], reason)
        if warning:
            self.warnings.append(f"canvas {number}: {warning}")
        if self.constrained is not None:
            self.constrained.commit(added)
        self.reply += added
        if self._thoughts is not None:
            self._thoughts.add(added)
        if reason == "stop":  # a stop string may begin in an earlier canvas
            self.reply = self.reply[: limits.cut(self.reply, [])]
            self._thoughts = self._read_thoughts()
        next_end = self.plan.prompt_tokens + len(self.reply) + self.canvas_length
        if reason is None and next_end > self.plan.context:  # only where a thought was ended early
            reason = "max_tokens"
        self.stats.canvases += 1
        self.stats.convergence.append(convergence)
        self.reason, self.config = reason, self.plan.config
        self._attempt = self._spent_steps = 0
        return SettledCanvas(number, added, convergence, reason, end_id)

    def outcome(self, reason: StopReason) -> Outcome:
        """The reply as it stands."""
        self.stats.output_tokens = len(self.reply)
        self.stats.accepted_prediction = self.accepted_prediction
        return Outcome(self.reply, reason, self.stats, tuple(self.warnings))

    @property
    def accepted_prediction(self) -> int | None:
        """Tokens of the prediction that stand in the reply; None where there is no prediction."""
        prediction = self.plan.prediction
        return None if prediction is None else prediction.accepted(self.reply)

    def _closed_thought(self, added: list[int]) -> list[int] | None:
        """The canvas up to where its thought must end, with the token that ends it; None where no
        thought must end, or an answer would have no room."""
        thought, limits = self.policies.thought, self.plan.limits
        kept = None if self._thoughts is None else self._thoughts.cut(added)
        if thought is None or thought.closes is None or kept is None:
            return None
        if self.constrained is not None and not self.constrained.in_thought(added, kept):
            return None
        tokens = len(self.reply) + kept + 1
        fits = self.plan.prompt_tokens + tokens + self.canvas_length <= self.plan.context
        stopped = limits.cut(self.reply, added[:kept]) is not None
        if tokens >= limits.max_tokens or not fits or stopped:
            return None
        return [*added[:kept], thought.closes]

    def _is_retried(self, added: list[int]) -> bool:
        """Whether the answer is empty and the canvas begins anew with another draw."""
        is_empty = self.policies.is_empty
        if is_empty is None or self._attempt == RETRIES or not is_empty([*self.reply, *added]):
            return False
        if self._attempt == 0:
            number = self.stats.canvases
            self.warnings.append(f"canvas {number}: the answer was empty and was drawn again")
        self.retries += 1
        self._draw_again()
        if self._attempt == RETRIES:
            # The answer may not end before it has begun.
            ban = MinTokens(len(self.reply) + len(added) + 1, self.plan.limits.end_ids)
            self.config = replace(self.config, processors=(*self.config.processors, ban))
        return True

    def _draw_again(self) -> None:
        """The canvas under way begins anew with another draw."""
        self._attempt, self.drawn_again = self._attempt + 1, self.drawn_again + 1
        self.stats.dropped_predictions += self._is_predicted
        self._spent_steps = self.stats.steps[self.stats.canvases]
