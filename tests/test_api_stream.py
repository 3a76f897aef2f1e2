"""Streams and replies on a network whose text is written beforehand: order of events, thoughts,
tool calls, stop strings and ends, over canvases of a few tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.scripted_model import END, ScriptedNetwork, counted, scripted, tokenizer

from sfumato import Done, Draft, Model, Reply, SamplerConfig, Settled
from sfumato.text.calls import ToolCall
from sfumato.text.tokenizer import Marker, Tokenizer

THINKING = "<|channel>thought\nLet me see: 2 + 2.<channel|>It is 4.<turn|>"
CALLING = (
    "<|channel>thought\nHm.<channel|>One moment."
    '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><turn|>'
)


def events(model: Model, **options: Any) -> tuple[list[Draft | Settled], Reply]:
    *others, last = model.stream("?", **options)
    assert isinstance(last, Done)
    assert not any(isinstance(event, Done) for event in others)
    return others, last.reply  # type: ignore[return-value]


def commits(seen: list[Draft | Settled]) -> list[Settled]:
    return [event for event in seen if isinstance(event, Settled)]


def joined(seen: list[Draft | Settled]) -> tuple[str, str]:
    """The answer and the thought that the commits add up to."""
    return "".join(c.text for c in commits(seen)), "".join(c.thought for c in commits(seen))


def test_the_order_of_events() -> None:
    seen, _ = events(scripted("Hello, world!<turn|>", hesitate=1))
    kinds = [(type(event).__name__, event.canvas) for event in seen]
    draft, commit = "Draft", "Settled"
    assert kinds == [
        *[(draft, 0)] * 3, (commit, 0),
        *[(draft, 1)] * 3, (commit, 1),
    ]  # fmt: skip
    assert [event.step for event in seen if isinstance(event, Draft)] == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("length", [1, 3, 8, 100])
def test_a_reply_with_a_thought(length: int) -> None:
    seen, reply = events(scripted(THINKING, length))
    assert reply.text == "It is 4."
    assert reply.thought == "Let me see: 2 + 2."
    assert joined(seen) == (reply.text, reply.thought)
    assert reply.stop_reason == "eos" and reply.warnings == ()
    model = scripted(THINKING, length)
    assert reply.token_ids == model.tokenizer.encode(THINKING)[:-1]
    assert reply.token_ids == [i for c in commits(seen) for i in c.token_ids]


@pytest.mark.parametrize("length", [1, 5, 16])
def test_a_reply_with_a_tool_call(length: int) -> None:
    seen, reply = events(scripted(CALLING, length), max_tokens=200)
    assert reply.tool_calls == (ToolCall("weather", {"city": "Paris", "days": 3}),)
    assert (reply.text, reply.thought) == joined(seen) == ("One moment.", "Hm.")


def test_the_empty_thought_is_none() -> None:
    """With thinking off the model writes an empty thought itself."""
    seen, reply = events(scripted("<|channel>thought\n<channel|>Yes.<turn|>"))
    assert (reply.text, reply.thought) == ("Yes.", None)
    assert joined(seen) == ("Yes.", "")


@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three<turn|>", "two", "one "),
        ("one two three<turn|>", ["three", "two"], "one "),
        ("one two three<turn|>", "one", ""),
        ("one two three<turn|>", "three", "one two "),
        ("aababaabac<turn|>", "abac", "aababa"),
    ],
)
def test_stop_strings(length: int, text: str, stop: Any, expected: str) -> None:
    """Inside a canvas and over several, with nothing of them in any event's text."""
    model = scripted(text, length)
    seen, reply = events(model, stop=stop)
    assert (reply.text, reply.stop_reason) == (expected, "stop")
    assert joined(seen)[0] == expected
    assert model.tokenizer.decode(reply.token_ids) == expected
    assert reply.stats.output_tokens == len(reply.token_ids)


@pytest.mark.parametrize("length", [1, 3, 8])
def test_a_stop_string_that_does_not_come(length: int) -> None:
    """What was held back in case it would is given out in the end, at the latest."""
    seen, reply = events(scripted("wait, tw<turn|>", length), stop="two")
    assert (reply.text, reply.stop_reason) == ("wait, tw", "eos")
    assert joined(seen)[0] == "wait, tw"
    seen, reply = events(scripted("wait, tw" * 9, length), stop="two", max_tokens=8)
    assert (reply.text, joined(seen)[0], reply.stop_reason) == ("wait, tw",) * 2 + ("max_tokens",)


