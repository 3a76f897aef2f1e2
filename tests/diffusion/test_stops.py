"""Stop strings: where they cut, in text and in ids, and what is held back in case one comes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfumato.diffusion.stops import StopStrings

PIECES = ["a", "b", "ab", "ba", "x", "abab", " "]


def decode(ids: list[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def test_none_and_one_alone() -> None:
    assert StopStrings(None, decode).strings == StopStrings((), decode).strings == ()
    assert StopStrings("ab", decode).strings == StopStrings(["ab"], decode).strings == ("ab",)


@pytest.mark.parametrize("stop", [5, True, "", [""], [5], ["a", None], b"ab", {"a": 1}])
def test_what_is_no_strings_is_refused(stop: Any) -> None:
    with pytest.raises(ValueError, match=r"stop: must be non-empty strings, one or a list, got"):
        StopStrings(stop, decode)


texts = st.text(alphabet="abx ", max_size=30)
stops = st.lists(st.text(alphabet="abx ", min_size=1, max_size=4), max_size=3)


@given(texts, stops)
def test_cut(text: str, strings: list[str]) -> None:
    cut = StopStrings(strings, decode).cut(text)
    assert text.startswith(cut)
    assert not any(string in cut for string in strings)
    for end in range(len(text) + 1):  # as if it came by characters
        held = [string for string in strings if text[:end].endswith(string)]
        if held:
            assert len(cut) == end - max(map(len, held))
            return
    assert cut == text


@given(st.lists(texts, max_size=6), stops)
def test_what_is_final_stays_final(pieces: list[str], strings: list[str]) -> None:
    """However the text comes, no part is shown that a stop string later takes away, and no more
    is held back than could be the start of one."""
    stop = StopStrings(strings, decode)
    whole = stop.cut("".join(pieces))
    so_far, shown = "", ""
    for piece in pieces:
        so_far += piece
        final = stop.final(so_far)
        assert final.startswith(shown) and whole.startswith(final)
        shown = final
        held = stop.cut(so_far)[len(final) :]
        assert not held or any(string.startswith(held) for string in strings)
        if any(string in so_far for string in strings):
            return  # and no more text comes


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=20), stops)
def test_kept_ids_lie_wholly_before(ids: list[int], strings: list[str]) -> None:
    stop = StopStrings(strings, decode)
    kept, text = stop.kept_ids(ids), decode(ids)
    if not any(string in text for string in strings):
        assert kept is None
        return
    assert kept is not None
    end = len(stop.cut(text))
    assert len(decode(ids[:kept])) <= end
    assert len(decode(ids[: kept + 1])) > end


def test_one_string_is_as_good_as_a_list() -> None:
    assert StopStrings("ab", decode).cut("xxabab") == "xx"
    assert StopStrings((), decode).final("abab") == "abab"


@pytest.mark.parametrize("stop", ["", ["a", ""], [3]])
def test_nonsense_is_refused(stop: object) -> None:
    if stop == "":
        stop = [""]
    with pytest.raises(ValueError, match="stop: must be non-empty strings"):
        StopStrings(stop, decode)  # type: ignore[arg-type]


def test_hidden_text_holds_no_stop_string() -> None:
    def hide(text: str) -> str:
        return re.sub(r"\[.*?(\]|$)", lambda found: "\0" * len(found[0]), text)

    stop = StopStrings(["b"], decode, hide)
    assert stop.cut("[ab]ab") == "[ab]a"
    assert stop.final("[b") == "[b"
    assert stop.cut("b[b]") == ""
