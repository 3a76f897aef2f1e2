"""The rules of one reply's life, without a network: what follows from the ids of a canvas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sfumato.diffusion.canvas import Draft
from sfumato.diffusion.limits import Limits, ReplyPlan
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import MinTokens
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.tasks.reply import RETRIES, Policies, ReplyTask
from sfumato.tasks.works import Prompt

END, CLOSES, LENGTH, PROMPT = 1, 9, 4, 10


def sequence(
    policies: Policies = Policies(),  # noqa: B008  (frozen)
    max_tokens: int = 12,
    cut: Callable[[list[int], list[int]], int | None] = lambda reply, added: None,
    opening: list[int] | None = None,
    context: int = 64,
) -> ReplyTask:
    config = replace(REFERENCE, canvas_length=LENGTH)
    limits = Limits(max_tokens, (END,), cut)
    plan = ReplyPlan(PROMPT, config, limits, 5, -(-max_tokens // LENGTH), context)
    make: Any = None  # no canvas is made here
    return ReplyTask(plan, Prompt([5] * PROMPT, ()), make, policies, opening or ())


def step(number: int) -> Draft:
    none = torch.zeros(0)
    return Draft(0, number, none, none, none, 48, none, none)


def settle(reply: ReplyTask, ids: list[int]) -> list[int] | None:
    """What a canvas adds; None where it is drawn again."""
    settled = reply.add_canvas(ids, "converged")
    return None if settled is None else settled.token_ids


def test_canvases_follow_each_other_until_the_reply_ends() -> None:
    reply = sequence(max_tokens=10)
    assert reply.next_canvas().noise == Noise(5, 0)
    for number, ids in enumerate(([11, 12, 13, 14], [15, 16, 17, 18], [19, 20, 21, 22])):
        assert reply.reason is None
        plan = reply.next_canvas()
        assert (plan.noise, plan.reply) == (Noise(5, number), list(range(11, 11 + 4 * number)))
        reply.stepped(step(1))
        settle(reply, ids)
    outcome = reply.outcome("max_tokens")
    assert (reply.reason, outcome.token_ids) == ("max_tokens", list(range(11, 21)))
    assert outcome.stats.steps == [1, 1, 1]


def test_an_opening_is_pinned_over_as_many_canvases_as_it_takes() -> None:
    reply = sequence(opening=[11, 12, 13, 14, 15])
    assert reply.next_canvas().pinned == {0: 11, 1: 12, 2: 13, 3: 14}
    settle(reply, [11, 12, 13, 14])
    assert reply.next_canvas().pinned == {0: 15}


def test_a_stop_string_takes_back_what_settled_before() -> None:
    reply = sequence(cut=lambda reply, added: 3 if 15 in reply + added else None)
    settle(reply, [11, 12, 13, 14])
    settle(reply, [15, 16, 17, 18])
    assert (reply.reason, reply.reply) == ("stop", [11, 12, 13])


def test_an_empty_answer_is_drawn_again_and_the_last_time_may_not_end() -> None:
    reply = sequence(Policies(is_empty=lambda ids: not ids))
    for attempt in range(RETRIES):
        assert reply.next_canvas().noise == Noise(5, 0, attempt)
        reply.stepped(step(3))
        assert settle(reply, [END] * LENGTH) is None and reply.reason is None
    plan = reply.next_canvas()
    assert plan.noise == Noise(5, 0, RETRIES)
    assert plan.config.processors == (MinTokens(1, (END,)),)
    reply.stepped(step(2))
    assert settle(reply, [11, END, END, END]) == [11]
    assert (reply.reason, reply.retries) == ("eos", RETRIES)
    assert reply.stats.steps == [3 * RETRIES + 2]  # of the attempts before, and of this one
    assert reply.warnings == ["canvas 0: the answer was empty and was drawn again"]
    assert reply.config.processors == ()


class Cut:
    """Ends a thought after its first two tokens."""

    closes: int | None = CLOSES

    def cut(self, reply: list[int], added: list[int]) -> int | None:
        return max(0, 2 - len(reply))

    def count(self, ids: Any) -> int:
        return 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 3},  # no token left for an answer
        {"context": PROMPT + 3 + LENGTH - 1},  # no canvas left
        {"cut": lambda reply, added: 0},  # a stop string came first
    ],
)
def test_a_thought_is_ended_where_an_answer_still_has_room(options: dict) -> None:  # type: ignore[type-arg]
    thought = Cut()
    reply = sequence(Policies(thought=thought), **options)
    added = settle(reply, [11, 12, 13, 14])
    if not options:
        assert (added, reply.reason) == ([11, 12, CLOSES], None)
        assert reply.warnings == ["canvas 0: the thought was ended to leave room to answer"]
    else:
        assert added is not None and CLOSES not in added and reply.warnings == []


def test_canvases_after_an_ended_thought_stay_in_the_context() -> None:
    class CutOnce(Cut):
        def cut(self, reply: list[int], added: list[int]) -> int | None:
            return None if reply else 2

    reply = sequence(Policies(thought=CutOnce()), context=PROMPT + 12)
    assert settle(reply, [11, 12, 13, 14]) == [11, 12, CLOSES] and reply.reason is None
    assert settle(reply, [15] * LENGTH) == [15] * LENGTH and reply.reason is None
    assert settle(reply, [16] * LENGTH) is not None and reply.reason == "max_tokens"
    assert PROMPT + len(reply.reply) <= reply.plan.context