def test_a_stop_string_in_a_thought_is_text_like_any_other() -> None:
    """Or "\\n" would end every reply: the empty thought that a model begins with holds one."""
    text = "<|channel>thought\nA b.\n<channel|>One\ntwo<turn|>"
    seen, reply = events(scripted(text), stop="\n")
    assert (reply.text, reply.thought, reply.stop_reason) == ("One", "A b.", "stop")
    assert joined(seen) == ("One", "A b.")


def quoting(*parts: str) -> list[int]:
    """Ids of texts, in turn plain ones, which quote markers, and ones with special tokens."""
    encode = tokenizer().encode
    return [i for n, part in enumerate(parts) for i in encode(part, special=bool(n % 2))]


@pytest.mark.parametrize("length", [3, 500])
def test_quoted_markers_are_text(length: int) -> None:
    """In the answer, in a thought and in a call's arguments: only special tokens are markers."""
    code = "while x != '<eos>': <pad><mask>" + CALLING
    ids = quoting("", "<|channel>thought\n", code, "<channel|>", code, "<turn|>")
    seen, reply = events(scripted(ids, length), max_tokens=500)
    assert (reply.text, reply.thought, reply.tool_calls) == (code, code, ())
    assert joined(seen) == (code, code) and reply.warnings == ()
    ids = quoting("Hm.", '<|tool_call>call:f{a:<|"|>', code, '<|"|>}<tool_call|><turn|>')
    seen, reply = events(scripted(ids, length), max_tokens=500)
    assert (reply.text, reply.tool_calls) == ("Hm.", (ToolCall("f", {"a": code}),))


@pytest.mark.parametrize("length", [1, 8])
def test_stop_strings_are_text(length: int) -> None:
    """They are found in texts that quote markers, and not in special tokens."""
    ids = quoting("Say <turn|> and", "<|tool_call>call:f{}<tool_call|><pad>", " on.", "<turn|>")
    _, reply = events(scripted(ids, length), stop="turn|> a", max_tokens=500)
    assert (reply.text, reply.stop_reason) == ("Say <", "stop")
    _, reply = events(scripted(ids, length), stop=["<pad>", "_call", "and on"], max_tokens=500)
    assert (reply.text, reply.stop_reason) == ("Say <turn|> and on.", "eos")
    _, reply = events(scripted(ids, length), stop=Marker("<tool_call|>"), max_tokens=500)
    assert (reply.text, reply.stop_reason) == ("Say <turn|> and", "stop")
    assert reply.tool_calls == (ToolCall("f", {}),)


