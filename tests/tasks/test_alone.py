"""The generate loop on replies written beforehand: commits, ends, trimming and figures."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.scripted_model import (
    END,
    END_IDS,
    VOCABULARY,
    ScriptedNetwork,
    counted,
    script,
    tokenizer,
)

from sfumato.diffusion.canvas import Draft
from sfumato.diffusion.limits import Limits, Outcome, SettledCanvas, resolve
from sfumato.diffusion.sampler import (
    EachSettled,
    LinearTemperature,
    SettledToEnd,
    StableAndConfident,
)
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig, fixed_steps
from sfumato.tasks.alone import generate
from sfumato.tasks.reply import visible

LENGTH = 8
PROMPT = [2, 5, 6]
PAD = VOCABULARY["<pad>"]


def reply(
    text: str,
    max_tokens: int = 64,
    config: SamplerConfig = SamplerConfig(),  # noqa: B008  (frozen)
    hesitate: int = 0,
    prompt: list[int] = PROMPT,
    end_ids: tuple[int, ...] = END_IDS,
    **limits: Any,
) -> tuple[ScriptedNetwork, list[Draft | SettledCanvas], Outcome]:
    network: Any = ScriptedNetwork(script(text, LENGTH), LENGTH, hesitate)
    wanted = Limits(max_tokens, end_ids, **limits)
    run = generate(
        network, torch.tensor(prompt, dtype=torch.int64), config.over(REFERENCE), wanted, seed=0
    )
    events: list[Draft | SettledCanvas] = []
    while True:
        try:
            events.append(next(run))
        except StopIteration as end:
            return network, events, end.value


def text_of(outcome: Outcome) -> str:
    return tokenizer().decode(outcome.token_ids, skip_special=False)


def settled(events: list[Draft | SettledCanvas]) -> list[SettledCanvas]:
    return [event for event in events if isinstance(event, SettledCanvas)]


def test_a_reply_ends_at_its_end_token() -> None:
    _, events, outcome = reply("Hello, world! And more.<turn|>beyond")
    assert text_of(outcome) == "Hello, world! And more."
    assert outcome.stop_reason == "eos"
    assert [event.canvas for event in settled(events)] == [0, 1, 2]
    assert [event.stop_reason for event in settled(events)] == [None, None, "eos"]
    assert [i for event in settled(events) for i in event.token_ids] == outcome.token_ids


def test_only_canvases_that_another_follows_are_committed() -> None:
    network, _, _ = reply("Hello, world! And more.<turn|>")
    canvases = script("Hello, world! And more.<turn|>", LENGTH)
    (slot,) = network.slots
    assert slot.encoded == [PROMPT, *canvases[:-1]]
    network, _, _ = reply("Hi<turn|>")
    assert network.slots[0].encoded == [PROMPT]
    network, _, outcome = reply("x" * 32, max_tokens=16)  # ends at its limit: no commit either
    assert outcome.stop_reason == "max_tokens"
    assert [len(ids) for ids in network.slots[0].encoded] == [3, LENGTH]


def test_the_cache_is_no_larger_than_needed() -> None:
    network, _, _ = reply("x" * 64, max_tokens=20)
    assert network.slots[0].capacity == len(PROMPT) + 2 * LENGTH
    network, _, _ = reply("x<turn|>", max_tokens=LENGTH, prompt=[])
    assert network.slots[0].capacity == 1


@pytest.mark.parametrize("limit", [1, 7, 8, 9, 15, 16, 17])
def test_trimming_to_the_limit(limit: int) -> None:
    _, events, outcome = reply("abcdefghijklmnopqrstuvwx", max_tokens=limit)
    assert text_of(outcome) == "abcdefghijklmnopqrstuvwx"[:limit]
    assert outcome.stop_reason == "max_tokens"
    assert len(settled(events)) == math.ceil(limit / LENGTH)
    assert outcome.stats.output_tokens == limit


@pytest.mark.parametrize(
    ("text", "limit", "expected", "reason"),
    [
        ("abcdefg<turn|>", 7, "abcdefg", "eos"),  # the end token itself needs no room
        ("abcdefgh<turn|>", 8, "abcdefgh", "max_tokens"),  # in a canvas that was never begun
        ("abcdefg<turn|>", 6, "abcdef", "max_tokens"),
        ("<turn|>abc", 5, "", "eos"),
        ("abc<eos>d", 5, "abc", "eos"),
    ],
)
def test_end_and_limit_together(text: str, limit: int, expected: str, reason: str) -> None:
    _, _, outcome = reply(text, max_tokens=limit)
    assert (text_of(outcome), outcome.stop_reason) == (expected, reason)


def test_ignore_eos() -> None:
    """The script insists on the end; banned, it cannot come, and padding cannot either."""
    config = SamplerConfig(ignore_eos=True)
    _, _, outcome = reply("abc<turn|>defghijklmn", max_tokens=12, config=config)
    assert len(outcome.token_ids) == 12 and outcome.stop_reason == "max_tokens"
    assert not {VOCABULARY["<pad>"], *END_IDS} & set(outcome.token_ids)


def test_settle_at_end() -> None:
    """The stopping rule keeps its settings and learns the end tokens; a reply ends as ever."""
    config = SamplerConfig(settle_at_end=True, stopping=StableAndConfident(2, 0.5))
    _, _, outcome = reply("abc<turn|>defghijklmn", config=config)
    assert text_of(outcome) == "abc" and outcome.stop_reason == "eos"
    sizes = SimpleNamespace(canvas_length=LENGTH, vocab_size=40, pad_id=None, mask_id=None)
    network: Any = SimpleNamespace(config=sizes)
    resolved = resolve(network, config.over(REFERENCE), Limits(9, (7, 3)))
    assert resolved.stopping == SettledToEnd(2, 0.5, (7, 3))
    for same in (SamplerConfig(), replace(config, ignore_eos=True)):
        assert type(resolve(network, same.over(REFERENCE), Limits(9, (7,))).stopping) is (
            StableAndConfident
        )
    assert resolve(network, config.over(REFERENCE), Limits(9, ())).stopping == config.stopping
    with pytest.raises(ValueError, match=r"settle_at_end: belongs to .* has Never; leave one"):
        reply("abc", config=replace(fixed_steps(3), settle_at_end=True))
    with pytest.raises(ValueError, match="leave out settle_at_end"):
        SamplerConfig(mode="causal", settle_at_end=True).check_mode()


def test_patience() -> None:
    """The rule of a request with patience; a rule of another kind is refused beside it."""
    sizes = SimpleNamespace(canvas_length=LENGTH, vocab_size=40, pad_id=None, mask_id=None)
    network: Any = SimpleNamespace(config=sizes)
    for ends in ((7, 3), ()):
        resolved = resolve(network, SamplerConfig(patience=3).over(REFERENCE), Limits(9, ends))
        assert resolved.stopping == EachSettled(3) and resolve(network, resolved, Limits(9, ends))
    with pytest.raises(ValueError, match=r"patience: belongs to .* has Never; leave one"):
        reply("abc", config=replace(fixed_steps(3), patience=2))
    with pytest.raises(ValueError, match="patience, settle_at_end: give at most one of them"):
        SamplerConfig(patience=2, settle_at_end=True)
    with pytest.raises(ValueError, match="leave out patience"):
        SamplerConfig(mode="causal", patience=2).check_mode()


def test_min_tokens_bans_the_end_until_then() -> None:
    """The script insists on the end at the third position; banned, it cannot come."""
    config = SamplerConfig(min_tokens=5)
    _, _, outcome = reply("ab<turn|><turn|><turn|><turn|>xy", config=config)
    assert len(outcome.token_ids) == 5 and outcome.stop_reason == "eos"
    assert text_of(outcome)[:2] == "ab"
    assert not set(outcome.token_ids) & set(END_IDS)
    _, _, outcome = reply("ab<turn|>", config=SamplerConfig(min_tokens=2))
    assert text_of(outcome) == "ab"


def test_min_tokens_counts_over_canvases() -> None:
    config = SamplerConfig(min_tokens=LENGTH + 2)
    _, _, outcome = reply("abcdefgh<turn|><turn|><turn|>", config=config)
    assert len(outcome.token_ids) == LENGTH + 2


def test_a_stop_string_inside_a_canvas() -> None:
    def cut(reply: list[int], added: list[int]) -> int | None:
        at = tokenizer().decode(reply + added).find("lo, wor")
        return None if at < 0 else at

    network, events, outcome = reply("Hello, world!<turn|>", cut=cut)
    assert (text_of(outcome), outcome.stop_reason) == ("Hel", "stop")
    assert outcome.stats.output_tokens == 3
    assert len(settled(events)) == 2  # it ends in the second canvas, where it began in the first
    assert len(network.slots[0].encoded) == 2


def test_cancelling() -> None:
    _, events, outcome = reply("Hello, world!<turn|>", cancelled=lambda: True)
    assert (events, outcome.token_ids, outcome.stop_reason) == ([], [], "cancelled")
    assert outcome.stats.first_draft_s is None and outcome.stats.canvases == 0

    # Asked before the prompt, two steps, a commit, and two steps of the second canvas.
    answers = [*[False] * 5, True]
    _, events, outcome = reply("Hello, world!<turn|>", cancelled=counted(answers))
    assert (text_of(outcome), outcome.stop_reason) == ("Hello, w", "cancelled")
    assert [type(event) for event in events] == [Draft, Draft, SettledCanvas, Draft]
    assert outcome.stats.steps == [2, 1] and outcome.stats.convergence == ["converged"]


def test_a_settled_canvas_is_not_committed_for_a_cancelled_reply() -> None:
    answers = [False, False, False, True]
    network, events, outcome = reply("Hello, world!<turn|>", cancelled=counted(answers))
    assert (text_of(outcome), outcome.stop_reason) == ("Hello, w", "cancelled")
    assert [type(event) for event in events] == [Draft, Draft, SettledCanvas]
    assert network.slots[0].encoded == [PROMPT]
    assert outcome.stats.steps == [2] and outcome.stats.canvases == 1
    assert outcome.stats.output_tokens == LENGTH


def test_visible() -> None:
    assert visible([5, 6, 2, 7, 1], (1, 2)) == [5, 6]
    assert visible([5, 6], {1}) == [5, 6]
    assert visible([1, 5], (1,)) == visible([], (1,)) == []


def test_steps_and_convergence_of_each_canvas() -> None:
    _, _, outcome = reply("Hello, world!<turn|>", hesitate=3)
    assert outcome.stats.steps == [5, 5]  # three unsure, one sure, one that finds it unchanged
    assert outcome.stats.convergence == ["converged", "converged"]
    _, _, outcome = reply("Hello, world!<turn|>", hesitate=3, config=SamplerConfig(max_steps=4))
    assert outcome.stats.steps == [4, 4]
    assert outcome.stats.convergence == ["step_cap", "step_cap"]
    assert text_of(outcome) == "Hello, world!"
    _, _, outcome = reply("Hello, world!<turn|>", config=fixed_steps(7))
    assert outcome.stats.steps == [7, 7]
    assert outcome.stats.convergence == ["step_cap", "step_cap"]


def test_drafts_count_steps_and_canvases() -> None:
    _, events, _ = reply("Hello, world!<turn|>", hesitate=1)
    drafts = [event for event in events if isinstance(event, Draft)]
    assert [(d.canvas, d.step) for d in drafts] == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    assert {d.max_steps for d in drafts} == {48}
    assert drafts[0].accepted.sum() == 1  # of equally unsure positions, one within the bound
    assert drafts[1].accepted.all()
    assert drafts[0].entropy[0] == pytest.approx(math.log(len(VOCABULARY)), abs=1e-4)


def test_self_conditioning_can_be_turned_off() -> None:
    network, _, _ = reply("Hi<turn|>", hesitate=1)
    given = [bool(soft.any()) for soft in network.softs]
    assert given == [False] + [True] * (len(given) - 1) and len(given) > 1
    off = SamplerConfig(self_conditioning=False)
    network, _, _ = reply("Hi<turn|>", hesitate=1, config=off)
    assert not any(soft.any() for soft in network.softs)


def test_figures() -> None:
    started = time.perf_counter()
    network: Any = ScriptedNetwork(script("Hello, world!<turn|>", LENGTH), LENGTH)
    run = generate(network, torch.tensor(PROMPT), REFERENCE, Limits(64, END_IDS), seed=0)
    while True:
        try:
            next(run)
            time.sleep(0.02)
        except StopIteration as end:
            stats = end.value.stats
            break
    spent = time.perf_counter() - started
    assert stats.prompt_tokens == 3 and stats.output_tokens == 13 and stats.canvases == 2
    assert stats.tokens_per_forward == 13 / 4
    assert 0 < stats.prefill_s <= stats.first_draft_s <= stats.total_s <= spent
    assert stats.commit_s > 0 and stats.denoise_s > 0
    working = stats.prefill_s + stats.denoise_s + stats.commit_s
    assert working <= stats.total_s - 6 * 0.02  # what the consumer spends on six events is not in


@pytest.mark.parametrize(
    ("text", "limit", "warned"),
    [
        ("x" * 64, 32, [0, 1]),
        ("hello world, how are you", 24, []),
        ("no no no no no no no no no no no", 32, [0, 1]),
        ("--------<turn|>", 32, []),
    ],
)
def test_repetition_is_reported_and_never_cut(text: str, limit: int, warned: list[int]) -> None:
    network: Any = ScriptedNetwork(script(text, 16), 16)
    run = generate(network, torch.tensor(PROMPT), REFERENCE, Limits(limit, END_IDS), seed=0)
    while True:
        try:
            next(run)
        except StopIteration as end:
            outcome = end.value
            break
    clean, _, _ = text.partition("<turn|>")
    assert text_of(outcome) == clean[:limit]
    assert all("repeats" in warning for warning in outcome.warnings)
    assert [warning.split(":")[0] for warning in outcome.warnings] == [
        f"canvas {canvas}" for canvas in warned
    ]


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_no_room_is_refused(max_tokens: int) -> None:
    with pytest.raises(
        ValueError, match=f"max_tokens: must be a whole number from 1, got {max_tokens}"
    ):
        reply("Hi<turn|>", max_tokens=max_tokens)


def test_more_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_tokens: a prompt of 3 tokens .* context of 4096"):
        reply("Hi<turn|>", max_tokens=4096)
    with pytest.raises(ValueError, match=r"max_tokens: a prompt of 3 tokens"):
        reply("Hi<turn|>", max_tokens=10**400)
    reply("Hi<turn|>", max_tokens=4096 - LENGTH)


@pytest.mark.parametrize("length", [4096 - LENGTH + 1, 9999])
def test_a_prompt_that_leaves_no_room_is_to_blame_itself(length: int) -> None:
    message = f"^prompt: the prompt is {length} tokens and the context holds 4096, .* takes 8;"
    with pytest.raises(ValueError, match=message):
        reply("Hi<turn|>", max_tokens=1, prompt=[5] * length)
    reply("Hi<turn|>", max_tokens=1, prompt=[5] * (4096 - LENGTH))


@pytest.mark.parametrize("seed", [-1, 2**64, True, 1.0, "1", None])
def test_seeds_are_64_bits(seed: Any) -> None:
    network: Any = ScriptedNetwork(script("Hi<turn|>", LENGTH), LENGTH)
    with pytest.raises(
        ValueError, match=r"^seed: must be a whole number from 0 to 2\*\*64 - 1, got"
    ):
        generate(network, torch.tensor(PROMPT), REFERENCE, Limits(64, END_IDS), seed=seed)
    generate(network, torch.tensor(PROMPT), REFERENCE, Limits(64, END_IDS), seed=2**64 - 1)


def test_canvas_lengths() -> None:
    with pytest.raises(ValueError, match="canvas_length: 9 is longer than the 8"):
        reply("Hi<turn|>", config=SamplerConfig(canvas_length=9))
    _, _, outcome = reply("abcde", max_tokens=5, config=SamplerConfig(canvas_length=5))
    assert text_of(outcome) == "abcde" and outcome.stats.canvases == 1
    _, events, _ = reply("Hi<turn|>", config=SamplerConfig(canvas_length=4))
    assert {len(e.token_ids) for e in events if isinstance(e, Draft)} == {4}


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_per_call_choices_reach_every_canvas(temperature: float) -> None:
    seen: list[tuple[int, int]] = []

    class Spy:
        def temperature(self, step: int, max_steps: int) -> float:
            seen.append((step, max_steps))
            return LinearTemperature().temperature(step, max_steps)

    config = SamplerConfig(temperature=temperature, schedule=Spy(), max_steps=9)
    reply("Hello, world!<turn|>", config=config)
    assert seen[:9] == [(step, 9) for step in range(1, 10)]  # beforehand: what fails, fails there
    assert seen[9:] == seen[:9] * 2  # a table for each canvas


def test_end_tokens_may_be_any() -> None:
    _, _, outcome = reply("a<turn|>b.cd", max_tokens=8, end_ids=(VOCABULARY["."],))
    assert outcome.token_ids == [VOCABULARY["a"], END, VOCABULARY["b"]]
