from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from sfumato.cli.display import Wrapped, wrap


def shown(wrapped: Wrapped) -> list[str]:
    return ["".join(part for _, part in line) for line in wrapped.lines]


def test_breaks_before_words() -> None:
    pieces = ["The", " quick", " br", "own", " fox"]
    assert shown(wrap(pieces, 14, frozenset())) == ["The quick", "brown fox"]


def test_characters_as_tokens_break_before_words_too() -> None:
    assert shown(wrap(list("one two three"), 8, frozenset())) == ["one two", "three"]


def test_newlines_are_line_breaks() -> None:
    assert shown(wrap(["12", "\n", "3", "4\n\n", "  x"], 10)) == ["12", "34", "", "  x"]


def test_a_word_wider_than_the_line_is_cut() -> None:
    assert shown(wrap(["abcdefghij"], 4)) == ["abcd", "efgh", "ij"]


def test_first_draft_leaves_room_to_grow() -> None:
    pieces = ["aaa"] + [" bbb"] * 9
    assert max(map(len, shown(wrap(pieces, 16)))) <= 14
    assert max(map(len, shown(wrap(pieces, 16, frozenset())))) == 15


def test_a_longer_word_moves_nothing_to_other_lines() -> None:
    pieces = [" word"] * 12
    first = wrap(pieces, 32)
    pieces[2] = " words"
    second = wrap(pieces, 32, first.breaks)
    assert second.breaks == first.breaks
    pieces[2] = " we"
    assert wrap(pieces, 32, second.breaks).breaks == first.breaks


@given(
    st.lists(st.text(st.sampled_from("ab 漢\n"), max_size=9), max_size=30),
    st.integers(4, 20),
    st.none() | st.frozensets(st.integers(0, 30)),
)
def test_no_line_is_too_wide_and_nothing_but_spaces_is_lost(
    pieces: list[str], width: int, earlier: frozenset[int] | None
) -> None:
    wrapped = wrap(pieces, width, earlier)
    assert all(cell_len(line) <= width for line in shown(wrapped))
    assert "".join("".join(pieces).split()) == "".join("".join(shown(wrapped)).split())
    for line in wrapped.lines:
        assert [index for index, _ in line] == sorted(index for index, _ in line)
