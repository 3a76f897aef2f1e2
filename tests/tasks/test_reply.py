"""The rules of one reply's life, without a network: what follows from the ids of a canvas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.scripted_model import tokenizer

from sfumato.diffusion.canvas import Draft
from sfumato.diffusion.limits import Limits, ReplyPlan
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import MinTokens
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.tasks.reply import ANSWER, RETRIES, Policies, ReplyTask, ThinkingBudget
from sfumato.tasks.works import Prompt
from sfumato.text.markers import ChatMarkers

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
    count = length = 0

    def read(self, ids: list[int]) -> Cut:
        return self

    def add(self, ids: list[int]) -> None:
        self.length += len(ids)

    def cut(self, added: list[int]) -> int | None:
        return max(0, 2 - self.length)


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


OPENS, NAMES = 8, (20, 21)  # a thought, and the header that names it
FORMAT = ChatMarkers(thought_open="<", thought_close=">", ends=("!",))


class Counted(dict[int, str]):
    """Markers that count how often a token is looked up."""

    looked = 0

    def get(self, token: int, default: Any = None) -> Any:
        self.looked += 1
        return super().get(token, default)


@pytest.mark.parametrize(
    ("tokens", "strict", "canvases", "counts", "cuts"),
    [
        # In parts, a header among them, and a second thought, of which one token is left.
        (
            *(3, True, [[OPENS, 20], [21, 30, 31], [CLOSES, 40], [OPENS, 50, 51], [52, CLOSES]]),
            *([0, 2, 2, 4, 5], [None, None, None, 2, 0]),
        ),
        # What ends by itself is not cut; what does not is, before its canvas too.
        (1, False, [[OPENS, 30, 31, CLOSES], [OPENS, 32]], [2, 3], [None, 1]),
        # A header that goes another way is a part of the thought.
        (1, True, [[OPENS, 20], [22, 23]], [0, 3], [None, 0]),
    ],
)
def test_thoughts_are_read_in_parts(
    tokens: int,
    strict: bool,
    canvases: list[list[int]],
    counts: list[int],
    cuts: list[int | None],
) -> None:
    """As all at once, and each token once, however long the reply is."""
    markers = Counted({OPENS: "<", CLOSES: ">", END: "!"})
    budget = ThinkingBudget(FORMAT, markers, CLOSES, NAMES, tokens, strict, False)
    thoughts, reply = budget.read([]), list[int]()
    for ids, count, cut in zip(canvases, counts, cuts, strict=True):
        assert thoughts.cut(ids) == cut
        thoughts.add(ids)
        reply += ids
        assert thoughts.count == count == budget.read(reply).count
    before = markers.looked
    assert thoughts.cut([30]) is not None and thoughts.count and markers.looked == before + 1


def test_a_thought_leaves_room_for_an_answer_however_short_a_canvas_is() -> None:
    for most, requested, left in ((2048, None, ANSWER), (100, None, 50), (2048, 9000, ANSWER)):
        budget = ThinkingBudget.of(tokenizer(), FORMAT, requested, most, False)
        assert budget.tokens == most - left - 2


def test_canvases_after_an_ended_thought_stay_in_the_context() -> None:
    class CutOnce(Cut):
        def cut(self, added: list[int]) -> int | None:
            return None if self.length else 2

    reply = sequence(Policies(thought=CutOnce()), context=PROMPT + 12)
    assert settle(reply, [11, 12, 13, 14]) == [11, 12, CLOSES] and reply.reason is None
    assert settle(reply, [15] * LENGTH) == [15] * LENGTH and reply.reason is None
    assert settle(reply, [16] * LENGTH) is not None and reply.reason == "max_tokens"
    assert PROMPT + len(reply.reply) <= reply.plan.context
