"""How one reply is held to its grammar, canvas by canvas.

A canvas denoises freely until an accepted position breaks the grammar.  From then on each step
takes over the longest valid and accepted beginning, pins what the grammar forces behind it, and
masks the position after that.  A canvas that stops with something invalid is denoised again behind
its valid beginning, at most REPAIRS times; what is left then is written token by token
(`CausalWriting`).  Near the end of the reply's tokens no token is written that leaves too few to
close what is open.  Runs nothing: the caller brings drafts and scores.

A network without a causal mode has canvases of masks, whose accepted tokens stay.  There the masked
position keeps its draw, so that each guided step knows one token more at least; what is forced is
pinned from the first step of a canvas on; and a canvas has settled once the rest is known, or no
part of the reply.  It is denoised again until it is valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Draft, Guidance
from sfumato.diffusion.constraints.grammar import Grammar, GrammarState
from sfumato.diffusion.sampler import CanvasView, LogitProcessor


@dataclass(frozen=True, eq=False)
class Constraint:
    """What the tokens of a reply must satisfy."""

    grammar: Grammar
    thought: tuple[int, int] | None = None  # ids that open and close a thought; None: none may come
    quote: int | None = None  # a special token that closes texts
    in_thought: bool = False  # the prompt ends in a thought

    def begin(self) -> GrammarState:
        """The state before the first token of the reply."""
        return self.grammar.begin(self.thought, self.in_thought)

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self.grammar.tokens.end_ids


WALKS = 6
TEXT_WALKS = 2  # the first of them, which write each letter of a text once
MOST_TOKENS = 256
"""Tokens of one walk."""
MOST_CHOICES = 512
"""Choices of one search: some tens of milliseconds."""
_CANDIDATES = 64  # tokens among which a walk chooses where no closer may follow
_CLOSERS = ("}", "]", ")", '"', "0", "1", "null", "true", "{", "[", ",", ":", "a")
"""What ends objects and lists, and then what begins short values."""
_SEPARATORS = ("@", ".", "#", ":", "/", "-", "_", " ", "0", "a", "A")
"""What stands between the parts of a text: it is tried first in one."""


class ShortCompletion:
    """Finds completions for one constraint."""

    def __init__(self, constraint: Constraint) -> None:
        single = constraint.grammar.tokens.single
        self._special, self._quote = constraint.quote, single.get('"')
        self._closers = [single[text] for text in _CLOSERS if text in single]
        self._separators = [single[text] for text in _SEPARATORS if text in single]
        # A text is open where a token may follow that only texts hold, or a bracket and a letter.
        self._inside, self._both = single.get("~"), (single.get("}"), single.get("a"))
        self._most = self._left = 0  # choices of the search under way

    @property
    def used(self) -> int:
        """Choices that the last search used."""
        return self._most - max(0, self._left)

    def find(self, reply: GrammarState, room: int, choices: int = MOST_CHOICES) -> list[int] | None:
        """At most `room` tokens after which the reply may end; None where no walk of so many
        choices in all finds any. The reply stays as it is."""
        self._most = self._left = choices
        if reply.thinks:  # an open thought is as long as it will be
            return None
        for walk in range(WALKS):
            completion = self._walk(reply.copy(), min(room, MOST_TOKENS), walk)
            if completion is not None or self._left <= 0:
                return completion
        return None

    def _walk(self, state: GrammarState, room: int, walk: int) -> list[int] | None:
        written: list[int] = []
        used: set[int] = set()  # of the text that is open
        while not state.accepts:
            step = state.forced()
            if not step:
                token = self._choose(state, len(written), walk, used)
                if token is None:
                    return None
                step = [token]
            if len(written) + len(step) > room:
                return None
            state.take(step)
            written += step
        return written

    def _choose(self, state: GrammarState, place: int, walk: int, used: set[int]) -> int | None:
        self._left -= 1
        if self._left < 0:
            return None
        bits = state.bits()

        def may(token: int | None) -> bool:
            return token is not None and bool(bits[token >> 3] >> (token & 7) & 1)

        if may(self._special):
            return self._special
        is_open = may(self._inside) or all(map(may, self._both))
        if is_open and may(self._quote):
            used.clear()
            return self._quote  # a bracket would go on with the text
        if is_open and walk < TEXT_WALKS:
            chosen = next((t for t in self._separators if t not in used and may(t)), None)
            if chosen is None:
                some = state.mask(bits).nonzero()[:, 0]
                some = some[:: max(1, len(some) // MOST_CHOICES)]
                chosen = next((token for token in some.tolist() if token not in used), None)
            if chosen is not None:
                used.add(chosen)
                return chosen
        closers = self._closers if walk % 2 == 0 else self._closers[:4]
        chosen = next((token for token in closers if may(token)), None)
        if chosen is not None:
            return chosen
        allowed = state.mask(bits).nonzero()[:, 0]
        stride = max(1, len(allowed) // _CANDIDATES)
        candidates = allowed[::stride].tolist()
        # Another choice at each place and in each walk: a loop is left after a few rounds.
        return candidates[(place * 7 + walk * 13) % len(candidates)] if candidates else None


TAIL = 128
"""Tokens before the end of a reply in which it is made sure that the grammar can be closed."""


class CausalWriting:
    """The canvas that is finished so; `ids` grow until `done`."""

    def __init__(
        self,
        constraint: Constraint,
        reply: GrammarState,
        kept: Sequence[int],
        room: int,
        length: int,
        completion: ShortCompletion,
    ) -> None:
        """reply: the state behind `kept`, the valid tokens of the canvas; room: tokens that the
        reply may still have, with these; length: of the canvas."""
        self.ids = list(kept)
        self.scored: dict[int, Tensor] = {}  # by place: the scores that its token was chosen by
        self.closing = 0  # tokens that were chosen by no scores but to close in time
        self.is_dead_end = False
        self._constraint, self._reply = constraint, reply.copy()
        self._completion, self._kept = completion, len(kept)
        self._room, self._length = room, length
        self._end: int | None = None
        # So many of the ids, and what closes them: where the reply can end, as far as is known.
        self._safe: tuple[int, list[int]] | None = None
        self._unchecked = 0  # tokens that may be written before that is looked at again
        self._force()

    @property
    def done(self) -> bool:
        return self._end is not None or self.is_dead_end or self._left == 0

    @property
    def written(self) -> int:
        """Tokens beyond those that were kept."""
        return len(self.ids) - self._kept - self.closing

    @property
    def result(self) -> list[int]:
        """The canvas, with an end token where the reply ends in it."""
        return self.ids if self._end is None else [*self.ids, self._end]

    def write(
        self, scores: Tensor, processors: Sequence[LogitProcessor] = (), reply: Sequence[int] = ()
    ) -> None:
        """Takes one more token. scores float32 [vocabulary], softcapped, of the token that follows
        `ids`; reply: the tokens before this canvas, for the processors."""
        assert not self.done
        following = self._reply.following()
        if following.is_dead_end:
            self.is_dead_end = True
            return
        changed = _allowed(scores.cpu(), following.mask, processors, [*reply, *self.ids])
        token = int(changed.argmax())
        if token in self._constraint.end_ids:
            self._end = token
            return
        if not self._leaves_room(token):
            self._close()
            return
        self.scored[len(self.ids)] = changed
        self._take([token])
        self._force()

    def _leaves_room(self, token: int) -> bool:
        """Whether what is open behind a token can be closed, or is not known to be too much. Looks
        at it the more often the fewer tokens are left beyond those that close it."""
        left = self._room - len(self.ids)
        if left > TAIL:
            return True
        choices = MOST_CHOICES  # of both searches
        if self._safe is None:
            completion = self._completion.find(self._reply, left, choices // 2)
            choices -= self._completion.used
            self._safe = None if completion is None else (len(self.ids), completion)
        if self._unchecked > 0:
            self._unchecked -= 1
            return True
        after = self._completion.find(self._reply.after([token]), left - 1, choices)
        if after is None:
            return self._safe is None
        self._safe = len(self.ids) + 1, after
        self._unchecked = (left - 1 - len(after)) // 4
        return True

    def _close(self) -> None:
        """Ends the reply where that is known to be possible in time; what was written since is
        given up."""
        assert self._safe is not None
        kept, completion = self._safe
        self.ids = [*self.ids[:kept], *completion]
        self.scored = {at: scores for at, scores in self.scored.items() if at < kept}
        self.closing = len(completion)
        self._end = self._constraint.end_ids[0]

    def _force(self) -> None:
        """Writes what must follow, and sees whether that is the end."""
        following = self._reply.following()
        if forced := following.forced[: self._left]:
            self._take(forced)
        is_full = len(self.ids) == self._room
        if self._reply.is_complete or (is_full and self._reply.accepts):
            self._end = self._constraint.end_ids[0]
        elif is_full and self._safe is not None:
            self._close()

    @property
    def _left(self) -> int:
        return min(self._room, self._length) - len(self.ids)

    def _take(self, ids: list[int]) -> None:
        self._reply.take(ids)
        self.ids += ids


def _allowed(
    scores: Tensor, mask: Tensor, processors: Sequence[LogitProcessor], reply: Sequence[int]
) -> Tensor:
    """The scores of the allowed tokens as processors change them, -inf elsewhere; unchanged where
    processors leave none."""
    allowed = torch.zeros(len(scores), dtype=torch.bool)
    allowed[: len(mask)] = mask[: len(scores)]
    plain = scores.masked_fill(~allowed, float("-inf"))
    before = torch.tensor(reply, dtype=torch.int64)
    none = torch.zeros(1, dtype=torch.int64)
    view = CanvasView(none[0], none, none[None], before)
    changed = scores[None]
    for processor in processors:
        changed = processor.process(changed, 0, view)
    changed = changed[0].masked_fill(~allowed, float("-inf"))
    return changed if (changed > float("-inf")).any() else plain


def written_draft(draft: Draft, ids: Sequence[int], scored: Mapping[int, Tensor]) -> Draft:
    """The draft with these tokens at its first places; the draft itself where it has them already.
    What closes a reply may go beyond the canvas: the draft is then so much longer, but for `noise`
    and `pinned`, which are of the canvas alone.

    scored: by place the scores float32 [vocabulary] that its token was chosen by. A token that was
    chosen by no scores has probability 1.
    """
    draft = _lengthened(draft, len(ids))
    before = draft.token_ids.tolist()
    pairs = enumerate(zip(ids, before, strict=False))
    changed = [at for at, (token, old) in pairs if token != old or at in scored]
    if not changed:
        return draft
    tokens, entropy = draft.token_ids.clone(), draft.entropy.clone()
    accepted = draft.accepted.clone()
    top_ids, top_probs = draft.top_ids.clone(), draft.top_probs.clone()
    for at in changed:
        tokens[at], accepted[at] = ids[at], True
        if at in scored:
            probs = scored[at].softmax(dim=0)
            top_probs[at], top_ids[at] = probs.topk(top_ids.shape[1])
            entropy[at] = torch.special.entr(probs).sum()
        else:
            others = [token for token in top_ids[at].tolist() if token != ids[at]]
            top_ids[at] = torch.tensor([ids[at], *others][: top_ids.shape[1]])
            top_probs[at], entropy[at] = 0.0, 0.0
            top_probs[at, 0] = 1.0
    return replace(
        draft,
        token_ids=tokens,
        entropy=entropy,
        accepted=accepted,
        top_ids=top_ids,
        top_probs=top_probs,
    )


def _lengthened(draft: Draft, length: int) -> Draft:
    """The draft with at least so many places. The new ones, which no step has scored, have no
    token, and the alternatives of the last place."""
    more = length - len(draft.token_ids)
    if more <= 0:
        return draft

    def longer(column: Tensor, value: float) -> Tensor:
        return torch.cat([column, column.new_full((more, *column.shape[1:]), value)])

    return replace(
        draft,
        token_ids=longer(draft.token_ids, -1),
        entropy=longer(draft.entropy, 0.0),
        accepted=longer(draft.accepted, True),
        top_ids=torch.cat([draft.top_ids, draft.top_ids[-1:].expand(more, -1)]),
        top_probs=longer(draft.top_probs, 0.0),
        named=None if draft.named is None else longer(draft.named, float("-inf")),
        log_probs=None if draft.log_probs is None else longer(draft.log_probs, 0.0),
    )


REPAIRS = 2
"""Times that the rest of a canvas is denoised again."""
_STEPS_BACK = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""How many tokens of a text that cannot be closed any more are given up, tried in this order."""


