"""Prompts that begin alike are encoded once, though their requests come together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.support.scripted_engine import Script, engine, run

import sfumato.api
from sfumato.engine import Engine, Failed, Finished, Handle, Request

SHARED, OWN = 300, 20
SCRIPT = Script(40, SHARED + OWN)


def with_own_end(number: int, **how: Any) -> Request:
    return Request(ids=[40] * SHARED + [50 + number] * OWN, seed=number, **how)


def encoded(serving: Engine) -> int:
    return serving.state().totals.encoded_tokens


def texts(handles: Sequence[Handle]) -> list[str]:
    return [handle.result().text for handle in handles]


@pytest.mark.parametrize("tokens", [5, 200, 658])
def test_replies_to_one_prompt_encode_it_once(tokens: int) -> None:
    script = Script(40, tokens)
    serving, _ = engine(script, context=1024)
    one = script.request()
    made = serving.prompt(one)
    handles = [serving.submit(Request(ids=one.ids, made=made, seed=n)) for n in range(4)]
    run(serving)
    assert texts(handles) == ["Hello."] * 4
    assert encoded(serving) == tokens
    ends = [handle.terminal for handle in handles]
    cached = [end.account.cached_tokens for end in ends if isinstance(end, Finished)]
    assert cached == [0, tokens, tokens, tokens]


@pytest.mark.parametrize("snapshots", [0, 2**30])
def test_a_common_beginning_is_encoded_once(snapshots: int) -> None:
    """Without memory for snapshots the first one's slot would have gone past it: none waits."""
    serving, _ = engine(SCRIPT, snapshot_bytes=snapshots)
    handles = [serving.submit(with_own_end(n)) for n in range(4)]
    run(serving)
    assert texts(handles) == ["Hello."] * 4
    assert encoded(serving) == (SHARED + 4 * OWN if snapshots else 4 * (SHARED + OWN))


def test_short_beginnings_are_not_waited_for() -> None:
    script = Script(40, 250)
    serving, _ = engine(script, prefill_chunk=2000)
    for n in range(3):
        serving.submit(Request(ids=[40] * 250, seed=n))
    serving.step()
    assert len(serving.state().running) == 3


def test_followers_hold_no_slot_and_block_none_behind_them() -> None:
    other = Script(41, 5)
    serving, _ = engine(SCRIPT, other, slots=2)
    followers = [serving.submit(with_own_end(n)) for n in range(4)]
    last = serving.submit(other.request())
    while last.terminal is None:
        serving.step()
    assert isinstance(last.terminal, Finished)
    assert [handle.terminal for handle in followers] == [None] * 4
    assert encoded(serving) < SHARED  # the first one still encodes
    run(serving)
    assert texts(followers) == ["Hello."] * 4


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_another_takes_over_where_the_first_ends_early(how: str) -> None:
    """The tokens that a cancelled one has encoded are not encoded again."""
    serving, network = engine(SCRIPT)
    handles = [serving.submit(with_own_end(n)) for n in range(3)]
    serving.step()
    first, *others = handles
    if how == "cancelled":
        first.cancel()
    else:
        calls = iter([RuntimeError("broken row")])

        def fail_once(what: str, keys: list[int]) -> None:
            if what == "encode" and (error := next(calls, None)):
                raise error

        network.before = fail_once
    run(serving)
    assert texts(others) == ["Hello."] * 2
    ended = first.terminal
    assert isinstance(ended, Finished if how == "cancelled" else Failed)
    again = 0 if how == "cancelled" else 32  # what the first step had encoded is lost
    assert encoded(serving) == SHARED + 2 * OWN + again


def test_one_whose_prompt_some_slot_holds_does_not_wait() -> None:
    """Another's encoding of the same beginning would only hold it up."""
    serving, _ = engine(SCRIPT, context=1024)
    serving.generate(with_own_end(0))
    serving.submit(Request(ids=[40] * (SHARED - 20) + [60] * 40, seed=1))
    serving.step()  # it shares 280 tokens with the first, for which there is no snapshot
    serving.submit(with_own_end(0))
    serving.step()
    assert len(serving.state().running) == 2


def test_the_time_to_make_a_prompt_is_waiting_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    script = Script(2, 30)
    serving, network = engine(script, clock=lambda: now[0])
    prompt_ids = sfumato.api.prompt_ids
    rendered = []

    def slow(*args: Any, **how: Any) -> list[int]:
        now[0] += 5.0
        rendered.append(args)
        return prompt_ids(*args, **how)

    monkeypatch.setattr(sfumato.api, "prompt_ids", slow)
    submitted = Request("Hi", seed=1)
    network.scripts[2] = replace(script, prompt=len(serving.prompt(submitted).ids))
    del rendered[:]
    handle = serving.submit(submitted)
    late = serving.submit(replace(submitted, id="late", timeout_s=4.0))
    early = serving.submit(replace(submitted, id="early", timeout_s=6.0, since=now[0] - 2.0))
    run(serving)
    assert len(rendered) == 3  # each request's prompt once
    end = handle.terminal
    assert isinstance(end, Finished)
    assert end.account.queue_s >= 5 and end.account.first_draft_s and end.account.first_draft_s >= 5
    for ended in (late.terminal, early.terminal):
        assert isinstance(ended, Failed) and ended.kind == "timeout"


def test_a_neighbour_is_not_held_up_by_many_followers() -> None:
    neighbour = Script(41, 5, "one two three four five six seven.<turn|>")
    serving, network = engine(SCRIPT, neighbour, queue=64)
    handle = serving.submit(neighbour.request())
    serving.step()
    for n in range(60):
        serving.submit(with_own_end(n % 9))
    while handle.terminal is None:
        assert serving.step()
    denoised = [41 in who for who in network.denoised()]
    assert sum(denoised) == sum(handle.result().stats.steps) and all(denoised)
