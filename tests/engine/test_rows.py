"""Thinking budgets, empty answers and openings, on a network whose text is written beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.support.scripted_engine import LENGTH, Script, engine, run
from tests.support.scripted_model import END, VOCABULARY, tokenizer

from sfumato.api import Reply
from sfumato.engine import Draft, Event, Finished, Request, Settled, TooLarge

CLOSES = VOCABULARY["<channel|>"]
MUSING = "<|channel>thought\n" + "hm " * 100
ANSWER = "It is 4.<turn|>"


def encoded(text: str) -> list[int]:
    return tokenizer().encode(text)


def muses(reply: list[int]) -> list[int]:
    """Thinks for ever, and answers once the thought is closed for it."""
    if CLOSES in reply:
        return encoded(ANSWER)[len(reply) - reply.index(CLOSES) - 1 :][:LENGTH]
    return encoded(MUSING)[len(reply) :][:LENGTH]


def answered(
    script: Script, config: Mapping[str, Any] = {}, **how: Any
) -> tuple[Reply, Finished, list[Event]]:
    serving, _ = engine(script, **config)
    events: list[Event] = []
    handle = serving.submit(script.request(**how), events.append)
    run(serving)
    assert isinstance(handle.terminal, Finished)
    return handle.result(), handle.terminal, events


@pytest.mark.parametrize("budget", [0, 1, 6, 7, 8, 20, 33])
def test_a_thought_ends_at_its_budget(budget: int) -> None:
    reply, end, events = answered(
        Script(40, 5, says=muses), max_tokens=200, max_thinking_tokens=budget
    )
    assert (reply.text, reply.stop_reason) == ("It is 4.", "eos")
    assert end.account.thought_tokens == budget
    kept = len(encoded("<|channel>thought\n")) + budget if budget else 1  # the header is no thought
    assert reply.token_ids == [*encoded(MUSING)[:kept], CLOSES, *encoded("It is 4.")]
    assert reply.thought == (MUSING[18 : 18 + budget].strip() or None)
    assert any("thought was ended" in warning for warning in reply.warnings)
    commits = [event for event in events if isinstance(event, Settled)]
    assert "".join(commit.text for commit in commits) == reply.text
    assert "".join(commit.thought for commit in commits) == (reply.thought or "")


def test_a_budget_beyond_the_reply_leaves_room_to_answer() -> None:
    reply, _, _ = answered(Script(40, 5, says=muses), max_tokens=60, max_thinking_tokens=512)
    assert reply.text == "It is 4."
    assert len(reply.token_ids) <= 60


@pytest.mark.parametrize("most", [2, 3, 8, 16, 17, 24, 25, 60, 200])
def test_without_a_budget_an_answer_has_room(most: int) -> None:
    reply, _, _ = answered(Script(40, 5, says=muses), max_tokens=most)
    room = most // 2
    assert len(reply.token_ids) <= most
    if most > 3:  # what the two markers leave
        left = most - reply.token_ids.index(CLOSES) - 1
        assert reply.text == "It is 4."[:left] and left >= room


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("<|channel>thought\nLet me see.<channel|>It is 4, as two and two are.<turn|>", 60),
        ("<|channel>thought\n<channel|>Yes.<turn|>", 30),
        ("No thought at all.<turn|>", 19),
        # 6 tokens of thought, where 4 would leave half for the answer: they are there now.
        ("Hm.<|channel>thought\nabcdef<channel|>Yes.<turn|>", 27),
    ],
)
def test_a_thought_that_ends_by_itself_is_left_alone(text: str, most: int) -> None:
    reply, _, _ = answered(Script(40, 5, text), max_tokens=most)
    assert reply.token_ids == encoded(text)[:-1] and reply.warnings == ()


@pytest.mark.parametrize("most", [8, 17, 60, 200])
def test_a_thought_ends_at_the_same_token_in_slots_of_every_size(most: int) -> None:
    exact, end, _ = answered(Script(40, 5, says=muses), {"context": 1}, max_tokens=most)
    assert end.account.context == 5 + most - 1  # no position to spare
    roomy, _, _ = answered(Script(40, 5, says=muses), {"context": 512}, max_tokens=most)
    assert exact.token_ids == roomy.token_ids and CLOSES in exact.token_ids


def test_a_budget_that_was_asked_for_holds_for_every_thought() -> None:
    text = "<|channel>thought\nabcd<channel|>Well."
    reply, end, _ = answered(Script(40, 5, text), max_tokens=60, max_thinking_tokens=2)
    assert end.account.thought_tokens == 2
    assert reply.thought is not None and reply.thought.startswith("ab")


def test_what_a_thought_is_the_markers_say() -> None:
    """Their text does not; and a call ends a thought, as it does in the reply that is shown."""
    encode = tokenizer().encode
    quoted = "a<channel|>b<eos>"
    ids = encode("<|channel>thought\n") + encode(quoted, special=False)
    ids += encode("<|tool_call>call:f{}<tool_call|>Done.<turn|>")
    script = Script(40, 5, says=lambda reply: ids[len(reply) :][:LENGTH])
    reply, end, _ = answered(script, max_tokens=200, max_thinking_tokens=50)
    assert (reply.thought, reply.text) == (quoted, "Done.")
    assert [call.name for call in reply.tool_calls] == ["f"] and reply.warnings == ()
    assert end.account.thought_tokens == len(quoted)


def test_a_stop_string_goes_before_a_thought_that_is_cut() -> None:
    text = "Stop.<|channel>thought\n" + "hm " * 100
    reply, _, _ = answered(Script(40, 5, text), max_tokens=200, max_thinking_tokens=0, stop="op")
    assert (reply.text, reply.thought, reply.stop_reason) == ("St", None, "stop")
    assert reply.stats.canvases == 1
    assert reply.token_ids == encoded("St")


def test_drafts_have_a_text() -> None:
    _, _, events = answered(Script(40, 5, "Hi.<pad><turn|>"), drafts=True)
    assert {event.text for event in events if isinstance(event, Draft)} == {"Hi."}


def attempts(*texts: str) -> Callable[[list[int]], list[int]]:
    """What each draw of the first canvas says; each takes two steps."""
    question_count = [0]

    def says(reply: list[int]) -> list[int]:
        question_count[0] += 1
        return encoded(texts[min((question_count[0] - 1) // 2, len(texts) - 1)])[:LENGTH]

    return says


def test_an_empty_answer_is_drawn_again() -> None:
    script = Script(40, 5, says=attempts("<turn|>", "Hi!<turn|>"))
    reply, end, events = answered(script, drafts=True)
    assert (reply.text, reply.stop_reason) == ("Hi!", "eos")
    assert reply.warnings == ("canvas 0: the answer was empty and was drawn again",)
    assert (end.account.retries, end.account.steps) == (1, (4,))
    assert (reply.stats.steps, reply.stats.canvases) == ([4], 1)
    assert end.account.canvas_tokens == 2 * LENGTH
    assert sum(isinstance(event, Settled) for event in events) == 1


def test_a_broken_tool_call_is_no_empty_answer() -> None:
    text = "<|tool_call>x<turn|>"
    reply, end, _ = answered(Script(40, 5, says=attempts(text, "Hi!<turn|>")))
    assert (reply.text, reply.token_ids) == ("", encoded(text)[:-1])
    assert end.account.retries == 0 and "could not be read" in reply.warnings[0]


@pytest.mark.parametrize(
    "empty", ["<turn|>", " \n<turn|>", "<pad><pad><turn|>", "<|channel><turn|>"]
)
def test_what_counts_as_empty(empty: str) -> None:
    reply, end, _ = answered(Script(40, 5, says=attempts(empty, "Hi!<turn|>")))
    assert (reply.text, end.account.retries) == ("Hi!", 1)
    reply, end, _ = answered(Script(40, 5, says=attempts(empty)), retry_empty=False)
    assert (reply.text.strip(), end.account.retries, reply.warnings) == ("", 0, ())


@pytest.mark.parametrize("text", ["<eos>", "<pad>", "<|channel>"])
def test_a_quoted_marker_is_no_empty_answer(text: str) -> None:
    ids = [*tokenizer().encode(text, special=False), END]
    reply, end, _ = answered(Script(40, 5, says=lambda reply: ids[len(reply) :][:LENGTH]))
    assert (reply.text, end.account.retries) == (text, 0)


def test_a_tool_call_is_an_answer() -> None:
    text = "<|tool_call>call:now{}<tool_call|><turn|>"
    reply, end, events = answered(Script(40, 5, text))
    assert end.account.retries == 0 and reply.tool_calls[0].name == "now"
    calls = [call for event in events if isinstance(event, Settled) for call in event.tool_calls]
    assert tuple(calls) == reply.tool_calls


def test_an_opening_is_pinned() -> None:
    """Whatever the network would rather say there."""
    script = Script(40, 5, "0123456789abcdef!<turn|>")
    reply, _, _ = answered(script, opening="<|tool_call>call:f{}<tool_call|>", max_tokens=40)
    calls = [(call.name, call.arguments) for call in reply.tool_calls]
    assert calls == [("f", {})]
    opening = encoded("<|tool_call>call:f{}<tool_call|>")
    assert reply.token_ids[: len(opening)] == opening
    assert reply.token_ids[len(opening) :] == encoded("0123456789abcdef!")[len(opening) :]
    assert reply.token_ids[-1] != END


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, r"prompt, messages, ids: give exactly one"),
        ({"prompt": "a", "ids": [1]}, r"prompt, messages, ids: give exactly one"),
        ({"ids": []}, r"ids: must be at least one"),
        ({"ids": [1, "2"]}, r"ids: .* whole numbers"),
        ({"ids": [-1]}, r"ids: must lie in 0\.\."),
        ({"ids": [10**6]}, r"ids: must lie in 0\.\."),
        ({"prompt": "a", "max_tokens": 0}, r"max_tokens: "),
        ({"prompt": "a", "max_tokens": 10**6}, r"max_tokens: .* context"),
        ({"prompt": "a" * 5000}, r"prompt: .* context"),
        ({"prompt": "a", "seed": -1}, r"seed: "),
        ({"prompt": "a", "seed": 1.5}, r"seed: "),
        ({"prompt": "a", "stop": [""]}, r"stop: "),
        ({"prompt": "a", "sampler": "threshold"}, r"sampler: must be a SamplerConfig"),
        ({"prompt": "a", "opening": 5}, r"opening: must be text"),
        ({"prompt": "a", "opening": "abc", "max_tokens": 3}, r"opening: .* raise max_tokens"),
        ({"prompt": "a", "max_thinking_tokens": -1}, r"max_thinking_tokens: "),
        ({"prompt": "a", "timeout_s": 0}, r"timeout_s: "),
        ({"messages": [{"role": "user"}]}, r"messages"),
        ({"messages": []}, r"messages"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(how: dict[str, Any], message: str) -> None:
    serving, _ = engine()
    with pytest.raises(ValueError, match=message):
        serving.submit(Request(**how))
    assert not serving.step()


@pytest.mark.parametrize("how", [{"prompt": "a", "max_tokens": 10**6}, {"prompt": "a" * 5000}])
def test_what_exceeds_the_models_context_is_too_large(how: dict[str, Any]) -> None:
    serving, _ = engine()
    with pytest.raises(TooLarge, match="context"):
        serving.submit(Request(**how))
