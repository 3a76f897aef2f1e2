"""How a request becomes a task: checks, which name the field, and text as ids.

One function for each kind of request. `SnapshotPoints` says where later prompts will differ from
this one: the lengths at which slots should be marked. Knows no slots and no threads.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from sfumato.api import Messages, Model, Reply, Transcript
from sfumato.decisions.schema import DecisionUsage
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.checks import check_causal, check_setting, is_whole
from sfumato.diffusion.constraints.decision_plan import DecisionSettings
from sfumato.diffusion.limits import Outcome, ReplyPlan, StopReason
from sfumato.diffusion.sampler_config import check_sampler
from sfumato.engine.events import Account, Decided, Finished, Terminal
from sfumato.engine.request import DecisionRequest, Request
from sfumato.options import exclusions
from sfumato.options.limits import MOST_STEPS
from sfumato.refused import Refused, TooLarge
from sfumato.tasks.decide import Answers, DecideTask
from sfumato.tasks.reply import Policies, ReplyTask, ThinkingBudget
from sfumato.tasks.wants import EmbedTask, PooledState, Pooling, PromptScoring, TokenScoring
from sfumato.tasks.works import Prompt, Task, Want
from sfumato.text.prompt import prompt_ids
from sfumato.text.reply import parse_reply
from sfumato.weights.errors import quoted

PromptIds = Callable[[Messages, bool], list[int]]
"""Messages, and whether the model is to think → the prompt's token ids; ValueError where the
template refuses them."""

_USER = {"role": "user", "content": "x"}
_CALL = {"id": "x", "type": "function", "function": {"name": "x", "arguments": "{}"}}
_ENDS: dict[str, Messages] = {  # the smallest conversations whose last message has that role
    "user": [_USER],
    "tool": [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "x", "content": "x"},
    ],
}
_NEXT: Messages = [{"role": "assistant", "content": "x"}, _USER]


class SnapshotPoints:
    """What one template writes at the end of prompts and after a system prompt.

    A conversation's next prompt repeats this one up to some place near its end: templates may close
    a prompt with words that its history does not show (an empty thought, where thinking is off),
    and leave thoughts out of history. Another conversation repeats the system prompt. Nothing is
    assumed of templates: tiny conversations that differ in the right places are rendered and
    compared, once for each kind of prompt, so that a request's own prompt is rendered once.
    """

    def __init__(self, prompt_ids: PromptIds, special: Collection[int]) -> None:
        """special: ids that only the template writes, whatever the messages say."""
        self._prompt_ids, self._special = prompt_ids, frozenset(special)
        # Now, rather than in the first request.
        self._tails = {(r, t): self._tail(_ENDS[r], t) for r in _ENDS for t in (False, True)}
        self._gaps = [self._gap(thinking) for thinking in (False, True)]

    def lengths(self, ids: Sequence[int], messages: Messages, thinking: bool) -> tuple[int, ...]:
        """The lengths of `ids`, the prompt that `messages` came to, that later prompts are likely
        to share, in increasing order; where the template is not understood, the prompt's end."""
        tail = self._tails.get((str(messages[-1].get("role")), thinking))
        if tail is None or list(ids[len(ids) - len(tail) :]) != tail:
            return (len(ids),)
        lengths = {len(ids) - len(tail)}
        if len(messages) > 1 and messages[0].get("role") in ("system", "developer"):
            lengths.add(self._after_system(ids, thinking))
        return tuple(sorted(lengths - {0}))

    def _after_system(self, ids: Sequence[int], thinking: bool) -> int:
        """How many ids come before the first message after the system prompt; 0: unknown."""
        start, gap = self._gaps[thinking]
        if not gap:
            return 0
        try:
            at = list(ids).index(gap[0], start)
        except ValueError:
            return 0
        return at + common(ids[at : at + len(gap)], gap)

    def _tail(self, messages: Messages, thinking: bool) -> list[int] | None:
        """The end of a prompt that the next one does not repeat; None where it is unknown."""
        try:
            ids = self._prompt_ids(messages, thinking)
            return ids[common(ids, self._prompt_ids([*messages, *_NEXT], thinking)) :]
        except ValueError:
            return None

    def _gap(self, thinking: bool) -> tuple[int, list[int]]:
        """Where a system prompt's text begins, and what stands between it and the next message's,
        from the first special id on: that one ends the text, which cannot hold it."""

        def ids_of(system: str, user: str) -> list[int]:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            return self._prompt_ids(messages, thinking)

        try:
            ids = ids_of("x", "x")
            start, end = common(ids, ids_of("y", "x")), common(ids, ids_of("x", "y"))
        except ValueError:
            return 0, []
        specials = (at for at in range(start, end) if ids[at] in self._special)
        return start, ids[next(specials, end) : end]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class Job:
    """A request that can be done. `task` is all that the engine knows of the request's kind."""

    task: Task
    conclude: Callable[[Any, Account], Terminal]  # of the task's outcome
    wants_drafts: bool = False  # whether Draft events are delivered


