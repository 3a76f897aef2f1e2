from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfumato.text.reply import MARKERS, Delta, ParsedReply, ReplyParser, ToolCall, parse_reply

CALL = '<|tool_call>call:f{a:<|"|>x<|"|>,n:3,t:true,l:[1],o:{k:null}}<tool_call|>'
CALLED = ToolCall("f", {"a": "x", "n": 3, "t": True, "l": [1], "o": {"k": None}})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ParsedReply(None, "", ())),
        ("Hello.<turn|>", ParsedReply(None, "Hello.", ())),
        ("<|channel>thought\nHm.\n<channel|>Yes<turn|>", ParsedReply("Hm.", "Yes", ())),
        ("<|channel>thought\n<channel|>Yes<turn|>", ParsedReply(None, "Yes", ())),
        ("<|channel>thought<channel|>Yes", ParsedReply(None, "Yes", ())),
        ("<|channel>thought\n \n<channel|>Yes", ParsedReply(None, "Yes", ())),
        ("<|channel><channel|>Yes", ParsedReply(None, "Yes", ())),
        ("<|channel>though<channel|>Yes", ParsedReply("though", "Yes", ())),
        ("<|channel>Let me see<channel|>Yes", ParsedReply("Let me see", "Yes", ())),
        ("<|channel>thought\nstill thinking", ParsedReply("still thinking", "", ())),
        ("<|channel>thought\ncut<turn|>", ParsedReply("cut", "", ())),
        (
            "<|channel>thought\na<channel|>b<|channel>thought\nc<channel|>d",
            ParsedReply("a\n\nc", "bd", ()),
        ),
        ("<channel|>Yes", ParsedReply(None, "Yes", ())),
        (" a\n<bos>b <eos>c<turn|>d", ParsedReply(None, " a\nb ", ())),
        ("a<|tool_response>b", ParsedReply(None, "a", ())),
        ("a <b> |> <|x|> c<", ParsedReply(None, "a <b> |> <|x|> c<", ())),
        (CALL, ParsedReply(None, "", (CALLED,))),
        (f"Wait.{CALL}{CALL}<|tool_response>x", ParsedReply(None, "Wait.", (CALLED, CALLED))),
        (f"<|channel>thought\nuse f{CALL}done", ParsedReply("use f", "done", (CALLED,))),
        (CALL.removesuffix("<tool_call|>"), ParsedReply(None, "", (CALLED,))),
        (CALL.removesuffix("<tool_call|>") + CALL, ParsedReply(None, "", (CALLED, CALLED))),
        ("<|tool_call>call:f(a=1)<tool_call|>", ParsedReply(None, "", (ToolCall("f", {"a": 1}),))),
    ],
)
def test_replies(text: str, expected: ParsedReply) -> None:
    assert parse_reply(text) == expected


def test_a_prompt_that_opened_the_thought() -> None:
    expected = ParsedReply("Hm", "Yes", ())
    assert parse_reply("Hm<channel|>Yes", in_thought=True) == expected
    assert parse_reply("thought\nHm<channel|>Yes", in_thought=True) == expected
    assert parse_reply("Yes", in_thought=True) == ParsedReply("Yes", "", ())


def test_an_unreadable_call_is_a_warning_and_nothing_else() -> None:
    reply = parse_reply('a<|tool_call>call:f{a:<|"|>x<tool_call|>b<|tool_call>call:g{}<tool_call|>')
    assert (reply.text, reply.tool_calls) == ("ab", (ToolCall("g", {}),))
    assert len(reply.warnings) == 1
    assert "a tool call could not be read (expected a text that ends with" in reply.warnings[0]


def test_a_call_that_was_cut_off_is_not_made() -> None:
    whole = '<|tool_call>call:delete{path:<|"|>/a<|"|>,n:3}'
    for end in range(len("<|tool_call>"), len(whole)):
        reply = parse_reply(whole[:end])
        assert (reply.text, reply.tool_calls) == ("", ())
        assert reply.warnings


