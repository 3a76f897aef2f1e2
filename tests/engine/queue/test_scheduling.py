"""Who is encoded and denoised at which step, on a network whose text is written beforehand."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import pytest
from tests.support.scripted_engine import LENGTH, Script, engine, run

from sfumato.engine import Draft, Event, Finished, QueueFull, Request, Settled
from sfumato.engine.queue.scheduler import BACKGROUND_EVERY

LONG = "one two three four five six seven.<turn|>"  # 5 canvases


def test_a_request_that_arrives_at_step_three_joins_by_step_four() -> None:
    a, b = Script(40, 5, LONG, hesitate=[9]), Script(41, 5)
    serving, network = engine(a, b)
    serving.submit(a.request())
    for _ in range(3):
        serving.step()
    serving.submit(b.request())
    serving.step()
    assert network.denoised() == [[40], [40], [40], [40, 41]]


def test_a_commit_delays_nobody() -> None:
    """While one row's canvas is encoded, the other is denoised at that very step."""
    a, b = Script(40, 5, LONG), Script(41, 5, LONG, hesitate=[40])
    serving, network = engine(a, b)
    ends = [serving.submit(script.request()) for script in (a, b)]
    run(serving)
    commits = [n for n, (what, who) in enumerate(network.log) if what == "encode" and n > 0]
    assert len(commits) >= 4
    for at in commits:
        what, who = network.log[at + 1]
        assert what == "denoise" and set(network.log[at][1]) <= set(who)
    of_a = [network.log[at][1] for at in commits if 40 in network.log[at][1]]
    assert all(tokens == {40: LENGTH} for tokens in of_a)
    assert [end.result().text for end in ends] == ["one two three four five six seven."] * 2


def test_a_long_prompt_delays_nobody_by_more_than_a_chunk() -> None:
    a, b = Script(40, 5, LONG, hesitate=[30]), Script(41, 200)
    serving, network = engine(a, b, prefill_chunk=16)
    serving.submit(a.request())
    serving.step()
    del network.log[:]
    serving.submit(b.request())
    run(serving)
    encoded = 0
    for what, who in network.log:
        if what == "denoise":
            assert 40 in who or encoded >= 200
        else:
            assert sum(who.values()) <= 16
            encoded += who.get(41, 0)
    kinds = [what for what, _ in network.log]
    assert ("encode", "encode") not in itertools.pairwise(kinds)


def test_a_commit_does_not_wait_behind_a_long_prompt() -> None:
    """The chunk is shared: the older prompt may not take all of it."""
    a, b = Script(40, 200), Script(41, 2, LONG)
    serving, network = engine(a, b, prefill_chunk=20)
    serving.submit(a.request())
    serving.submit(b.request())
    first = next(n for n in range(20) if serving.step() and [41] in network.denoised())
    assert first == 0
    while 40 not in network.denoised()[-1]:
        serving.step()
    assert {40: 20 - LENGTH, 41: LENGTH} in [who for _, who in network.log]
    assert next(who for who in network.denoised() if 41 in who) == [41]


def test_commits_at_one_time_are_done_one_after_another() -> None:
    """A chunk of two canvases finishes two of eight commits a step, the older ones first."""
    scripts = [Script(key, 2, LONG, hesitate=[0, 30]) for key in range(40, 48)]
    serving, network = engine(*scripts, slots=8, prefill_chunk=2 * LENGTH)
    for script in scripts:
        serving.submit(script.request())
    while not any(row.phase == "commit" for row in serving.state().running):
        serving.step()
    del network.log[:]
    for _ in range(4):
        serving.step()
    encoded = [who for what, who in network.log if what == "encode"]
    assert encoded == [{key: LENGTH, key + 1: LENGTH} for key in range(40, 48, 2)]
    assert [len(who) for who in network.denoised()] == [2, 4, 6, 8]


def test_a_long_prompt_moves_whatever_is_committed() -> None:
    long, *others = [Script(40, 100), *(Script(key, 2, LONG) for key in range(41, 44))]
    serving, network = engine(long, *others, prefill_chunk=2 * LENGTH)
    for script in (long, *others):
        serving.submit(script.request())
    run(serving)
    left = 100
    for who in (who for what, who in network.log if what == "encode"):
        if left > 0:
            assert who[40] >= min(left, LENGTH)
            left -= who[40]
    assert left == 0