def snapshot_points_of(model: Model) -> SnapshotPoints:
    """Where the prompts of a model's template part."""

    def ids_of(messages: Messages, thinking: bool) -> list[int]:
        return prompt_ids(model.template, model.tokenizer, messages, thinking=thinking)

    return SnapshotPoints(ids_of, model.tokenizer.special_ids)


def prepare(
    model: Model,
    request: Request,
    longest: int,
    points: SnapshotPoints,
    most_steps: int = MOST_STEPS,
) -> Job:
    """longest: tokens that a slot here can have at most; most_steps: per canvas, which bounds the
    checkpoint's own choice too. Raises ValueError, naming the field, for what cannot be done;
    TooLarge for texts that no slot holds."""
    check_request(request, most_steps)
    make = _prepare_reply if request.parts is None else _prepare_fill
    return make(model, request, longest, points, most_steps)


def prepare_decision(model: Model, request: DecisionRequest, longest: int) -> Job:
    """longest: as in `prepare`. Raises ValueError, naming the field, and TooLarge."""
    check_timeout(request.timeout_s)
    names = (field.name for field in fields(DecisionSettings))
    settings = DecisionSettings(**{name: getattr(request, name) for name in names})
    plan = model.plan_decision(request.state, request.questions, settings, longest)

    def decided(read: Answers, account: Account) -> Decided:
        usage = DecisionUsage(account.prompt_tokens, account.cached_tokens, read.reads)
        return Decided(read.answers, usage, account)

    return Job(DecideTask(plan, model.family.name), decided)


def _prepare_reply(
    model: Model, request: Request, longest: int, points: SnapshotPoints, most_steps: int
) -> Job:
    prompt = request.made or make_prompt(model, request, longest, points)
    want = _want(model, request, prompt)
    writes = request.max_tokens != 0 or want is None
    max_tokens = _max_tokens(model, request) if writes else 1
    plan, transcript = model.plan_reply(
        prompt.ids,
        max_tokens,
        _seed(request),
        request.sampler,
        request.stop,
        most_steps=most_steps,
        source=request.grammar,
        thinking=request.thinking,
        verify=request.verify if writes else None,
    )
    opening = _opening(model, request, longest, max_tokens)
    plan = _with_canvas(plan, request, model.config.vocab_size)
    plan = _with_prediction(plan, request, model, longest)
    if not writes:
        assert want is not None
        embed = EmbedTask(prompt, want, model.family.name, plan.seed, plan.blocks)
        return Job(embed, partial(_embedded, request, transcript, embed))
    task = ReplyTask(
        plan,
        prompt,
        partial(Canvas.of, network=model.network),
        _policies(model, request, plan, max_tokens, transcript),
        opening,
        transcript,
        want,
        model.family.name,
    )

    def finished(reply: Reply, account: Account) -> Finished:
        account = replace(account, requested_tokens=request.max_tokens)
        return Finished(reply, account, task.wanted)

    return Job(task, finished, request.drafts)


