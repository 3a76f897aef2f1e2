"""Stop strings: where they cut, in text and in ids, and what is held back in case one comes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.pieces import MARKERS
from tests.support.scripted_model import VOCABULARY, tokenizer

from sfumato.text.reply import Region, StopCut, StopGate, StopSearch, StopStrings
from sfumato.text.tokenizer import Detokenizer, Marker, Piece

TOKENIZER = tokenizer()
SEARCHED = (Region.ANSWER, Region.CALL)


def test_none_and_one_alone() -> None:
    assert not StopStrings(None) and not StopStrings(())
    assert StopStrings("ab").strings == StopStrings(["ab"]).strings == ("ab",)
    assert StopStrings(Marker("<tool_call|>")).markers == {"<tool_call|>"}


@pytest.mark.parametrize("stop", [5, True, "", [""], [5], ["a", None], b"ab", {"a": 1}])
def test_what_is_no_strings_is_refused(stop: Any) -> None:
    with pytest.raises(ValueError, match=r"stop: must be non-empty strings, one or a list, got"):
        StopStrings(stop)


_ids = st.lists(
    st.sampled_from(
        [*"aabbx", "▁", "zq", "zq▁", "zq▁j", "<0xE2>", "<0x82>", "<0xAC>", "<pad>", "<eos>",
         "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"]
    ).map(VOCABULARY.__getitem__),
    max_size=24,
)  # fmt: skip
_stops = st.lists(
    st.text(alphabet="abx zqj€\ufffd<", min_size=1, max_size=5) | st.just(Marker("<tool_call|>")),
    max_size=3,
)
_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def _expected(reply: list[Piece], stop: list[str | Marker]) -> int | None:
    """Read by characters: how many come before what is complete first."""
    read, region, text = 0, Region.ANSWER, ""
    for piece in reply:
        if isinstance(piece, Marker):
            if piece in stop and region in SEARCHED:
                return read
            begun = region.begun_by(piece.text, MARKERS)
            region, text = (region, text) if begun is None else (begun, "")
            continue
        for character in piece:
            read, text = read + 1, text + character
            held = [s for s in stop if isinstance(s, str) and text.endswith(s)]
            if held and region in SEARCHED:
                return read - max(map(len, held))
    return None


def _text(reply: list[Piece]) -> str:
    return "".join(piece for piece in reply if isinstance(piece, str))


def _canvases(ids: list[int], sizes: list[int]) -> Iterator[list[int]]:
    at, turn = 0, cycle(sizes)
    while at < len(ids):
        size = next(turn)
        yield ids[at : at + size]
        at += size


@given(_ids, _stops, _sizes)
def test_what_passes_is_the_text_before_the_stop(
    ids: list[int], stop: list[str | Marker], sizes: list[int]
) -> None:
    """However the reply comes, what has passed stays, and no more is held back than could be the
    start of a stop string."""
    stops, pieces = StopStrings(stop), TOKENIZER.pieces(ids)
    end = _expected(pieces, stop)
    gate, detokenizer, read, passed = StopGate(stops, MARKERS), Detokenizer(TOKENIZER), "", []
    for canvas in _canvases(ids, sizes):
        came = detokenizer.pieces(canvas)
        read += _text(came)
        passed += gate.feed(came)
        held = read[:end][len(_text(passed)) :]
        assert not held or any(s.startswith(held) for s in stops.strings)
    passed += gate.feed(detokenizer.pieces((), last=True)) + gate.flush()
    assert _text(passed) == _text(pieces)[:end]
    markers = [piece for piece in passed if isinstance(piece, Marker)]
    assert markers == [piece for piece in pieces if isinstance(piece, Marker)][: len(markers)]
    if end is None:
        assert [*_joined(passed)] == pieces


def _joined(reply: list[Piece]) -> Iterator[Piece]:
    """Neighbouring texts made one."""
    text = ""
    for piece in [*reply, Marker("")]:
        if isinstance(piece, str):
            text += piece
        else:
            if text:
                yield text
            if piece.text:
                yield piece
            text = ""


@given(_ids, _stops, _sizes, _ids)
def test_kept_ids_lie_wholly_before(
    ids: list[int], stop: list[str | Marker], sizes: list[int], other: list[int]
) -> None:
    """Whatever canvases the reply comes in, and whatever others were drawn before them."""
    cut, reply, kept = StopCut(TOKENIZER, StopStrings(stop), MARKERS), list[int](), None
    for canvas in _canvases(ids, sizes):
        cut(reply, other)
        kept = cut(reply, canvas)
        reply = reply + canvas
        assert kept == cut(reply, [])
        if kept is not None:
            break
    # Bytes at the end may still become a character that no stop string is looked for in.
    end = _expected(Detokenizer(TOKENIZER).pieces(reply), stop)
    if end is None or kept is None:
        assert end is kept is None
        return
    assert len(_text(TOKENIZER.pieces(reply[:kept]))) <= end
    after = reply[kept]
    if after == VOCABULARY["<tool_call|>"]:
        assert Marker("<tool_call|>") in stop
    else:
        assert len(_text(TOKENIZER.pieces(reply[: kept + 1]))) > end


def test_no_characters_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the reply is twice the work, in characters that are searched and ids that are
    decoded."""
    work = {"searched": 0, "decoded": 0}
    scan, pieces = StopSearch._scan, Detokenizer.pieces

    def counted_scan(self: StopSearch, piece: str) -> None:
        work["searched"] += len(self._tail) + len(piece)
        scan(self, piece)

    def counted_pieces(self: Detokenizer, ids: Any, last: bool = False) -> list[Piece]:
        work["decoded"] += len(ids)
        return pieces(self, ids, last)

    monkeypatch.setattr(StopSearch, "_scan", counted_scan)
    monkeypatch.setattr(Detokenizer, "pieces", counted_pieces)
    calls = []
    for canvases in (50, 100):
        cut, reply = StopCut(TOKENIZER, StopStrings(["never", "\n\n"]), MARKERS), list[int]()
        for _ in range(canvases):
            added = TOKENIZER.encode("some of ")
            assert cut(reply, added) is None
            reply += added
        calls.append(dict(work))
        work.update(searched=0, decoded=0)
    for name in work:
        assert calls[1][name] <= 2.1 * calls[0][name]
    assert calls[1]["decoded"] <= 2 * len(reply)


def test_the_tail_is_no_longer_than_it_must_be() -> None:
    search = StopSearch(StopStrings(["abc"]), MARKERS)
    for piece in ["x" * 1000, "ab", Marker("<pad>"), "c"]:
        search.feed(piece)
    assert search.stop_at == search.final == 1000
    search = StopSearch(StopStrings(["abc"]), MARKERS)
    for piece in ["ab", Marker("<|tool_call>"), "cab", Marker("<tool_call|>"), "c"]:
        search.feed(piece)
    assert search.stop_at is None and search.final == 6