def test_rows_finish_out_of_order() -> None:
    scripts = [Script(40, 5, LONG, hesitate=[5]), Script(41, 5), Script(42, 5, hesitate=[3])]
    serving, _ = engine(*scripts)
    order: list[int] = []
    for script in scripts:
        serving.submit(
            script.request(),
            lambda e, key=script.key: order.append(key) if isinstance(e, Finished) else None,  # type: ignore[misc]
        )
    run(serving)
    assert order == [41, 42, 40]


def test_first_in_first_out_without_starvation() -> None:
    """A request that needs a larger slot is not overtaken by the small ones behind it."""
    scripts = [Script(key, 5) for key in range(40, 46)]
    large = Script(50, 100)
    serving, network = engine(*scripts, large, slots=1, context=64)
    for script in (scripts[0], large, *scripts[1:]):
        serving.submit(script.request(max_tokens=16))
    run(serving)
    first = [keys[0] for keys in network.denoised()]
    assert list(dict.fromkeys(first)) == [40, 50, 41, 42, 43, 44, 45]


def test_the_slots_bound_the_batch_and_are_given_on() -> None:
    scripts = [Script(key, 3, hesitate=[key % 4]) for key in range(40, 50)]
    serving, network = engine(*scripts, slots=3)
    ends = [serving.submit(script.request()) for script in scripts]
    run(serving)
    assert max(map(len, network.denoised())) == 3
    assert [end.result().text for end in ends] == ["Hello."] * 10
    assert not any(slot.busy for slot in serving.state().slots)
    assert serving.state().totals.requests == {"eos": 10}


def test_the_order_of_events() -> None:
    script = Script(40, 5, "Hello, world!<turn|>", hesitate=[1])
    serving, _ = engine(script)
    seen: list[Event] = []
    serving.submit(script.request(drafts=True), seen.append)
    run(serving)
    assert [type(event) for event in seen] == [*[Draft] * 3, Settled] * 2 + [Finished]
    assert [e.step for e in seen if isinstance(e, Draft)] == [1, 2, 3] * 2
    assert [e.text for e in seen if isinstance(e, Settled)] == ["Hello, w", "orld!"]
    first = next(e for e in seen if isinstance(e, Settled))
    assert first.top_ids is not None and first.top_probs is not None
    assert first.top_ids[:, 0].tolist() == first.token_ids
    assert first.top_probs.shape == first.top_ids.shape


def test_a_settled_canvas_goes_out_before_it_is_encoded() -> None:
    script = Script(40, 5, "Hello, world!<turn|>")
    serving, network = engine(script)
    when: list[int] = []
    serving.submit(script.request(), lambda event: when.append(len(network.log)))
    run(serving)
    assert when[0] == 3  # a prompt and two steps, and not yet the commit
    assert [what for what, _ in network.log[3:4]] == ["encode"]


def test_drafts_only_for_those_who_ask() -> None:
    script = Script(40, 5)
    serving, _ = engine(script)
    handle = serving.submit(script.request())
    run(serving)
    assert [type(event) for event in handle.events()] == [Settled, Finished]


def test_what_a_request_took() -> None:
    script = Script(40, 5, "Hello, world!<turn|>", hesitate=[2, 1])
    serving, _ = engine(script)
    handle = serving.submit(script.request(max_tokens=99))
    run(serving)
    assert isinstance(handle.terminal, Finished)
    account, stats = handle.terminal.account, handle.terminal.reply.stats
    assert (account.request_id, account.endpoint, account.seed) == (handle.id, "api", 40)
    assert (account.prompt_tokens, account.requested_tokens, account.output_tokens) == (5, 99, 13)
    assert (account.steps, account.convergence) == ((4, 3), ("converged", "converged"))
    assert account.canvas_tokens == 2 * LENGTH and account.retries == 0
    assert (stats.steps, stats.canvases, stats.output_tokens) == ([4, 3], 2, 13)
    assert account.first_draft_s and account.first_commit_s
    assert account.queue_s <= account.first_draft_s < account.first_commit_s <= account.total_s
    assert (account.slot, account.context, account.allocated) == (0, 512, True)


def test_what_a_stop_string_takes_back_is_not_counted() -> None:
    """It begins in a canvas that had settled before."""
    script = Script(40, 5, LONG)
    serving, _ = engine(script)
    reply = serving.generate(script.request(stop="two three"))
    assert reply.text == "one " and len(reply.token_ids) < LENGTH
    assert serving.state().totals.output_tokens == len(reply.token_ids)