def test_stop_strings_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the reply, twice the work."""
    decoded, text_of = [0], Tokenizer.token_text

    def counted_text(self: Tokenizer, token: int) -> str:
        decoded[0] += 1
        return text_of(self, token)

    monkeypatch.setattr(Tokenizer, "token_text", counted_text)
    work = []
    for length in (400, 800):
        decoded[0] = 0
        model = scripted("some of " * (length // 8) + "<turn|>", 8)
        assert len(model.generate("?", stop=["never"], max_tokens=1000).token_ids) == length
        work.append(decoded[0])
    assert work[1] < 2.2 * work[0]


def test_drafts_have_a_text() -> None:
    """Of the canvas as it would be committed, special tokens left out, and only if asked."""
    seen, _ = events(scripted("Hello,<pad> <turn|>", 9))
    drafts = [event for event in seen if isinstance(event, Draft)]
    assert drafts and {draft.text for draft in drafts} == {"Hello, "}
    assert drafts[0] is seen[0] and "decode" not in repr(drafts[0])
    with pytest.raises(ValueError, match=r"text: .* Model\.stream"):
        _ = replace(drafts[0], decode=None).text


@pytest.mark.parametrize("text", ["1 <", "a <|tu", "x <|channel", "café", "日本"])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_the_end_of_a_reply_is_in_its_last_commit(text: str, length: int) -> None:
    """Starts of characters are held back no longer than that."""
    seen, reply = events(scripted(text + "<turn|>", length))
    assert joined(seen)[0] == reply.text == text


def test_a_character_cut_by_the_limit() -> None:
    seen, reply = events(scripted("日本<turn|>", length=4), max_tokens=4)
    assert joined(seen)[0] == reply.text == "日�"


@given(
    text=st.text(alphabet="ab<|>é \n", max_size=24),
    thought=st.text(alphabet="ab< \n", max_size=8),
    length=st.integers(1, 12),
    limit=st.integers(1, 60),
    stop=st.lists(st.text(alphabet="ab<\n", min_size=1, max_size=3), max_size=2),
)
def test_commits_always_add_up_to_the_reply(
    text: str, thought: str, length: int, limit: int, stop: list[str]
) -> None:
    reply_text = f"<|channel>thought\n{thought}<channel|>{text}<turn|>"
    seen, reply = events(scripted(reply_text, length), max_tokens=limit, stop=stop)
    assert joined(seen) == (reply.text, reply.thought or "")
    assert not any(string in reply.text for string in stop)
    assert len(reply.token_ids) <= limit
    alone = scripted(reply_text, 200).generate("?", max_tokens=limit, stop=stop)
    assert (alone.text, alone.thought) == (reply.text, reply.thought)
    assert alone.token_ids == reply.token_ids
    if len(reply.token_ids) < limit:  # else the end token may be in a canvas never begun
        assert alone.stop_reason == reply.stop_reason


def test_cancelling() -> None:
    def cancel_after(*answers: bool) -> tuple[list[Draft | Settled], Reply]:
        return events(scripted("Hello, world!<turn|>"), cancelled=counted(answers))

    seen, reply = cancel_after(True)
    assert (seen, reply.text, reply.stop_reason) == ([], "", "cancelled")
    seen, reply = cancel_after(*[False] * 5, True)
    assert (reply.text, reply.stop_reason) == ("Hello, w", "cancelled")
    assert joined(seen)[0] == "Hello, w" and len(seen) == 4
    assert reply.stats.output_tokens == len(reply.token_ids) == 8


@pytest.mark.parametrize("length", [3, 8, 100])
def test_an_end_that_is_ignored_does_not_come(length: int) -> None:
    model = scripted("Hello<turn|>, wor<eos>ld!", length)
    sampler = SamplerConfig(ignore_eos=True)
    seen, reply = events(model, max_tokens=15, sampler=sampler)
    assert joined(seen)[0] == reply.text and reply.text.startswith("Hello")
    assert len(reply.token_ids) == 15 and reply.stop_reason == "max_tokens"
    assert not {0, *model.end_ids} & set(reply.token_ids)


def test_a_stream_may_be_left_early() -> None:
    model = scripted("Hello, world!<turn|>")
    stream = model.stream("?")
    assert isinstance(next(stream), Draft)
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(StopIteration):
        next(stream)
    for _ in model.stream("?"):
        break
    assert model.generate("?").text == "Hello, world!"


def test_two_streams_at_once_do_not_mix() -> None:
    model = scripted("Hello, world!<turn|>")
    texts = ["", ""]
    for pair in zip(model.stream("a"), model.stream("b", seed=5), strict=True):
        for i, event in enumerate(pair):
            texts[i] += event.text if isinstance(event, Settled) else ""
    assert texts == ["Hello, world!"] * 2


def test_commits_say_how_they_ended() -> None:
    seen, reply = events(scripted("Hello, world!<turn|>"), sampler=SamplerConfig(max_steps=1))
    assert [c.convergence for c in commits(seen)] == ["step_cap", "step_cap"]
    assert reply.stats.convergence == ["step_cap", "step_cap"]


def test_warnings_reach_the_reply() -> None:
    reply = scripted("x" * 16 + "<|tool_call>oops<tool_call|><turn|>", 16).generate("?")
    repeats, call = reply.warnings
    assert repeats.startswith("canvas 0: ") and "repeats" in repeats
    assert "tool call could not be read" in call
    assert reply.text == "x" * 16  # and nothing is cut


def test_what_the_network_is_given() -> None:
    model = scripted("Hello, world!<turn|>")
    network: Any = model.network
    assert isinstance(network, ScriptedNetwork)
    reply = model.generate(messages=[{"role": "user", "content": "Hi <turn|>"}])
    (slot,) = network.slots
    prompt = model.tokenizer.decode(slot.encoded[0], skip_special=False)
    assert prompt == "<bos><|turn>user\nHi <turn|><turn|>\n<|turn>model"
    assert slot.encoded[0].count(END) == 1  # what a user typed is plain text
    assert reply.stats.prompt_tokens == len(slot.encoded[0])
    assert len(slot.encoded) == 2  # the prompt and the first canvas; nothing follows the second


def test_figures_of_a_reply() -> None:
    stats = scripted("Hello, world!<turn|>").generate("?").stats
    assert (stats.output_tokens, stats.canvases, stats.steps) == (13, 2, [2, 2])
    assert stats.tokens_per_forward == 13 / 4
    assert stats.first_draft_s is not None
    assert 0 < stats.prefill_s <= stats.first_draft_s <= stats.total_s
