from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.pieces import MARKERS, pieces

from sfumato.text.calls import ToolCall
from sfumato.text.reply import Delta, ParsedReply, Region, ReplyParser, parse_reply
from sfumato.text.tokenizer import Marker, Piece

CALL = '<|tool_call>call:f{a:<|"|>x<|"|>,n:3,t:true,l:[1],o:{k:null}}<tool_call|>'
CALLED = ToolCall("f", {"a": "x", "n": 3, "t": True, "l": [1], "o": {"k": None}})


BEGINS = {False: Region.ANSWER, True: Region.THOUGHT}


def parse(text: str, in_thought: bool = False) -> ParsedReply:
    """A reply whose markers are special tokens."""
    return parse_reply(pieces(text), MARKERS, BEGINS[in_thought])


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
    assert parse(text) == expected


def test_a_prompt_that_opened_the_thought() -> None:
    expected = ParsedReply("Hm", "Yes", ())
    assert parse("Hm<channel|>Yes", in_thought=True) == expected
    assert parse("thought\nHm<channel|>Yes", in_thought=True) == expected
    assert parse("Yes", in_thought=True) == ParsedReply("Yes", "", ())


def test_an_unreadable_call_is_a_warning_and_nothing_else() -> None:
    reply = parse('a<|tool_call>call:f{a:<|"|>x<tool_call|>b<|tool_call>call:g{}<tool_call|>')
    assert (reply.text, reply.tool_calls) == ("ab", (ToolCall("g", {}),))
    assert len(reply.warnings) == 1
    assert "a tool call could not be read (expected a text that ends with" in reply.warnings[0]


def test_a_call_that_was_cut_off_is_not_made() -> None:
    expected = '<|tool_call>call:delete{path:<|"|>/a<|"|>,n:3}'
    for end in range(len("<|tool_call>"), len(expected)):
        reply = parse(expected[:end])
        assert (reply.text, reply.tool_calls) == ("", ())
        assert reply.warnings


def test_text_that_looks_like_markers_is_text() -> None:
    quoted = "".join(MARKERS.tokens) + CALL
    assert parse_reply([quoted], MARKERS) == ParsedReply(None, quoted, ())
    thought = [Marker("<|channel>"), f"thought\n{quoted}", Marker("<channel|>"), "if '<eos>' in x:"]
    assert parse_reply(thought, MARKERS) == ParsedReply(quoted, "if '<eos>' in x:", ())


def test_quoted_quotes_inside_a_call() -> None:
    """The token ends a text; characters that look like it are in the text."""
    quote, ends = Marker('<|"|>'), Marker("<tool_call|>")
    call = [Marker("<|tool_call>"), "call:f{a:", quote, '<|"|>x<tool_call|><eos>', quote, "}", ends]
    assert parse_reply(call, MARKERS).tool_calls == (
        ToolCall("f", {"a": '<|"|>x<tool_call|><eos>'}),
    )
    call = [Marker("<|tool_call>"), 'call:f{a:<|"|>x<|"|>}', ends]
    assert parse_reply(call, MARKERS).tool_calls == ()
    (warning,) = parse_reply(call, MARKERS).warnings
    assert warning.endswith("""(expected a value at character 9): 'call:f{a:<|"|>x<|"|>}'""")
    call = [Marker("<|tool_call>"), "f{a:", quote, "x", quote, "b", ends]
    (warning,) = parse_reply(call, MARKERS).warnings
    assert warning.endswith("""at character 15): 'f{a:<|"|>x<|"|>b'""") and warning.isascii()


def test_special_tokens_without_a_meaning_vanish() -> None:
    """Wherever they stand, those of other formats too."""
    noise = [Marker("<pad>"), Marker("<|start|>")]
    assert parse_reply(["a", *noise, "b"], MARKERS).text == "ab"
    call = [Marker("<|tool_call>"), "call:f{a:1", *noise, "}", Marker("<tool_call|>")]
    assert parse_reply(call, MARKERS).tool_calls == (ToolCall("f", {"a": 1}),)