def test_one_who_is_admitted_is_never_in_neither_list() -> None:
    """Another thread that drains counts who waits and who runs."""
    script = Script(40, 5)
    serving, _ = engine(script)
    scheduler, seen = serving._scheduler, []

    class Line(deque[Any]):
        def remove(self, row: Any) -> None:
            seen.append(list(self) == scheduler.running)
            super().remove(row)

    scheduler.waiting = Line()
    serving.generate(script.request())
    assert seen == [True]


def test_the_queue_has_an_end() -> None:
    scripts = [Script(key, 3) for key in range(40, 45)]
    serving, _ = engine(*scripts, slots=1, queue=3)
    for script in scripts[:4]:  # there is a slot for one of them
        serving.submit(script.request())
    with pytest.raises(QueueFull, match=r"3 requests wait already.*--queue"):
        serving.submit(scripts[4].request())
    serving.step()
    with pytest.raises(QueueFull):  # three wait, and no slot is free
        serving.submit(scripts[4].request())
    while len(serving._scheduler.waiting) == 3:
        serving.step()
    serving.submit(scripts[4].request())
    run(serving)
    assert serving.state().totals.requests == {"eos": 5}


def test_background_rows_yield() -> None:
    """They leave a slot and the queue to others, and move in every eighth step beside them; and
    another row waits for no prompt that is encoded in the background."""
    slow = [Script(key, 5, LONG, hesitate=[14]) for key in (40, 41, 42)]
    live, twin = Script(43, 5, LONG, hesitate=[10]), Script(44, 400)
    serving, network = engine(*slow, live, twin, slots=3, queue=2)
    batch = [serving.submit(script.request(background=True)) for script in slow]
    serving.step()
    assert network.denoised() == [[40, 41]]  # the third slot stays free
    others = [serving.submit(live.request())]
    with pytest.raises(QueueFull):
        for _ in range(3):
            serving.submit(slow[2].request(background=True))
    del network.log[:]
    while others[0].terminal is None:
        serving.step()
    steps = network.denoised()
    together = [at for at, keys in enumerate(steps) if len(keys) == 3]
    assert len(steps) > 40 and all(43 in keys for keys in steps)
    assert {b - a for a, b in itertools.pairwise(together)} == {BACKGROUND_EVERY}
    assert [keys for keys in steps if len(keys) != 3] == [[43]] * (len(steps) - len(together))
    run(serving)
    assert all(each.result().text == "one two three four five six seven." for each in batch)
    follower = twin.request(background=True), twin.request()
    serving.submit(follower[0])
    serving.step()
    assert network.log[-1] == ("encode", {44: 32})
    serving.submit(follower[1])
    serving.step()
    assert {row.request.background: row.encoded for row in serving._scheduler.running}[False] > 0
    run(serving)


def test_a_random_seed_is_told() -> None:
    script = Script(40, 5)
    serving, _ = engine(script)
    handles = [serving.submit(Request(ids=[40] * 5)) for _ in range(2)]
    run(serving)
    seeds = {h.terminal.account.seed for h in handles if isinstance(h.terminal, Finished)}
    assert len(seeds) == 2 and all(0 <= seed < 2**53 for seed in seeds)


def test_state_tells_who_runs() -> None:
    scripts = [Script(40, 5, LONG, hesitate=[9]), Script(41, 5)]
    serving, _ = engine(*scripts, slots=1)
    handles = [serving.submit(script.request()) for script in scripts]
    serving.step()
    state = serving.state()
    (row,) = state.running
    assert (row.request_id, row.phase, row.canvas, row.step) == (handles[0].id, "denoise", 0, 1)
    assert (row.prompt_tokens, row.output_tokens, row.slot) == (5, 0, 0)
    assert state.waiting == 1
    assert (state.slots[0].busy, state.slots[0].request) == (True, handles[0].id)
    run(serving)
    after = serving.state()
    assert after.running == () and after.slots[0].request is None
    assert after.totals.output_tokens == sum(len(h.result().token_ids) for h in handles)
    assert after.totals.steps == sum(sum(h.result().stats.steps) for h in handles)
    assert after.speeds.canvas_tokens > 0 and after.speeds.ms_per_step > 0
