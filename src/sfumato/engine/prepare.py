"""How a request becomes a task: checks, which name the field, and text as ids.

One function for each kind of request. Knows no slots and no threads.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from sfumato.api import Messages, Model, Reply, Transcript
from sfumato.decisions.results import DecisionUsage
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.constraints.decision_plan import DecisionSettings
from sfumato.diffusion.limits import Outcome, ReplyPlan, StopReason
from sfumato.engine.decision import DecisionRequest
from sfumato.engine.events import Account, Decided, Finished
from sfumato.engine.job import Job
from sfumato.engine.queue.snapshot_points import SnapshotPoints
from sfumato.engine.request import (
    Request,
    check_length,
    check_request,
    check_timeout,
    make_prompt,
)
from sfumato.options import exclusions
from sfumato.options.limits import MOST_STEPS
from sfumato.refused import Refused
from sfumato.tasks.decide import Answers, DecideTask
from sfumato.tasks.embed import EmbedTask
from sfumato.tasks.reply import Policies, ReplyTask
from sfumato.tasks.thinking import ThinkingBudget
from sfumato.tasks.wants import PooledState, TokenScoring
from sfumato.tasks.works import Prompt, Want
from sfumato.text.prompt import prompt_ids
from sfumato.text.reply import parse_reply


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
    want = _want(request, prompt)
    writes = request.max_tokens != 0 or want is None
    max_tokens = _max_tokens(model, request) if writes else 1
    plan, transcript = model.plan_reply(
        len(prompt.ids),
        max_tokens,
        _seed(request),
        request.sampler,
        request.stop,
        most_steps=most_steps,
        source=request.grammar,
        thinking=request.thinking,
    )
    opening = _opening(model, request, longest, max_tokens)
    plan = _with_canvas(plan, request, model.config.vocab_size)
    plan = _with_prediction(plan, request, model, longest)
    if not writes:
        assert want is not None
        embed = EmbedTask(prompt, want, model.family.name, plan.seed)
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
    ids: Sequence[int] = (request.made or make_prompt(model, request, longest, points)).ids
    is_reply = request.ids is None
    if is_reply:
        ids = [*ids, *model.fills.empty_thought]
    sampler = request.sampler
    if sampler is not None:  # of a reply's own end, which a fill has not
        sampler = replace(sampler, min_tokens=0, ignore_eos=False, settle_at_end=False)
    plan = model.fills.plan(
        ids,
        request.parts,
        is_reply=is_reply,
        seed=_seed(request),
        sampler=sampler,
        most_steps=most_steps,
        check=lambda text, field: check_length(model, text, longest, field),
    )
    return Job(model.fills.task(plan, request.stop), Finished, request.drafts)


def _seed(request: Request) -> int:
    """53 bits, where it is drawn: what survives a client that reads JSON numbers as floats."""
    return secrets.randbits(53) if request.seed is None else request.seed


def _want(request: Request, prompt: Prompt) -> Want | None:
    """What the request wants of its prompt's hidden states."""
    if request.scoring is not None:
        return TokenScoring(request.scoring, prompt.ids)
    if request.pooling is not None:
        return PooledState(request.pooling, len(prompt.ids))
    return None


def _embedded(
    request: Request, transcript: Transcript, task: EmbedTask, wanted: Any, account: Account
) -> Finished:
    """The end of a request that writes nothing; wanted: None where it was cancelled."""
    reason: StopReason = "cancelled" if wanted is None else "max_tokens"
    reply = transcript.finish(Outcome([], reason, task.stats, ()))
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
    assert plan.config.canvas_length
    is_causal = plan.config.mode == "causal"
    budget = ThinkingBudget.of(
        model.tokenizer,
        model.template.markers,
        request.max_thinking_tokens,
        max_tokens,
        model.config.canvas_length if is_causal else plan.config.canvas_length,
        plan.config.ignore_eos,
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
    try:
        canvas.check(plan.config.canvas_length, vocab_size)
    except ValueError as error:
        raise Refused("canvas", str(error)) from None
    limits = replace(plan.limits, end_ids=()) if canvas.read_only else plan.limits
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
    parsed = parse_reply(transcript.pieces(ids), transcript.markers)
    return not (parsed.text.strip() or parsed.tool_calls or parsed.warnings)