def test_events_come_in_order_and_as_soon_as_they_are_known() -> None:
    parser = ReplyParser(MARKERS)
    assert parser.feed(pieces("<|channel>thou")) == []
    assert parser.feed(["ght\nHm. "]) == [Delta("thought", "Hm.")]
    assert parser.feed(pieces("So\n<channel|>Ye")) == [
        Delta("thought", " So"),
        Delta("answer", "Ye"),
    ]
    assert parser.feed(["s <"]) == [Delta("answer", "s <")]
    assert parser.feed(pieces("3" + CALL[:27])) == [Delta("answer", "3")]
    assert parser.feed(pieces(CALL[27:] + "<bos>ok")) == [CALLED, Delta("answer", "ok")]
    assert parser._region is not Region.NOTHING
    assert parser.flush() == []
    assert parser.finish() == ParsedReply("Hm. So", "Yes <3ok", (CALLED,))


def test_nothing_comes_after_the_end() -> None:
    parser = ReplyParser(MARKERS)
    parser.feed(pieces("a<turn|>b"))
    assert parser._region is Region.NOTHING
    assert parser.feed(pieces("c<|channel>thought\nd" + CALL)) == []
    assert parser.finish() == ParsedReply(None, "a", ())


def test_ends_can_be_ignored() -> None:
    parser = ReplyParser(MARKERS, ignore_ends=True)
    deltas = parser.feed(pieces("a<turn|>b<eos><|channel>thought\nc<|tool_response>d<channel|>e"))
    assert deltas == [Delta("answer", "ab"), Delta("thought", "cd"), Delta("answer", "e")]
    assert parser._region is not Region.NOTHING
    assert parser.finish() == ParsedReply("cd", "abe", ())


_markers = st.sampled_from(MARKERS.tokens).map(Marker)
_texts = st.sampled_from(
    [*MARKERS.tokens, CALL, "thought\n", "thought", "a", " ", "\n", "<", ">", "|", "<tu",
     "call:f{}", "call:f", "{a:1}", "<|", "|>", "\u2003", "é"]
)  # fmt: skip
_replies = st.lists(_markers | _texts | st.just(CALL).map(pieces), max_size=14).map(
    lambda parts: [p for part in parts for p in (part if isinstance(part, list) else [part])]
)


def _cut(reply: list[Piece], sizes: list[int]) -> Iterator[Piece]:
    """The reply with its texts cut, into parts of these sizes in turn."""
    turn = cycle(sizes)
    for piece in reply:
        if isinstance(piece, Marker):
            yield piece
            continue
        at = 0
        while at < len(piece):
            size = next(turn)
            yield piece[at : at + size]
            at += size


@given(_replies, st.lists(st.integers(1, 9), min_size=1, max_size=12), st.booleans())
def test_cuts_do_not_matter(reply: list[Piece], sizes: list[int], in_thought: bool) -> None:
    expected = parse_reply(reply, MARKERS, BEGINS[in_thought])
    for size in (sizes, [1]):
        parser = ReplyParser(MARKERS, BEGINS[in_thought])
        events = [event for piece in _cut(reply, size) for event in parser.feed([piece])]
        events += parser.flush()
        assert parser.finish() == expected
        joined = {"thought": "", "answer": ""}
        for event in events:
            if isinstance(event, Delta):
                assert event.text
                joined[event.kind] += event.text
        assert joined == {"thought": expected.thought or "", "answer": expected.text}
        assert tuple(e for e in events if isinstance(e, ToolCall)) == expected.tool_calls


@given(st.text())
def test_text_without_markers_is_the_answer(text: str) -> None:
    assert parse_reply([text], MARKERS) == ParsedReply(None, text, ())


@pytest.mark.parametrize(
    "unit", ["a", "<", ">", "<|", "<bos>", "<bos>a", "<|tool_call>", "<|channel>", "<|channel>a",
             "<|tool_call>{<tool_call|>", "<|tool_call>[", " ", "<|channel>\n", '<|tool_call><|"|>']
)  # fmt: skip
def test_long_replies_take_linear_time(unit: str) -> None:
    text = pieces(unit * (400_000 // len(unit)))
    start = time.perf_counter()
    expected = parse_reply(text, MARKERS)
    parser = ReplyParser(MARKERS)
    for piece in _cut(text, [7]):
        parser.feed([piece])
    assert parser.finish() == expected
    assert time.perf_counter() - start < 20  # about a second; squared: hours