def _prepare_fill(
    model: Model, request: Request, longest: int, points: SnapshotPoints, most_steps: int
) -> Job:
    assert request.parts is not None
    prompt = request.made or make_prompt(model, request, longest, points)
    is_reply = request.ids is None
    if is_reply:
        prompt = prompt.followed_by(model.fills.empty_thought)
    sampler = request.sampler
    if sampler is not None:  # of a reply's own end, which a fill has not
        sampler = replace(sampler, min_tokens=0, ignore_eos=False, settle_at_end=False)
    plan = model.fills.plan(
        prompt.ids,
        request.parts,
        is_reply=is_reply,
        seed=_seed(request),
        sampler=sampler,
        most_steps=most_steps,
        check=lambda text, field: check_length(model, text, longest, field),
    )
    task = model.fills.task(plan, request.stop, prompt)
    return Job(task, Finished, request.drafts)


def _seed(request: Request) -> int:
    """53 bits, where it is drawn: what survives a client that reads JSON numbers as floats."""
    return secrets.randbits(53) if request.seed is None else request.seed


def _want(model: Model, request: Request, prompt: Prompt) -> Want | None:
    """What the request wants of its prompt's hidden states."""
    if request.scoring is not None:
        check_causal(model.config, "scoring")
        return TokenScoring(prompt.ids, request.scoring)
    if request.pooling is not None:
        return PooledState(request.pooling, len(prompt.ids))
    return None


def _embedded(
    request: Request, transcript: Transcript, task: EmbedTask, wanted: Any, account: Account
) -> Finished:
    """The end of a request that writes nothing; wanted: None where it was cancelled."""
    reason: StopReason = "cancelled" if wanted is None else "max_tokens"
    reply = transcript.finish(Outcome([], reason, task.stats, task.claim.prompt.notes))
    if request.scoring is not None:
        return Finished(reply, account, scores=wanted)
    return Finished(reply, account, vector=wanted)


def _opening(model: Model, request: Request, longest: int, max_tokens: int) -> list[int]:
    check_length(model, request.opening or "", longest, "opening")
    opening = [] if request.opening is None else model.tokenizer.encode(request.opening)
    if len(opening) >= max_tokens:
        raise Refused(
            "opening",
            f"takes {len(opening)} tokens and max_tokens is {request.max_tokens}, which "
            "leaves none for the reply",
            "raise max_tokens",
        )
    return opening


def _policies(
    model: Model, request: Request, plan: ReplyPlan, max_tokens: int, transcript: Transcript
) -> Policies:
    budget = ThinkingBudget.of(
        model.tokenizer,
        model.template.markers,
        request.max_thinking_tokens,
        max_tokens,
        plan.config.ignore_eos,
        transcript.begins,
    )
    empty = partial(is_empty, transcript) if request.retry_empty else None
    # A read has no answer to make room for; a given canvas is drawn once.
    is_read = request.canvas is not None and request.canvas.read_only
    draws_again = request.canvas is None and request.grammar is None
    return Policies(None if is_read else budget, empty if draws_again else None)


def _max_tokens(model: Model, request: Request) -> int:
    """Tokens of the reply at most; a read is one canvas."""
    if request.canvas is None or not request.canvas.read_only:
        return request.max_tokens
    own = request.sampler.canvas_length if request.sampler else None
    return min(request.max_tokens, own or model.config.canvas_length)


def _with_canvas(plan: ReplyPlan, request: Request, vocab_size: int) -> ReplyPlan:
    """The plan with the request's canvas. Raises ValueError."""
    canvas = request.canvas
    if canvas is None:
        return plan
    assert plan.config.canvas_length
    given = {"mode=causal": plan.config.mode == "causal", "canvas": True}
    exclusions.check(exclusions.PLAN, given)
    width, limits = plan.config.canvas_length - plan.opened, plan.limits
    try:
        canvas.check(width, vocab_size)
    except ValueError as error:
        raise Refused("canvas", str(error)) from None
    if canvas.read_only:
        limits = replace(limits, end_ids=(), max_tokens=min(limits.max_tokens, width))
    return replace(plan, limits=limits, given=canvas)


def _with_prediction(plan: ReplyPlan, request: Request, model: Model, longest: int) -> ReplyPlan:
    """The plan with the request's prediction. Raises ValueError."""
    if request.prediction is None:
        return plan
    check_length(model, request.prediction.text, longest, "prediction")
    begun = request.continued is not None
    return model.fills.with_prediction(plan, request.prediction, request.thinking, begun)