@dataclass
class ConstraintReport:
    """The effort for the constraint of one reply."""

    steps: int = 0  # denoising steps that the grammar guided
    repairs: int = 0  # canvases whose rest was denoised again
    causal_tokens: int = 0  # written one after another
    closing_tokens: int = 0  # chosen by the grammar alone, for the reply to end in time


class ConstrainedReply:
    """The constraint of one reply."""

    def __init__(self, constraint: Constraint, is_causal: bool = True) -> None:
        """is_causal: whether the network has a causal mode."""
        self.report, self._is_causal = ConstraintReport(), is_causal
        self._constraint, self._completion = constraint, ShortCompletion(constraint)
        self._ends = constraint.end_ids
        self._reply = constraint.begin()  # behind all settled canvases
        self._kept: list[int] | None = None  # of the canvas under way; None: it denoises freely
        self._repairs = 0  # of this canvas

    def begin(self, length: int, opened: int = 0) -> Guidance | None:
        """Returns the tokens that the first step of a canvas has to take, and what may follow them;
        None: the step is free. length: positions of the canvas; opened: how many of the first ones
        have tokens that the grammar has not read."""
        if self._kept is not None:
            return self._guidance(*self._known(self._kept), length)
        is_free = self._is_causal or opened
        forced = [] if is_free else self._reply.following().forced[:length]
        return Guidance(dict(enumerate(forced))) if forced else None

    def guide(
        self, ids: list[int], accepted: list[bool], room: int, length: int
    ) -> Guidance | list[int] | None:
        """Returns what the next step has to take, after one with these most probable tokens; None:
        the step is free. A list: the tokens with which a canvas of masks has settled, what is
        behind them being no part of the reply. room: tokens that the reply may still have."""
        seen = ids[:room]
        reading = self._reply.read(seen)
        first_open = next((n for n, kept in enumerate(accepted) if not kept), len(accepted))
        if not self._is_causal and reading.ended and reading.valid < first_open:
            return seen[: reading.valid + 1]
        if self._kept is None:
            fits = reading.ended or reading.valid == len(seen)
            if fits or first_open <= reading.valid:
                return None
        self._kept = seen[: min(reading.valid, first_open)]
        known, mask = self._known(self._kept)
        only_ends = bool(mask.any()) and int(mask.sum()) == int(mask[[*self._ends]].sum())
        if not self._is_causal and (only_ends or len(known) >= min(room, length)):
            return known[: min(room, length)]
        return self._guidance(known, mask, length)

    def _known(self, kept: list[int]) -> tuple[list[int], Tensor]:
        """The tokens that are kept and what the grammar forces behind them, and what may follow:
        bool [tokens]."""
        following = self._reply.after(kept).following()
        return [*kept, *following.forced], following.mask

    def _guidance(self, known: list[int], mask: Tensor, length: int) -> Guidance:
        self.report.steps += 1
        pins = dict(enumerate(known[:length]))
        if len(known) >= length or not mask.any():
            return Guidance(pins)
        return Guidance(pins, len(known), mask)

    def stopped(self, ids: list[int], room: int, length: int) -> list[int] | CausalWriting | None:
        """What becomes of a canvas of `length` positions that has stopped with these tokens: its
        tokens, an end token included where the reply ends, or what its rest is written by. None:
        its rest is denoised again."""
        reading = self._reply.read(ids[: room + 1])  # an end token may stand behind the last
        kept = ids[: min(reading.valid, room)]
        after = self._reply.after(kept)
        if (reading.ended and reading.valid <= room) or after.is_complete:
            return [*kept, self._end(ids, len(kept))]
        if len(kept) == room and after.accepts:  # what closes it is nothing
            return [*kept, self._ends[0]]
        is_open = len(kept) == min(len(ids), room)
        left = room - len(kept)
        if left <= TAIL and self._completion.find(after, left, MOST_CHOICES // 2) is None:
            closed = self._closed(kept, room, MOST_CHOICES - self._completion.used)
            if closed is not None:
                return [*closed, self._ends[0]]
        if is_open:
            return kept
        most = REPAIRS if self._is_causal else length
        if self._repairs < most and not after.following().is_dead_end:
            self._repairs, self._kept = self._repairs + 1, kept
            self.report.repairs += 1
            return None
        writing = CausalWriting(self._constraint, after, kept, room, length, self._completion)
        writing.is_dead_end = not self._is_causal
        return writing

    def in_thought(self, ids: list[int], at: int) -> bool:
        """Whether that place of a canvas of these tokens is in a thought. Elsewhere a marker that
        opens one is a token that the grammar does not allow."""
        answer = self._reply.answer(ids)
        return answer is None or at < answer

    def written(self, writing: CausalWriting) -> list[int]:
        """The tokens of a canvas whose writing is done."""
        self.report.causal_tokens += writing.written
        self.report.closing_tokens += writing.closing
        return writing.result

    def commit(self, added: list[int]) -> None:
        """Takes the tokens that a settled canvas adds to the reply."""
        self._reply.take(added)
        self._kept, self._repairs = None, 0

    def _end(self, ids: list[int], at: int) -> int:
        """The end token at a place; where there is none, the first of the vocabulary's."""
        return ids[at] if at < len(ids) and ids[at] in self._ends else self._ends[0]

    def _closed(self, kept: list[int], room: int, choices: int) -> list[int] | None:
        """The tokens with the end given up for one that closes them in time; None where none was
        found with so many choices in all. Each search has an equal share, and what those before it
        left."""
        ends = [back for back in _STEPS_BACK if back <= len(kept)]
        for done, back in enumerate(ends):
            beginning = kept[: len(kept) - back]
            after, left = self._reply.after(beginning), room - len(beginning)
            completion = self._completion.find(after, left, choices // (len(ends) - done))
            choices -= self._completion.used
            if completion is not None:
                self.report.closing_tokens += len(completion)
                return [*beginning, *completion]
        return None