def test_events_come_in_order_and_as_soon_as_they_are_known() -> None:
    parser = ReplyParser()
    assert parser.feed("<|chan") == []
    assert parser.feed("nel>thou") == []
    assert parser.feed("ght\nHm. ") == [Delta("thought", "Hm.")]
    assert parser.feed("So\n<channel|>Ye") == [Delta("thought", " So"), Delta("answer", "Ye")]
    assert parser.feed("s <") == [Delta("answer", "s ")]
    assert parser.feed("3" + CALL[:30]) == [Delta("answer", "<3")]
    assert parser.feed(CALL[30:] + "<bos>ok") == [CALLED, Delta("answer", "ok")]
    assert not parser.ended
    assert parser.feed("<tu") == []
    assert parser.flush() == [Delta("answer", "<tu")]
    assert parser.finish() == ParsedReply("Hm. So", "Yes <3ok<tu", (CALLED,))


def test_nothing_comes_after_the_end() -> None:
    parser = ReplyParser()
    parser.feed("a<turn|>b")
    assert parser.ended
    assert parser.feed("c<|channel>thought\nd" + CALL) == []
    assert parser.finish() == ParsedReply(None, "a", ())


def test_ends_can_be_ignored() -> None:
    parser = ReplyParser(ignore_ends=True)
    deltas = parser.feed("a<turn|>b<eos><|channel>thought\nc<|tool_response>d<channel|>e")
    assert deltas == [Delta("answer", "ab"), Delta("thought", "cd"), Delta("answer", "e")]
    assert not parser.ended
    assert parser.finish() == ParsedReply("cd", "abe", ())


_pieces = st.sampled_from(
    [*MARKERS, CALL, "thought\n", "thought", "a", " ", "\n", "<", ">", "|", "<tu", "rn|>", "<|tu",
     "rn>", "<e", "os>", "call:f{}", "call:f", "{a:1}", "<|", "|>", "\u2003", "é"]
)  # fmt: skip
_replies = st.lists(_pieces, max_size=14).map("".join)


@given(text=_replies, cuts=st.lists(st.integers(0, 200), max_size=12), in_thought=st.booleans())
def test_cuts_do_not_matter(text: str, cuts: list[int], in_thought: bool) -> None:
    whole = parse_reply(text, in_thought)
    for bounds in (sorted({0, len(text), *(c for c in cuts if c < len(text))}),
                   range(len(text) + 1)):  # fmt: skip
        parser = ReplyParser(in_thought)
        events = [event for a, b in pairwise(bounds) for event in parser.feed(text[a:b])]
        events += parser.flush()
        assert parser.finish() == whole
        joined = {"thought": "", "answer": ""}
        for event in events:
            if isinstance(event, Delta):
                assert event.text
                joined[event.kind] += event.text
        assert joined == {"thought": whole.thought or "", "answer": whole.text}
        assert tuple(e for e in events if isinstance(e, ToolCall)) == whole.tool_calls


@given(text=_replies, in_thought=st.booleans())
def test_no_marker_ever_shows(text: str, in_thought: bool) -> None:
    reply = parse_reply(text, in_thought)
    for marker in MARKERS:
        assert marker not in reply.text
        assert marker not in (reply.thought or "")


def test_dropping_a_marker_makes_no_other() -> None:
    assert parse_reply("a<tu<bos>rn|>b").text == "a<turn|b"
    assert parse_reply("a<tu<tu<bos>rn|>rn|>b<eos>").text == "a<tu<turn|rn|>b"


@given(st.text(st.characters(exclude_characters="<")))
def test_text_without_markers_is_the_answer(text: str) -> None:
    assert parse_reply(text) == ParsedReply(None, text, ())


@pytest.mark.parametrize(
    "unit", ["a", "<", ">", "<|", "<bos>", "<bos>a", "<|tool_call>", "<|channel>", "<|channel>a",
             "<|tool_call>{<tool_call|>", "<|tool_call>[", "<tu<bos>rn|>", " ", "<|channel>\n"]
)  # fmt: skip
def test_long_replies_take_linear_time(unit: str) -> None:
    text = unit * (400_000 // len(unit))
    start = time.perf_counter()
    whole = parse_reply(text)
    parser = ReplyParser()
    for i in range(0, len(text), 7):
        parser.feed(text[i : i + 7])
    assert parser.finish() == whole
    assert time.perf_counter() - start < 20  # about a second; squared: hours