def is_empty(transcript: Transcript, ids: list[int]) -> bool:
    """Whether a reply of these tokens has neither answer nor tool call; a broken call counts as
    one, and text around thoughts does too."""
    parsed = parse_reply(transcript.pieces(ids), transcript.markers, transcript.begins)
    return not (parsed.text.strip() or parsed.tool_calls or parsed.warnings)


_TYPES = (
    ("continued", str, "text"),
    ("opening", str, "text"),
    ("scoring", PromptScoring, "a PromptScoring"),
    ("pooling", Pooling, "a Pooling"),
)


def check_request(request: Request, most_steps: int) -> None:
    """Raises ValueError for fields that are wrong by themselves."""
    check_sampler(request.sampler)
    given = {each.name: getattr(request, each.name) for each in fields(request)}
    exclusions.check(exclusions.GRAMMAR, given)
    given = {name: value is not None for name, value in given.items()}
    exclusions.check(exclusions.REQUEST, given | {"thinking": request.thinking})
    steps = request.sampler.max_steps if request.sampler else None
    if steps is not None and steps > most_steps:
        raise Refused(
            "max_steps",
            f"must be at most {most_steps}, got {steps}",
            "ask for fewer, or raise --max-steps",
        )
    for name, kind, what in _TYPES:
        if not isinstance(value := getattr(request, name), kind | None):
            raise Refused(name, f"must be {what}, got {quoted(value)}")
    limit = request.max_thinking_tokens
    if limit is not None:
        check_setting("max_thinking_tokens", limit)
    if request.pooling is not None and request.max_tokens != 0:
        raise Refused("pooling", "nothing is written beside a vector", "set max_tokens to 0")
    check_timeout(request.timeout_s)


def check_timeout(timeout: object) -> None:
    """Raises ValueError for what is no time limit."""
    if timeout is not None:
        check_setting("timeout_s", timeout)


def make_prompt(model: Model, request: Request, longest: int, points: SnapshotPoints) -> Prompt:
    """The prompt's tokens. Its text is rendered and tokenized once. Raises as `prepare` does."""
    given = [x for x in (request.prompt, request.messages, request.ids) if x is not None]
    if len(given) != 1:
        raise Refused(("prompt", "messages", "ids"), "give exactly one of them")
    if request.ids is not None:
        # Nothing has to come before a text that is filled.
        ids = _checked_ids(model, request.ids) if request.ids or request.parts is None else []
        return Prompt(ids, (len(ids),))
    made = model.make_prompt(
        request.prompt,
        request.messages,
        thinking=request.thinking,
        tools=request.tools,
        check=lambda text: check_length(model, text, longest, "prompt"),
    )
    messages = [_USER] if request.messages is None else request.messages
    made = replace(made, marks=points.lengths(made.ids, messages, request.thinking))
    if request.grammar is not None and not request.thinking and request.opening is None:
        made = made.followed_by(model.fills.empty_thought)
    if request.continued is not None:
        # By itself, as the model wrote it: a cut inside a word stays one, and markers are text.
        check_length(model, request.continued, longest, "prompt")
        made = made.followed_by(model.tokenizer.encode(request.continued, special=False))
    return made


def check_length(model: Model, text: str, longest: int, field: str) -> None:
    """Raises TooLarge for a text that has more tokens than `longest` however it is cut. Tokenizing
    it to count them would take seconds and hundreds of megabytes."""
    least = -(-len(text) // model.tokenizer.longest_token)
    if least > longest:
        hint = "" if longest >= model.config.context_length else ", or change --context or --slots"
        raise TooLarge(
            field,
            f"{len(text):,} characters are {least:,} tokens or more, and the longest "
            f"context here has {longest:,}",
            f"shorten it{hint}",
            least,
            longest,
        )


def _checked_ids(model: Model, given: Sequence[int]) -> list[int]:
    ids = list(given)
    if not ids or not all(is_whole(token) for token in ids):
        raise Refused("ids", "must be at least one token id, all of them whole numbers")
    vocabulary = model.config.vocab_size
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise Refused("ids", f"must lie in 0..{vocabulary - 1}, got {min(ids)}..{max(ids)}")
    return ids
